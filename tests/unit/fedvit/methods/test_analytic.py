"""The analytic head: equal to the central regression for any partition, and exact when devices come and go."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coordinator.compute.planning.checks import check_region, check_run
from coordinator.compute.planning.planner import make_plan
from coordinator.config import make_config
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError, EmptyCohort
from fedvit.methods import make_method
from fedvit.methods.aggregators import Mean
from fedvit.methods.analytic import (
    FITTED,
    GRAM,
    HELD_OUT,
    MOMENTS,
    Analytic,
    RidgeRegression,
    count_gram_values,
    find_unit,
)
from fedvit.methods.base import Images, ServerState, Upload
from fedvit.methods.rules.weighted_mean import weight_deltas
from fedvit.methods.sketch import expand_weights, sketch_features
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.secure import SUM
from fedvit.secure.layout import Layout, add_plainly, make_training_payload, read_training
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import SumTerms
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.quadratic import after
from tests.support.steps import Session
from tests.support.tiny import make_tiny

CLASSES, BATCH, IMAGES = 4, 6, 60
MODEL = {"image_size": 8, "patch_size": 4, "width": 20, "depth": 1, "heads": 2}
"""Wider than one block of F'F."""
METHOD = Analytic(batch_size=BATCH, hold_out=3, bias=True)


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return build_vit(SMALL, CLASSES, seed=0, options=MODEL)


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(IMAGES) % CLASSES
    return torch.randn(IMAGES, 4, 48, generator=draw) + labels.reshape(-1, 1, 1), labels


class Sent(NamedTuple):
    """A device's number of images, and its sums divided by it."""

    images: int
    means: Tensors


def sum_up(method: Analytic, vit: PatchViT, images: tuple[Tensor, Tensor], rows: Sequence[int], drawn: int = 0) -> Sent:
    """Return what a device with these images sends: steps over its batches, the last one padded."""
    [phase] = method.phases(vit)
    step = whole_step(method, vit, phase)
    start = {f"tensor/{name}": value for name, value in method.tensors(vit).items()}
    trained = method.names_in(vit, "sums")
    inputs = dict(start)
    for slot in phase.slots:
        inputs |= {f"slot/{slot}/{name}": torch.zeros_like(start[f"tensor/{name}"]) for name in trained}
    inputs["draw/held_out"] = torch.tensor([drawn])
    for number, first in enumerate(range(0, len(rows), BATCH), start=1):
        chosen = torch.tensor(rows[first : first + BATCH])
        padding = BATCH - len(chosen)
        patches, labels = (torch.cat([all_[chosen], all_.new_zeros(padding, *all_.shape[1:])]) for all_ in images)
        weight = (torch.arange(BATCH) < len(chosen)).float()
        inputs |= {"batch/patches": patches, "batch/labels": labels, "batch/weight": weight}
        inputs = after(inputs, step(inputs | {"hyper/step": torch.tensor(float(number))}))
    return Sent(len(rows), {name: inputs[f"tensor/{name}"].numpy() for name in trained})


def add_in_secret(sums: dict[str, Sent], *, bits: Literal[24, 32] = 32) -> Sent:
    """Return what a secure sum of these devices gives to the server."""
    payloads = {device: make_training_payload(sent.means, sent.images, 0.0) for device, sent in sums.items()}
    layout = Layout.of_payload("train", next(iter(payloads.values())))
    most = max(sent.images for sent in sums.values())
    terms = SumTerms(layout.digest, len(sums), 2, bits, 4.0, most)
    total = read_training(layout, add_plainly(payloads, terms, 0, 1), terms)
    assert not total.clipped
    return Sent(total.samples, total.mean)


def average(sums: dict[str, Sent]) -> Sent:
    """Return what a region of these devices sends."""
    uploads = [Upload(device, sent.images, device, partial(dict, sent.means)) for device, sent in sums.items()]
    mean = Mean().combine(weight_deltas(uploads, 1), list(next(iter(sums.values())).means))
    return Sent(sum(sent.images for sent in sums.values()), {name: v.astype(np.float32) for name, v in mean.items()})


class Server:
    """The rule with its state, which takes sums by device."""

    def __init__(self, method: Analytic, vit: PatchViT, state: ServerState | None = None) -> None:
        self.rule = method.server_rule(vit)
        names = method.names_in(vit, "sums", "head")
        tensors = method.tensors(vit)
        self.state = state or ServerState({name: tensors[name].numpy().copy() for name in names})
        self.figures: dict[str, float] = {}
        self._vit = vit

    def take(self, sums: dict[str, Sent]) -> dict[str, Array]:
        """Close a round, and return the head."""
        uploads = [
            Upload(device, sent.images, device, partial(dict, sent.means)) for device, sent in sorted(sums.items())
        ]
        context = make_context(self._vit)
        self.state, self.figures = self.rule.close(self.state, uploads, context)
        return {name: value for name, value in self.state.tensors.items() if name.startswith("head.")}


def features_of(vit: PatchViT, patches: Tensor) -> np.ndarray:
    """(images, D + 1) in float64, with a column of ones."""
    with torch.no_grad():
        values = vit.features(vit.run_to_class(vit.embed(patches), 0)).double().numpy()
    return np.concatenate([values, np.ones((len(values), 1))], axis=1)


def solve_centrally(features: np.ndarray, labels: Tensor, strength: float) -> np.ndarray:
    gram = features.T @ features
    penalty = strength * np.trace(gram) / len(gram)
    return np.linalg.solve(gram + penalty * np.eye(len(gram)), features.T @ np.eye(CLASSES)[labels.numpy()])


def assert_is_solution(
    server: "Server", vit: PatchViT, images: tuple[Tensor, Tensor], *, bias: bool = True, atol: float = 1e-4
) -> None:
    """Scores of images are those of the central regression. Weights themselves may differ where no image tells."""
    features = features_of(vit, images[0])[:, : None if bias else -1]
    wanted = features @ solve_centrally(features, images[1], server.figures["ridge"])
    head = server.state.tensors
    scores = features[:, :20] @ head["head.weight"].T + head["head.bias"]
    np.testing.assert_allclose(scores, wanted, atol=atol)


# --- one exact solution -------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(owners=st.lists(st.integers(0, 4), min_size=IMAGES, max_size=IMAGES), drawn=st.integers(0, 1))
def test_any_partition_gives_the_central_solution(owners: list[int], drawn: int) -> None:
    vit = build_vit(SMALL, CLASSES, seed=0, options=MODEL)
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(IMAGES) % CLASSES
    images = torch.randn(IMAGES, 4, 48, generator=draw), labels
    server = Server(METHOD, vit)
    parts = {f"device-{owner}": [row for row in range(IMAGES) if owners[row] == owner] for owner in set(owners)}
    server.take({device: sum_up(METHOD, vit, images, rows, drawn) for device, rows in parts.items()})
    assert_is_solution(server, vit, images)


def test_without_a_bias_no_class_counts_are_sent(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    method = Analytic(batch_size=BATCH, bias=False)
    sums = sum_up(method, vit, images, range(IMAGES))
    assert sums.means[f"{FITTED}.{MOMENTS}"].shape == (20, CLASSES)
    server = Server(method, vit)
    head = server.take({"device-0": sums})
    assert_is_solution(server, vit, images, bias=False)
    assert not head["head.bias"].any()


def test_the_lambda_errs_least_on_images_that_were_held_out(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    """Batches 3, 6 and 9 of 10 are held out; labels are noise, so that a larger lambda than the least is right."""
    noise = images[0], torch.randint(0, CLASSES, (IMAGES,), generator=torch.Generator().manual_seed(3))
    server = Server(METHOD, vit)
    server.take({"device-0": sum_up(METHOD, vit, noise, range(IMAGES))})
    held = np.isin(np.arange(IMAGES) // BATCH + 1, (3, 6, 9))
    features, labels = features_of(vit, noise[0]), noise[1]
    wanted = np.eye(CLASSES)[labels.numpy()]
    fitted = torch.from_numpy(~held)

    def error(strength: float) -> float:
        weights = solve_centrally(features[~held], labels[fitted], strength)
        return float(np.square(features[held] @ weights - wanted[held]).sum())

    errors = {strength: error(strength) for strength in METHOD.lambdas}
    assert server.figures["ridge"] == min(errors, key=lambda strength: errors[strength]) > METHOD.lambdas[0]


@pytest.mark.parametrize("drawn", [0, 1])
def test_neither_the_first_batch_nor_a_single_image_is_held_out(
    vit: PatchViT, images: tuple[Tensor, Tensor], drawn: int
) -> None:
    """One of batches 1 to 3 may be chosen, the third or second, and only with two images in it."""
    for count, expected in ((BATCH, 0), (BATCH + 1, 0), (2 * BATCH + 1, drawn * BATCH), (2 * BATCH + 2, None)):
        sums = sum_up(METHOD, vit, images, range(count), drawn)
        fitted, held = (
            sums.means[f"{part}.{MOMENTS}"][-1].sum() * count * find_unit(MOMENTS, 20) for part in (FITTED, HELD_OUT)
        )
        assert held == pytest.approx(expected if expected is not None else (BATCH if drawn else 2))
        assert held + fitted == pytest.approx(count)


def test_devices_without_held_out_images_get_the_middle_lambda(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    server = Server(METHOD, vit)
    server.take({"device-0": sum_up(METHOD, vit, images, range(BATCH))})
    assert server.figures["ridge"] == METHOD.lambdas[2]


# --- devices that come and go -------------------------------------------------------------------------


def test_new_devices_bring_new_classes(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    """After a second round with other devices the head is that of all images; before, unknown classes score zero."""
    rows = {label: [row for row in range(IMAGES) if images[1][row] == label] for label in range(CLASSES)}
    sums = {f"device-{label}": sum_up(METHOD, vit, images, rows[label]) for label in rows}
    server = Server(METHOD, vit)
    head = server.take({device: sums[device] for device in ("device-0", "device-1")})
    assert not head["head.weight"][2:].any()
    assert not head["head.bias"][2:].any()
    server.take({device: sums[device] for device in ("device-2", "device-3")})
    assert server.figures["kept_devices"] == 4
    assert_is_solution(server, vit, images)


def test_a_device_that_comes_again_replaces_its_sums(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    first, second, other = (sum_up(METHOD, vit, images, rows) for rows in (range(20), range(20, 40), range(40, 60)))
    server, fresh = Server(METHOD, vit), Server(METHOD, vit)
    server.take({"a": first, "b": other})
    head = server.take({"a": second})
    assert_same(head, fresh.take({"a": second, "b": other}))
    assert bits(dict(server.state.memory)) == bits(dict(fresh.state.memory))


def test_a_forgotten_device_leaves_no_trace(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    """To the last bit: head and memory are those of a run that never asked the device. Its later sums do not count."""
    sums = {device: sum_up(METHOD, vit, images, range(first, IMAGES, 3)) for first, device in enumerate("abc")}
    before = Server(METHOD, vit)
    before.take(sums)
    after_ = Server(Analytic(batch_size=BATCH, hold_out=3, forget=("b*",), bias=True), vit, before.state)
    never = Server(METHOD, vit)
    never.take({device: sums[device] for device in "ac"})
    left = after_.take({"b": sums["b"]})
    assert_same(left, {name: never.state.tensors[name] for name in left})
    assert bits(dict(after_.state.memory)) == bits(dict(never.state.memory))
    assert after_.figures["kept_devices"] == 2
    assert after_.figures["kept_bytes"] == 2 * (8 + sum(value.nbytes for value in sums["a"].means.values()))
    with pytest.raises(EmptyCohort, check=has_code("FV1502")):
        Server(Analytic(forget=("*",), bias=True), vit, before.state).take({})


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


def assert_same(head: dict[str, Array], other: dict[str, Array]) -> None:
    assert bits(head) == bits(other)


# --- secure sums and regions --------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(owners=st.lists(st.integers(0, 4), min_size=IMAGES, max_size=IMAGES))
def test_a_secure_sum_and_a_region_give_the_central_solution(owners: list[int]) -> None:
    """The sum is rounded: scores of images stay within a hundredth, those of a region are exact."""
    vit = build_vit(SMALL, CLASSES, seed=0, options=MODEL)
    labels = torch.arange(IMAGES) % CLASSES
    images = torch.randn(IMAGES, 4, 48, generator=torch.Generator().manual_seed(1)), labels
    parts = {f"device-{owner}": [row for row in range(IMAGES) if owners[row] == owner] for owner in set(owners)}
    sums = {device: sum_up(METHOD, vit, images, rows) for device, rows in parts.items()}
    for name, sent in ((SUM, add_in_secret(sums)), ("north", average(sums))):
        server = Server(METHOD, vit)
        server.take({name: sent})
        assert_is_solution(server, vit, images, atol=1e-2 if name == SUM else 1e-3)


def test_a_secure_sum_replaces_sums_of_single_devices(vit: PatchViT, images: tuple[Tensor, Tensor]) -> None:
    """Its devices would count twice. So do sums of single devices after it."""
    sums = {device: sum_up(METHOD, vit, images, range(first, IMAGES, 2)) for first, device in enumerate("ab")}
    server, fresh = Server(METHOD, vit), Server(METHOD, vit)
    server.take(sums)
    secret = {SUM: add_in_secret(sums)}
    assert_same(server.take(secret), fresh.take(secret))
    assert bits(dict(server.state.memory)) == bits(dict(fresh.state.memory))
    assert_same(server.take(sums), Server(METHOD, vit).take(sums))


def test_single_devices_are_not_forgotten_in_secure_runs() -> None:
    values = {"method": "analytic", "model_options": MODEL, "secure": True, "devices": 3}
    check_run(make_config(values, "test").run, "test")
    config = make_config({**values, "options": {"forget": ("pi-3",)}}, "test").run
    with pytest.raises(ConfigError, check=has_code("FV1024", "option forget removes single devices")):
        check_run(config, "test")
    check_region(make_config({**values, "secure": False}, "test").run, "test")
    with pytest.raises(ConfigError, check=has_code("FV2202", "option forget removes single devices")):
        check_region(make_config({**values, "secure": False, "options": {"forget": ("pi-3",)}}, "test").run, "test")


# --- wide backbones -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [7, 10, 19])
def test_a_sketch_gives_the_regression_of_its_own_features(
    vit: PatchViT, images: tuple[Tensor, Tensor], count: int, bias: bool
) -> None:
    """Also with any partition, and where numbers of a feature are added up unequally often."""
    method = Analytic(batch_size=BATCH, sketch=count, bias=bias)
    sums = {f"device-{first}": sum_up(method, vit, images, range(first, IMAGES, 3)) for first in range(3)}
    server = Server(method, vit)
    head = server.take(sums)
    features = torch.from_numpy(features_of(vit, images[0]))
    sent = np.concatenate([sketch_features(features[:, :20].float(), count).double().numpy(), features[:, 20:]], axis=1)
    sent = sent[:, : None if bias else -1]
    wanted = sent @ solve_centrally(sent, images[1], server.figures["ridge"])
    scores = features[:, :20].numpy() @ head["head.weight"].T + head["head.bias"]
    assert head["head.weight"].shape == (CLASSES, 20)
    np.testing.assert_allclose(scores, wanted, atol=1e-4)


def test_a_sketch_sends_less_and_keeps_most_of_the_accuracy() -> None:
    """A third of 256 numbers, in which ten classes differ by one deviation, keeps nine tenths of the right answers."""
    draw = np.random.default_rng(0)
    centres, labels = draw.normal(0, 0.35, (10, 256)), draw.integers(0, 10, 3000)
    features = centres[labels] + draw.normal(0, 1, (3000, 256))
    right = {}
    for count in (256, 96, 8):
        sent = sketch_features(torch.from_numpy(features).float(), count).double().numpy()
        assert np.square(sent).mean() == pytest.approx(np.square(features).mean(), rel=0.05)
        gram, moments = sent[:2000].T @ sent[:2000], sent[:2000].T @ np.eye(10)[labels[:2000]]
        weights = expand_weights(np.linalg.solve(gram + 100 * np.eye(count), moments), 256)
        right[count] = float(((features[2000:] @ weights).argmax(axis=1) == labels[2000:]).mean())
    assert right[256] > 0.9
    assert 0.9 * right[256] < right[96] < right[256]
    assert 0.1 < right[8] < 0.6
    assert count_gram_values(96) < 0.2 * count_gram_values(256)
    with torch.device("meta"):  # a wide backbone with ten classes: 0.5 MB instead of 2.6
        vit = build_vit("vit_base_patch16_224", 10, seed=0)
        sent_bytes = [
            sum(4 * value.numel() for value in Analytic(sketch=sketch).extra_tensors(vit).values())
            for sketch in (None, 320)
        ]
    assert sent_bytes == [2_469_888, 455_680]


# --- numbers ------------------------------------------------------------------------------------------


def test_a_graph_adds_many_batches_without_drifting(graph_cache: Path) -> None:
    """2,000 steps on the same batch: their mean is that of one step within three last digits, also behind the engine's
    optimizations. Plain sums in float32 lose five times as much."""
    made = make_tiny(Analytic(batch_size=8), graph_cache, depth=1)
    [phase] = made.method.phases(made.vit)
    graph, name = Session(made.graphs[phase.graph].content), f"{FITTED}.{GRAM}"
    inputs = example_inputs(made.method, made.vit, made.batch, phase)
    sums = [key for key in inputs if key.startswith(("slot/", f"tensor/{FITTED}", f"tensor/{HELD_OUT}"))]
    inputs |= {key: torch.zeros_like(inputs[key]) for key in sums} | {"hyper/step": torch.tensor(1.0)}
    inputs["draw/held_out"] = torch.tensor([0])
    once = graph(inputs)[f"new/slot/total/{name}"].numpy()
    mean = graph(inputs)[f"new/tensor/{name}"].numpy()
    plain = np.zeros_like(once)
    for _ in range(2000):
        inputs = after(inputs, graph(inputs))
        plain = plain + once
    exact = 2000 * once.astype(np.float64)
    total = inputs[f"slot/total/{name}"].numpy()
    assert (np.abs(inputs[f"tensor/{name}"].numpy() - mean) <= 3 * np.spacing(np.abs(mean))).all()
    assert np.abs(plain - exact).max() > 5 * np.abs(total - exact).max()


def test_a_device_sends_less_than_half_a_megabyte() -> None:
    """Sizes for DeiT-Tiny with ten classes; the upper half of F'F alone takes 74 kB."""
    method = Analytic()
    with torch.device("meta"):
        vit = build_vit("deit_tiny_patch16_224", 10, seed=0)
        sent = sum(value.numel() * 4 for value in method.extra_tensors(vit).values())
    assert count_gram_values(192) * 4 < 80_000
    assert sent == 175_104


# --- other parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fed_head", "fedper", "fedavg", "analytic"])
def test_other_methods_start_from_the_head(
    method: str, vit: PatchViT, images: tuple[Tensor, Tensor], tmp_path: Path, graph_cache: Path
) -> None:
    server = Server(METHOD, vit)
    head = server.take({"device-0": sum_up(METHOD, vit, images, range(IMAGES))})
    options = {"bias": True} if method == "analytic" else {}
    config = make_config({"method": method, "options": options, "model_options": MODEL, "rounds": 1}, "test").run
    names = tuple(map(str, range(CLASSES)))
    plan = make_plan(config, names, BlobStore(tmp_path), start=server.state, cache=graph_cache)
    assert_same({name: plan.values[name] for name in head}, head)
    assert (f"{FITTED}.{GRAM}" in plan.values) == (method == "analytic")
    assert bits(dict(plan.state.memory)) == bits(dict(server.state.memory))  # so that a later run may forget devices
    answers = plan.method.forward(plan.vit, {name: torch.from_numpy(value) for name, value in plan.values.items()},
                                  Images(images[0], None)).logits  # fmt: skip
    weights = np.concatenate([head["head.weight"].T, head["head.bias"][None]])
    np.testing.assert_allclose(answers.numpy(), features_of(vit, images[0]) @ weights, atol=1e-3)


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"robust": {"aggregator": "median"}}, "FV1013"),
        ({"privacy": {"noise_multiplier": 1.0, "clip": 1.0}}, "FV1014"),
    ],
)
def test_rules_that_need_a_mean_are_refused(table: dict[str, Any], code: str) -> None:
    config = make_config({"method": "analytic", "model_options": MODEL, **table}, "test").run
    with pytest.raises(ConfigError, check=has_code(code, "averages no tensors")):
        check_run(config, "test")


def test_the_rule_takes_late_sums(vit: PatchViT) -> None:
    rule = make_method("analytic").server_rule(vit)
    assert isinstance(rule, RidgeRegression)
    assert rule.why_never_late is None
    assert rule.why_no_regions is None
    assert not rule.averages
