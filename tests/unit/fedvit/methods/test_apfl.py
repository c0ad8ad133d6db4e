"""APFL's step in float64: its equations where the loss is a parabola, and FedAvg where alpha is 0 or 1."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedvit.methods import make_method
from fedvit.methods.apfl import ALPHA, APFL, CODES_DECAY
from fedvit.methods.base import Images, Method
from fedvit.methods.calculus import Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import example_inputs, whole_step
from fedvit.methods.twins import TWIN
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from tests.support.quadratic import BATCH, Inputs, Quadratic, after, assert_close, in_double, own
from tests.support.steps import whole

RATE = 0.25


@dataclass(frozen=True, kw_only=True)
class Parabola(Quadratic, APFL):
    """APFL where the gradient of a number is that number."""


def inputs_of(method: Method, vit: PatchViT, phase: Train, seed: int = 0) -> Inputs:
    """v, w and alpha a little apart from their first values; empty slots."""
    inputs = example_inputs(method, vit, BATCH, whole(phase), seed=seed)
    inputs |= {name: torch.zeros_like(value) for name, value in inputs.items() if name.startswith("slot/")}
    inputs |= {"hyper/lr": torch.tensor(RATE), "hyper/step": torch.tensor(1.0)}
    return in_double(inputs)


def batch(vit: PatchViT, number: int) -> Inputs:
    """The same for all methods."""
    (phase,) = FedAvg().phases(vit)
    inputs = inputs_of(FedAvg(), vit, phase, seed=number)
    return {name: value for name, value in inputs.items() if name.startswith("batch/")}


def run(method: Method, vit: PatchViT, phase: Train, inputs: Inputs, steps: int = 1) -> Inputs:
    """The inputs after some steps, each on another batch."""
    step = whole_step(method, vit, phase)
    for number in range(1, steps + 1):
        inputs = {**inputs, **batch(vit, number), "hyper/step": torch.tensor(float(number), dtype=torch.float64)}
        inputs = after(inputs, step(inputs))
    return inputs


def fedavg_from(model: Named, vit: PatchViT, inputs: Inputs, steps: int, **options: Any) -> dict[str, Tensor]:
    """Where FedAvg on this device alone ends on the same batches."""
    plain = FedAvg(**options)
    (phase,) = plain.phases(vit)
    rest = {name: value for name, value in inputs.items() if not name.startswith(("tensor/", "slot/"))}
    slots = {name: v for name, v in inputs_of(plain, vit, phase).items() if name.startswith("slot/")}
    return own(run(plain, vit, phase, {**rest, **slots, **{f"tensor/{n}": v for n, v in model.items()}}, steps))


# --- tensors ------------------------------------------------------------------------------------------


def test_the_personal_model_begins_as_the_shared_one_and_stays(vit: PatchViT) -> None:
    method = make_method("apfl")
    tensors = method.tensors(vit)
    for name, value in vit.tensors().items():
        assert torch.equal(tensors[f"{TWIN}{name}"], value)
    assert tensors[ALPHA].tolist() == [0.25]
    groups = method.groups(vit)
    assert groups["model"] == (Role.SHARED, list(vit.tensors()))
    assert groups["twin"] == (Role.LOCAL, [f"{TWIN}{name}" for name in vit.tensors()])
    assert groups["alpha"] == (Role.LOCAL, [ALPHA])
    assert method.server_rule(vit) == WeightedMean()


def test_a_fixed_alpha_is_no_tensor(vit: PatchViT) -> None:
    method = APFL(adaptive=False)
    assert ALPHA not in method.tensors(vit)
    assert method.phases(vit)[0].groups == ("twin", "model")


# --- the paper's form ---------------------------------------------------------------------------------


def test_the_papers_step_on_a_parabola(vit: PatchViT) -> None:
    """m = a v + (1 - a) w; w - r w; v - r a m; a - r sum (v - w) m, clipped to [0, 1]."""
    method = Parabola()
    (phase,) = method.phases(vit)
    start = inputs_of(method, vit, phase)
    end = run(method, vit, phase, start)
    w, v, alpha = own(start), own(start, TWIN), start[f"tensor/{ALPHA}"]
    m = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
    assert_close(own(end), {name: (1 - RATE) * value for name, value in w.items()})
    assert_close(own(end, TWIN), {name: v[name] - RATE * alpha * m[name] for name in v})
    slope = sum(((v[name] - w[name]) * m[name]).sum() for name in v)
    updated = alpha - RATE * slope
    assert 0 < float(updated) < 1
    assert float(updated) != float(alpha)
    torch.testing.assert_close(end[f"tensor/{ALPHA}"], updated, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("far", "bound"), [(50.0, 0.0), (-0.5, 1.0)])
def test_alpha_stays_between_0_and_1(vit: PatchViT, far: float, bound: float) -> None:
    """With v = far and w = 1 in n numbers the slope is n (far - 1)(a far + (1 - a)): +49 * 13.25 n for a = 1/4 and
    far = 50, and -1.5 * 0.625 n for far = -0.5."""
    method = Parabola()
    (phase,) = method.phases(vit)
    start = inputs_of(method, vit, phase)
    start |= {f"tensor/{name}": torch.ones_like(value) for name, value in own(start).items()}
    start |= {f"tensor/{TWIN}{name}": torch.full_like(value, far) for name, value in own(start).items()}
    start[f"tensor/{ALPHA}"] = torch.tensor([0.25], dtype=torch.float64)
    assert run(method, vit, phase, start)[f"tensor/{ALPHA}"].tolist() == [bound]


def test_with_alpha_0_it_is_fedavg_and_the_personal_model_rests(vit: PatchViT) -> None:
    method = APFL(alpha=0.0, adaptive=False, momentum=0.9)
    (phase,) = method.phases(vit)
    start = inputs_of(method, vit, phase)
    end = run(method, vit, phase, start, steps=3)
    assert_close(own(end), fedavg_from(own(start), vit, start, 3, momentum=0.9))
    assert_close(own(end, TWIN), own(start, TWIN))
    images = Images(start["batch/patches"], None)
    answer = method.predict(vit, {**own(end), **_twins(end)}, images, None)
    torch.testing.assert_close(answer, FedAvg().predict(vit, own(end), images, None), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_with_alpha_1_the_personal_model_trains_alone(vit: PatchViT, form: str) -> None:
    """v goes as a model that nobody shares, w as FedAvg's, and v answers."""
    method = make_method("apfl", {"alpha": 1.0, "adaptive": False, "form": form, "momentum": 0.9})
    phase = method.phases(vit)[0]
    start = inputs_of(method, vit, phase)
    end = run(method, vit, phase, start, steps=3)
    assert_close(own(end, TWIN), fedavg_from(own(start, TWIN), vit, start, 3, momentum=0.9))
    assert_close(own(end), fedavg_from(own(start), vit, start, 3, momentum=0.9))
    images = Images(start["batch/patches"], None)
    answer = method.predict(vit, {**own(end), **_twins(end)}, images, None)
    torch.testing.assert_close(answer, FedAvg().predict(vit, own(end, TWIN), images, None), rtol=1e-12, atol=0)


def _twins(inputs: Named) -> dict[str, Tensor]:
    return {f"{TWIN}{name}": value for name, value in own(inputs, TWIN).items()}


def test_the_mixture_answers_with_the_newest_shared_model(vit: PatchViT) -> None:
    method = APFL(alpha=0.4, adaptive=False)
    (phase,) = method.phases(vit)
    first, other = inputs_of(method, vit, phase), inputs_of(method, vit, phase, seed=1)
    images = Images(first["batch/patches"], None)
    answer = method.predict(vit, {**own(other), **_twins(first)}, images, None)
    mixed = {name: 0.4 * value + 0.6 * own(other)[name] for name, value in own(first, TWIN).items()}
    torch.testing.assert_close(answer, FedAvg().predict(vit, mixed, images, None), rtol=1e-12, atol=0)


# --- the code's form ----------------------------------------------------------------------------------


def test_the_codes_step_on_a_parabola(vit: PatchViT) -> None:
    """Both models descend their own loss; then alpha moves by <v' - w', a v + (1 - a) w> + 0.02 a, where gradients
    are the old values."""
    method = Parabola(form="code")
    phase, _ = method.phases(vit)
    start = inputs_of(method, vit, phase)
    end = run(method, vit, phase, start)
    w, v, alpha = own(start), own(start, TWIN), start[f"tensor/{ALPHA}"]
    assert_close(own(end), {name: (1 - RATE) * value for name, value in w.items()})
    assert_close(own(end, TWIN), {name: (1 - RATE) * value for name, value in v.items()})
    slope = sum(((1 - RATE) * (v[n] - w[n]) * (alpha * v[n] + (1 - alpha) * w[n])).sum() for n in v)
    torch.testing.assert_close(end[f"tensor/{ALPHA}"], alpha - RATE * (slope + CODES_DECAY * alpha), rtol=1e-10, atol=0)


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adamw"}])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_code_mixes_at_the_end_of_a_round(vit: PatchViT, alpha: float, optimizer: dict[str, Any]) -> None:
    """One run of a graph of its own: v becomes a v + (1 - a) w with the w that the device trained, whatever the
    optimizer; with alpha 0 it is that w. Nothing else moves."""
    method = make_method("apfl", {"form": "code", "alpha": alpha, "adaptive": False, **optimizer})
    phase, mix = method.phases(vit)
    assert (mix.groups, mix.epochs, mix.steps, mix.graph != phase.graph) == (("twin",), 1, 1, True)
    trained = run(method, vit, phase, inputs_of(method, vit, phase), steps=2)
    end = run(method, vit, mix, {**inputs_of(method, vit, mix), **trained})
    w, v = own(trained), own(trained, TWIN)
    assert_close(own(end), w)
    assert_close(own(end, TWIN), {name: alpha * v[name] + (1 - alpha) * w[name] for name in v})


# --- any form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["paper", "code"])
def test_no_tensor_is_dead(vit: PatchViT, form: str) -> None:
    """From the first values, where v = w and so alpha has no slope in the paper's first step, all move in two."""
    method = make_method("apfl", {"form": form})
    phase = method.phases(vit)[0]
    first = {f"tensor/{name}": value.double() for name, value in method.tensors(vit).items()}
    start = {**inputs_of(method, vit, phase), **first}
    end = run(method, vit, phase, start, steps=2)
    assert not [name for name in first if torch.equal(start[name], end[name])]


def test_the_norm_of_each_models_gradient_is_limited(vit: PatchViT) -> None:
    method = Parabola(form="code", clip_norm=0.5, adaptive=False)
    phase, _ = method.phases(vit)
    start = inputs_of(method, vit, phase)
    end = run(method, vit, phase, start)
    for prefix in ("", TWIN):
        steps = [own(end, prefix)[name] - value for name, value in own(start, prefix).items()]
        length = torch.sqrt(torch.stack([step.square().sum() for step in steps]).sum())
        torch.testing.assert_close(float(length), RATE * 0.5, rtol=1e-10, atol=0)
