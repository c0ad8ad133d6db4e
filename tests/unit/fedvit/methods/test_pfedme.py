"""pFedMe's step in float64: its closed forms on a parabola, and its equations on a ViT."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods import make_method
from fedvit.methods.base import Images, Method
from fedvit.methods.calculus import Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.pfedme import PFedMe
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import example_inputs, whole_step
from fedvit.methods.twins import TWIN
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.codes import has_code
from tests.support.quadratic import BATCH, Inputs, Quadratic, after, assert_close, in_double, own

SPRING = 15.0


@dataclass(frozen=True, kw_only=True)
class Parabola(Quadratic, PFedMe):
    """pFedMe where the gradient of a number is that number."""


def inputs_of(method: Method, vit: PatchViT) -> Inputs:
    """theta and w a little apart, in a phase that has begun, at the rate of a first round."""
    (phase,) = method.phases(vit)
    inputs = example_inputs(method, vit, BATCH, phase)
    return in_double({**inputs, "hyper/lr": torch.tensor(phase.lr, dtype=torch.float64)})


def run(method: Method, vit: PatchViT, inputs: Inputs, batches: int = 1, first: int = 2) -> Inputs:
    """The inputs after some batches, on each of which the graph runs `inner_steps` times."""
    (phase,) = method.phases(vit)
    step, count = whole_step(method, vit, phase), first
    for _ in range(batches):
        for repeat in range(phase.repeats):
            hyper = {
                "hyper/step": torch.tensor(float(count)),
                "hyper/last": torch.tensor(repeat == phase.repeats - 1.0),
            }
            inputs = after(inputs, step({**inputs, **in_double(hyper)}))
            count += 1
    return inputs


def twin(inputs: Named) -> dict[str, Tensor]:
    return own(inputs, TWIN)


# --- tensors and options ------------------------------------------------------------------------------


def test_theta_stays_and_w_travels(vit: PatchViT) -> None:
    method = make_method("pfedme", {"mixing": 0.5})
    tensors = method.tensors(vit)
    assert all(torch.equal(tensors[f"{TWIN}{name}"], value) for name, value in vit.tensors().items())
    groups = method.groups(vit)
    assert groups["model"] == (Role.SHARED, list(vit.tensors()))
    assert groups["twin"] == (Role.LOCAL, [f"{TWIN}{name}" for name in vit.tensors()])
    assert method.server_rule(vit) == WeightedMean(mixing=0.5)


def test_fedtps_values(vit: PatchViT) -> None:
    (phase,) = PFedMe().phases(vit)
    assert (phase.repeats, phase.lr, phase.groups) == (5, 0.01, ("twin", "model"))
    assert (PFedMe().lam, PFedMe().mixing) == (15.0, 1.0)


@pytest.mark.parametrize("options", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_it_brings_its_own_steps(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104")):
        make_method("pfedme", options)


# --- closed forms -------------------------------------------------------------------------------------


def test_five_steps_of_theta_then_one_of_w(vit: PatchViT) -> None:
    """On the parabola theta moves by -p ((1 + lam) theta - lam w), so its distance from lam w / (1 + lam) shrinks by
    1 - p (1 + lam) each time; w moves once, by -r lam (w - theta)."""
    method = Parabola(personal_lr=0.02, lr=0.01, start="own")
    start = inputs_of(method, vit)
    end = run(method, vit, start)
    left = (1 - 0.02 * (1 + SPRING)) ** 5
    best = {name: SPRING * value / (1 + SPRING) for name, value in own(start).items()}
    theta = {name: best[name] + left * (value - best[name]) for name, value in twin(start).items()}
    assert_close(twin(end), theta, rtol=1e-6)  # the rate was a float32 when the inputs were made
    w = {name: value - 0.01 * SPRING * (value - theta[name]) for name, value in own(start).items()}
    assert_close(own(end), w, rtol=1e-6)


def test_many_steps_of_theta_find_the_minimum(vit: PatchViT) -> None:
    """Of x^2 / 2 + lam/2 (x - w)^2: lam w / (1 + lam)."""
    method = Parabola(inner_steps=100, personal_lr=0.05)
    start = inputs_of(method, vit)
    assert_close(twin(run(method, vit, start)), {n: SPRING * w / (1 + SPRING) for n, w in own(start).items()})


def test_a_strong_spring_holds_theta_where_w_is(vit: PatchViT) -> None:
    """lam = 1e6 on a real loss: theta is w but for gradient / lam."""
    method = PFedMe(lam=1e6, personal_lr=5e-7, inner_steps=60)
    start = inputs_of(method, vit)
    end = run(method, vit, start)
    for name, theta in twin(end).items():
        torch.testing.assert_close(theta, own(start)[name], rtol=0, atol=1e-5)


def test_without_a_spring_theta_trains_alone(vit: PatchViT) -> None:
    """lam = 0: w rests, and theta goes as FedAvg's model does on the same device."""
    method = PFedMe(lam=0.0, start="own", weight_decay=0.1)
    start = inputs_of(method, vit)
    end = run(method, vit, start, batches=2)
    assert_close(own(end), own(start))
    (phase,) = FedAvg(weight_decay=0.1).phases(vit)
    step, model = whole_step(FedAvg(weight_decay=0.1), vit, phase), twin(start)
    for _ in range(10):
        outputs = step({**start, **{f"tensor/{name}": value for name, value in model.items()}})
        model = {name: outputs[f"new/tensor/{name}"] for name in model}
    assert_close(twin(end), model)


# --- the round ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "equal"), [("shared", True), ("own", False)])
def test_where_theta_begins_a_round(vit: PatchViT, start: str, equal: bool) -> None:
    """With `shared` what the vault holds has no say; within the round theta goes on from batch to batch."""
    method = make_method("pfedme", {"start": start})
    one, other = inputs_of(method, vit), inputs_of(method, vit)
    other |= {f"tensor/{TWIN}{name}": 1.5 * value for name, value in twin(one).items()}
    ends = [twin(run(method, vit, inputs, first=1)) for inputs in (one, other)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]) == equal
    later = [twin(run(method, vit, inputs, first=6)) for inputs in (one, other)]
    assert not any(torch.equal(later[0][name], later[1][name]) for name in later[0])


def test_the_schedule_slows_both(vit: PatchViT) -> None:
    """Half the rate: w moves by half of lr lam (w - theta)."""
    method = Parabola(personal_lr=0.02, lr=0.01, inner_steps=1, start="own")
    start = inputs_of(method, vit) | {"hyper/lr": torch.tensor(0.01, dtype=torch.float64)}
    end = run(method, vit, start)
    theta = {n: v - 0.01 * (v + SPRING * (v - own(start)[n])) for n, v in twin(start).items()}
    assert_close(twin(end), theta)
    assert_close(own(end), {n: w - 0.005 * SPRING * (w - theta[n]) for n, w in own(start).items()})


def test_theta_answers(vit: PatchViT) -> None:
    method = PFedMe()
    inputs = inputs_of(method, vit)
    images = Images(inputs["batch/patches"], None)
    tensors = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
    want = FedAvg().predict(vit, twin(inputs), images, None)
    torch.testing.assert_close(method.predict(vit, tensors, images, None), want, rtol=1e-12, atol=0)


def test_no_tensor_is_dead(vit: PatchViT) -> None:
    """One batch from the first values, where theta = w."""
    method = PFedMe()
    start = inputs_of(method, vit)
    start |= {f"tensor/{name}": value.double() for name, value in method.tensors(vit).items()}
    end = run(method, vit, start, first=1)
    assert not [name for name, value in start.items() if name.startswith("tensor/") and torch.equal(value, end[name])]
