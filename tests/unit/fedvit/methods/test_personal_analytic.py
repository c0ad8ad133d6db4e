"""The personal analytic head: the regression over everybody's images and the device's own, solved on the device."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods import make_method
from fedvit.methods.analytic import FITTED, GRAM, HELD_OUT, MOMENTS, RidgeSums, find_unit
from fedvit.methods.base import Images, ServerState, Upload
from fedvit.methods.personal_analytic import OWN, ROOT, WHITENED, PersonalAnalytic, solve_own, solve_whitened, whiten
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Tensors
from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.tiny import TINY_MODEL

WIDTH, CLASSES = 20, 4
MODEL = {"image_size": 8, "patch_size": 4, "width": WIDTH, "depth": 1, "heads": 2}
STRENGTH = 1e-3


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return build_vit(SMALL, CLASSES, seed=0, options=MODEL)


class Features:
    """Drawn features of a device, whose classes are told by a direction each; `turn` says how its classes look."""

    def __init__(self, seed: int, images: int, classes: tuple[int, ...], turn: float = 0.0) -> None:
        draw = np.random.default_rng(seed)
        directions = np.random.default_rng(99).normal(size=(2, CLASSES, WIDTH))
        self.labels = draw.choice(classes, images)
        centres = np.cos(turn) * directions[0] + np.sin(turn) * directions[1]
        self.values = draw.normal(size=(images, WIDTH)) + centres[self.labels]

    @property
    def sums(self) -> RidgeSums:
        return RidgeSums(self.values.T @ self.values, self.values.T @ np.eye(CLASSES)[self.labels])

    def as_sent(self, part: str, share: float = 1.0) -> dict[str, Tensor]:
        """The sums of a part of the device's images, divided by the number of all of them."""
        gram, moments = (value * share / len(self.labels) for value in (self.sums.gram, self.sums.moments))
        rows = [gram[first : first + 16, first:].ravel() / find_unit(GRAM, WIDTH) for first in range(0, WIDTH, 16)]
        sent = {GRAM: np.concatenate(rows), MOMENTS: moments / find_unit(MOMENTS, WIDTH)}
        return {f"{part}.{name}": torch.from_numpy(value).float() for name, value in sent.items()}


def publish(method: PersonalAnalytic, vit: PatchViT, devices: list[Features]) -> dict[str, Tensor]:
    """Return what the server publishes of the sums of these devices."""
    names = method.names_in(vit, "sums", "head")
    first = method.tensors(vit)
    state = ServerState({name: first[name].numpy() for name in names})
    uploads = []
    for place, device in enumerate(devices):
        sent: Tensors = {name: value.numpy() for name, value in device.as_sent(FITTED).items()}
        sent |= {name: np.zeros_like(state.tensors[name]) for name in names if name.startswith(HELD_OUT)}
        uploads.append(Upload(f"device-{place}", len(device.labels), "", partial(dict, sent)))
    context = make_context(vit)
    state, _ = method.server_rule(vit).close(state, uploads, context)
    return {name: torch.from_numpy(value) for name, value in state.tensors.items()}


def solve_directly(devices: list[Features], own: Features, weight: float) -> np.ndarray:
    """Return W of (G/N + lambda I + w G_k/n) W = M/N + w M_k/n, (D, C)."""
    total, images = devices[0].sums, len(devices[0].labels)
    for device in devices[1:]:
        total, images = total + device.sums, images + len(device.labels)
    gram, moments = total.gram / images, total.moments / images
    penalty = STRENGTH * np.trace(gram) / WIDTH * np.eye(WIDTH)
    gram_k, moments_k = own.sums.gram / len(own.labels), own.sums.moments / len(own.labels)
    return np.linalg.solve(gram + penalty + weight * gram_k, moments + weight * moments_k)


DEVICES = [Features(0, 60, (0, 1)), Features(1, 40, (2, 3)), Features(2, 50, (1, 2), turn=1.0)]


@pytest.mark.parametrize("weight", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("own", [DEVICES[2], Features(7, 30, (0, 3), turn=0.5)], ids=["known", "new"])
def test_a_device_solves_the_regression_with_its_own_sums(vit: PatchViT, own: Features, weight: float) -> None:
    """Also a device whose sums are not among everybody's."""
    method = PersonalAnalytic(lambdas=(STRENGTH,), own_weights=(weight,))
    tensors = publish(method, vit, DEVICES)
    nothing = {name: torch.zeros_like(value) for name, value in own.as_sent(HELD_OUT).items()}
    difference = solve_own({**tensors, **own.as_sent(FITTED), **nothing}, method.own_weights)
    got = (tensors["head.weight"] + difference).numpy().T
    np.testing.assert_allclose(got, solve_directly(DEVICES, own, weight), atol=2e-3)


def test_held_out_images_choose_the_weight(vit: PatchViT) -> None:
    """A small weight is right if the device's images look as everybody's do, otherwise a large one."""
    method = PersonalAnalytic(lambdas=(STRENGTH,), own_weights=(0.0, 30.0))
    others = [Features(seed, 400, (0, 1, 2, 3)) for seed in range(4)]
    for turn, weight in ((0.0, 0.0), (1.5, 30.0)):
        own, held = Features(11, 24, (0, 1), turn), Features(12, 24, (0, 1), turn)
        tensors = {**publish(method, vit, [*others, own]), **own.as_sent(FITTED), **held.as_sent(HELD_OUT)}
        difference = solve_own(tensors, method.own_weights)
        both = Features(11, 24, (0, 1), turn)
        both.values = np.concatenate([own.values, held.values])
        both.labels = np.concatenate([own.labels, held.labels])
        # the sums of both parts, each divided by 24 images
        wanted = solve_directly([*others, own], both, 2 * weight)
        np.testing.assert_allclose((tensors["head.weight"] + difference).numpy().T, wanted, atol=5e-3)


def test_without_held_out_images_the_weight_is_the_mean(vit: PatchViT) -> None:
    method = PersonalAnalytic(lambdas=(STRENGTH,), own_weights=(0.0, 0.5, 1.0))
    own = DEVICES[0]
    nothing = {name: torch.zeros_like(value) for name, value in own.as_sent(HELD_OUT).items()}
    tensors = {**publish(method, vit, DEVICES), **own.as_sent(FITTED), **nothing}
    torch.testing.assert_close(solve_own(tensors, method.own_weights), solve_own(tensors, (0.5,)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_inverse_is_exact_for_any_condition(scale: float) -> None:
    draw = np.random.default_rng(0)
    root = draw.normal(size=(WIDTH, 6))
    gram, moments, start = scale * root @ root.T / 6, draw.normal(size=(WIDTH, 3)), draw.normal(size=(WIDTH, 3))
    got = solve_whitened(*(torch.from_numpy(value).double() for value in (gram, moments, start)),
                         torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(-1, 1, 1))  # fmt: skip
    np.testing.assert_allclose(got[0].numpy(), start, atol=1e-9)
    np.testing.assert_allclose(got[1].numpy(), np.linalg.solve(np.eye(WIDTH) + gram, start + moments), atol=1e-6)


def test_sums_are_unfolded_between_roots() -> None:
    own, draw = DEVICES[0], np.random.default_rng(1)
    root = draw.normal(size=(WIDTH, WIDTH))
    sent = own.as_sent(FITTED)
    gram, moments = whiten(torch.from_numpy(root).float(), sent[f"{FITTED}.{GRAM}"], sent[f"{FITTED}.{MOMENTS}"])
    images = len(own.labels)
    np.testing.assert_allclose(gram.numpy(), root.T @ own.sums.gram @ root / images / WIDTH, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(moments.numpy(), root.T @ own.sums.moments / images / WIDTH**0.5, atol=1e-4)


# --- roles and runs -----------------------------------------------------------------------------------


def test_only_the_own_head_is_personal(vit: PatchViT) -> None:
    method = PersonalAnalytic()
    assert method.names_with(vit, Role.LOCAL) == [OWN]
    assert {ROOT, WHITENED, "head.weight"} <= set(method.names_with(vit, Role.GLOBAL))
    tensors = method.tensors(vit)
    images = Images(torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0)), None)
    generic = method.generic_logits(vit, tensors, images)
    answered = method.forward(
        vit, {**tensors, OWN: torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))}, images
    ).logits
    assert not torch.allclose(generic, answered)


def test_a_bias_and_a_sketch_are_refused() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", "bias")):
        make_method("personal_analytic", {"bias": True})
    with pytest.raises(ConfigError, check=has_code("FV1104", "sketch")):
        make_method("personal_analytic", {"sketch": 8})


def run_digits(folders: list[Path], out: Path, cache: Path, method: str, **more: Any) -> float:
    """Return the accuracy over all test images of a run of two rounds."""
    values = {
        "method": method, "rounds": 2, "options": {"batch_size": 8, **more.pop("options", {})},
        "model_options": TINY_MODEL, **more,
    }  # fmt: skip
    outcome = simulate(RunRequest(folders, values, out=out, run="run", engine="torch", at_once=1, graph_cache=cache))
    return outcome.summary.rounds[-1].accuracy_weighted or 0.0


def test_it_is_better_than_one_head_on_skewed_devices(tmp_path: Path, graph_cache: Path) -> None:
    """Six devices with digits of two classes each: their own head knows which; a novel device solves for one, too."""
    samples, parts = read_digits(8), []
    for first in range(0, 10, 2):
        parts.append(np.flatnonzero(samples.labels // 2 * 2 == first)[:60])
    parts.append(np.flatnonzero(samples.labels < 2)[60:120])
    write_device_folders(samples, parts, tmp_path / "parts", test_share=0.3, seed=0)
    folders = device_folders(tmp_path / "parts", len(parts))
    common = run_digits(folders[:5], tmp_path / "common", graph_cache, "analytic")
    own = run_digits(folders[:5], tmp_path / "own", graph_cache, "personal_analytic")
    secure = run_digits(folders[:5], tmp_path / "secure", graph_cache, "personal_analytic", secure=True, devices=5)
    assert own > common + 0.2
    assert secure == pytest.approx(own, abs=0.02)
    earlier = {"start_from": "run", "options": {"novel": "own"}, "classes": list(samples.classes)}
    novel = run_novel(folders[5:], tmp_path / "own", graph_cache, earlier)
    assert novel >= own - 0.1


def run_novel(folders: list[Path], out: Path, cache: Path, values: dict[str, Any]) -> float:
    settings = {"method": "personal_analytic", "rounds": 1, "model_options": TINY_MODEL, **values}
    settings["options"] = {"batch_size": 8, **values["options"]}
    outcome = simulate(
        RunRequest(folders, settings, out=out, run="novel", engine="torch", at_once=1, graph_cache=cache)
    )
    return outcome.summary.rounds[-1].accuracy_weighted or 0.0
