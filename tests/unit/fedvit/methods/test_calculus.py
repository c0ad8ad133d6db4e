"""One step, differentiated and updated in two ways: as pure arithmetic, and by autograd with torch.optim."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedvit.methods.base import clip_grads
from fedvit.methods.calculus import Calculus, Named, Objective, TorchCalculus, TracedCalculus
from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd

SHAPES = {"w": (3, 4), "b": (3,), "s": (), "idle": (2,)}
RULES = [Sgd(), Sgd(weight_decay=0.1), MomentumSgd(weight_decay=0.1, momentum=0.8), AdamW(weight_decay=0.1)]
BOTH: tuple[type[Calculus], ...] = (TracedCalculus, TorchCalculus)


def draw_values(seed: int, rule: Optimizer, *, step: float = 3.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values, and a step's inputs in the middle of a phase: slots are not empty."""
    draw = torch.Generator().manual_seed(seed)

    def normal(name: str) -> Tensor:
        return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64)

    values = {name: normal(name) for name in SHAPES}
    inputs = {
        f"slot/{slot}/{name}": normal(name).square() if slot.endswith("_sq") else normal(name)
        for slot in rule.slots
        for name in SHAPES
    }
    inputs["x"] = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    inputs["hyper/lr"] = torch.tensor(0.05, dtype=torch.float64)
    inputs["hyper/step"] = torch.tensor(step, dtype=torch.float64)
    return values, inputs


def objective(inputs: Named) -> Callable[[Named], Objective]:
    """Of `idle` it knows nothing."""

    def loss(at: Named) -> Objective:
        hidden = torch.tanh(inputs["x"] @ at["w"].T + at["b"]) * torch.exp(at["s"])
        return Objective(hidden.square().sum(), {"hidden": hidden})

    return loss


def one_step(
    kind: type[Calculus], rule: Optimizer, values: Named, inputs: Named, clip: float | None = None
) -> dict[str, Tensor]:
    """As a method's step: gradients, clipped if asked for, an update; everything that it gives, by name."""
    calculus = kind(rule, inputs)
    grads, (loss, collected, _) = calculus.gradients(objective(inputs), values)
    if clip is not None:
        grads = clip_grads(grads, clip)
    updated = calculus.update(values, grads)
    return {
        "loss": loss.detach(),
        **{f"collected/{name}": value.detach() for name, value in collected.items()},
        **{f"grad/{name}": value.detach() for name, value in grads.items()},
        **{f"moved/{name}": value.detach() for name, value in updated.items()},
        **{f"slot/{name}": value.detach() for name, value in calculus.slots.items()},
    }


def assert_equal(one: Named, other: Named) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-11, atol=1e-12, msg=name)


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.integers(0, 1000), st.sampled_from([None, 0.01, 1.0, 1e6]), st.integers(1, 9))
def test_both_give_the_same(rule: Optimizer, seed: int, clip: float | None, step: int) -> None:
    """Loss, what is collected, gradients, values and slots, in float64; from a phase's first step on."""
    values, inputs = draw_values(seed, rule, step=float(step))
    traced, reference = (one_step(kind, rule, values, inputs, clip) for kind in BOTH)
    assert_equal(traced, reference)
    assert {name for name in traced if name.startswith("slot/")} == {
        f"slot/{slot}/{name}" for slot in rule.slots for name in SHAPES
    }


@pytest.mark.parametrize("kind", BOTH)
def test_the_gradient_is_autograds(kind: type[Calculus]) -> None:
    values, inputs = draw_values(1, Sgd())
    leaves = {name: value.clone().requires_grad_() for name, value in values.items() if name != "idle"}
    want = torch.autograd.grad(objective(inputs)(leaves).loss, list(leaves.values()))
    got, _ = kind(Sgd(), inputs).gradients(objective(inputs), values)
    for name, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("rule", RULES)
def test_what_the_loss_does_not_reach_has_a_gradient_of_zero(kind: type[Calculus], rule: Optimizer) -> None:
    """Not none: decay and momentum move it as torch.optim does with a gradient of zero."""
    values, inputs = draw_values(2, rule)
    step = one_step(kind, rule, values, inputs)
    assert step["grad/idle"].tolist() == [0.0, 0.0]
    leaf = values["idle"].clone().requires_grad_()
    optimizer = rule.in_torch([leaf], 0.05)
    leaf.grad = torch.zeros_like(leaf)
    for slot in rule.slots:
        optimizer.state[leaf][slot] = inputs[f"slot/{slot}/idle"].clone()
    if "exp_avg" in rule.slots:
        optimizer.state[leaf]["step"] = torch.tensor(2.0)
    optimizer.step()
    torch.testing.assert_close(step["moved/idle"], leaf.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("rule", RULES)
def test_a_part_of_the_tensors_can_be_updated(kind: type[Calculus], rule: Optimizer) -> None:
    """Each in its turn gives what all at once give; slots gather what was updated so far."""
    values, inputs = draw_values(3, rule)
    together = one_step(kind, rule, values, inputs)
    calculus = kind(rule, inputs)
    grads, _ = calculus.gradients(objective(inputs), values)
    for number, names in enumerate((("b",), ("w", "s")), start=1):
        updated = calculus.update({name: values[name] for name in names}, grads)
        assert set(updated) == set(names)
        for name in names:
            torch.testing.assert_close(updated[name], together[f"moved/{name}"], rtol=0, atol=0)
        assert len(calculus.slots) == len(rule.slots) * (1 if number == 1 else 3)
    for name, slot in calculus.slots.items():
        torch.testing.assert_close(slot, together[f"slot/{name}"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", BOTH)
def test_a_gradient_can_be_taken_elsewhere_than_where_one_stands(kind: type[Calculus]) -> None:
    """As meta-learning does: the gradient at a place to which plain SGD led first, the update from the start."""
    rule = MomentumSgd()
    values, inputs = draw_values(4, rule)
    calculus = kind(rule, inputs)
    here, _ = calculus.gradients(objective(inputs), values)
    there = {name: value - 0.1 * here[name] for name, value in values.items()}
    grads, _ = calculus.gradients(objective(inputs), there)
    updated = calculus.update(values, grads)
    for name, value in updated.items():
        buffer = 0.9 * inputs[f"slot/momentum_buffer/{name}"] + grads[name]
        torch.testing.assert_close(value, values[name] - 0.05 * buffer, rtol=1e-11, atol=1e-13)
    assert (grads["w"] - here["w"]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_given_is_not_written_to(kind: type[Calculus], rule: Optimizer) -> None:
    values, inputs = draw_values(5, rule)
    before = {name: value.clone() for name, value in {**values, **inputs}.items()}
    one_step(kind, rule, values, inputs, clip=1.0)
    assert all(torch.equal(value, before[name]) for name, value in {**values, **inputs}.items())
    assert not any(value.requires_grad for value in values.values())


# --- clipping -----------------------------------------------------------------------------------------


def test_a_long_gradient_is_shortened_as_a_whole() -> None:
    """(3, 0) and (4) are 5 long together: to 1 they shrink to (0.6, 0) and (0.8)."""
    short = clip_grads({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}, 1.0)
    torch.testing.assert_close(short, {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor(0.8)})


@pytest.mark.parametrize("norm", [5.0, 7.0, 1e9])
def test_a_short_gradient_stays(norm: float) -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    assert all(torch.equal(value, grads[name]) for name, value in clip_grads(grads, norm).items())


def test_a_gradient_of_zero_stays() -> None:
    assert clip_grads({"a": torch.zeros(3)}, 1.0)["a"].tolist() == [0.0, 0.0, 0.0]


@given(st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_clipping_is_torchs(seed: int, norm: float) -> None:
    """torch adds 1e-6 to the length that it divides by."""
    draw = torch.Generator().manual_seed(seed)
    leaves = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES.values()]
    grads = {n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in SHAPES.items()}
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, norm)
    for leaf, grad in zip(leaves, clip_grads(grads, norm).values(), strict=True):
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=0)
