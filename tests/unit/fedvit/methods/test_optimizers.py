"""Our update rules, written as arithmetic, against torch.optim: in float64 over several steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd

STEPS = 5
SHAPES = ((), (7,), (3, 4))

RATES = st.floats(1e-6, 1.0)
DECAYS = st.sampled_from([0.0, 0.05]) | st.floats(0.0, 0.5)
RULES: st.SearchStrategy[Optimizer] = st.one_of(
    st.builds(Sgd, weight_decay=DECAYS),
    st.builds(MomentumSgd, weight_decay=DECAYS, momentum=st.floats(0.01, 0.99)),
    st.builds(
        AdamW,
        weight_decay=DECAYS,
        beta1=st.floats(0.5, 0.99),
        beta2=st.floats(0.9, 0.9999),
        eps=st.sampled_from([1e-8, 1e-6, 1e-4]),
    ),
)


def ours(rule: Optimizer, values: list[Tensor], grads: list[list[Tensor]], rates: list[float]) -> list[Tensor]:
    """All steps from empty slots, as a device takes them in one phase."""
    slots = [{slot: torch.zeros_like(value) for slot in rule.slots} for value in values]
    for step, (rate, grad) in enumerate(zip(rates, grads, strict=True), start=1):
        for at in range(len(values)):
            values[at], slots[at] = rule.update(
                values[at],
                grad[at],
                slots[at],
                torch.tensor(rate, dtype=torch.float64),
                torch.tensor(float(step), dtype=torch.float64),
            )
            assert tuple(slots[at]) == rule.slots
    return values


def torchs(rule: Optimizer, values: list[Tensor], grads: list[list[Tensor]], rates: list[float]) -> list[Tensor]:
    values = [value.clone().requires_grad_() for value in values]
    optimizer = rule.in_torch(values, rates[0])
    for rate, grad in zip(rates, grads, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for value, gradient in zip(values, grad, strict=True):
            value.grad = gradient.clone()
        optimizer.step()
    return [value.detach() for value in values]


def draw_values(seed: int, scale: float) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values, and gradients of every step; about a third of each gradient is exactly zero, some of them always."""
    draw = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    always = [torch.rand(shape, generator=draw) < 0.2 for shape in SHAPES]

    def gradient(at: int) -> Tensor:
        noise = scale * torch.randn(SHAPES[at], generator=draw, dtype=torch.float64)
        return noise.masked_fill(always[at] | (torch.rand(SHAPES[at], generator=draw) < 0.2), 0.0)

    return values, [[gradient(at) for at in range(len(SHAPES))] for _ in range(STEPS)]


@given(
    RULES,
    st.lists(RATES, min_size=STEPS, max_size=STEPS),
    st.integers(0, 1000),
    st.sampled_from([1e-9, 1e-3, 1.0, 1e3]),
)
def test_rules_equal_torchs(rule: Optimizer, rates: list[float], seed: int, scale: float) -> None:
    """1 - beta2^t loses up to four digits of float64's sixteen, so 1e-11 is asked for, of values of order one."""
    values, grads = draw_values(seed, scale)
    for got, want in zip(ours(rule, list(values), grads, rates), torchs(rule, list(values), grads, rates), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_sgd_and_momentum_by_hand() -> None:
    # sgd by hand: w - lr (g + decay w) = 2 - 0.1 (3 + 0.5 * 2) = 1.6
    value, slots = Sgd(weight_decay=0.5).update(
        torch.tensor(2.0), torch.tensor(3.0), {}, torch.tensor(0.1), torch.tensor(1.0)
    )
    torch.testing.assert_close(value, torch.tensor(1.6))
    assert slots == {}
    # momentum by hand: buffer = 0.5 * 4 + 3 = 5; w - lr buffer = 2 - 0.1 * 5 = 1.5
    value, slots = MomentumSgd(momentum=0.5).update(
        torch.tensor(2.0), torch.tensor(3.0), {"momentum_buffer": torch.tensor(4.0)}, torch.tensor(0.1), torch.tensor(2)
    )
    torch.testing.assert_close(value, torch.tensor(1.5))
    torch.testing.assert_close(slots["momentum_buffer"], torch.tensor(5.0))


@pytest.mark.parametrize("gradient", [0.001, -7.0, 1e4])
def test_the_first_step_of_adam_by_hand(gradient: float) -> None:
    """From empty slots m / c1 = g and sqrt(v / c2) = |g|: the step is lr sign(g), however large the gradient; decay
    takes lr * decay * w besides: 2 - 0.1 * 0.5 * 2 - 0.1 sign(g)."""
    zero = {"exp_avg": torch.tensor(0.0), "exp_avg_sq": torch.tensor(0.0)}
    value, _ = AdamW(weight_decay=0.5).update(
        torch.tensor(2.0), torch.tensor(gradient), zero, torch.tensor(0.1), torch.tensor(1.0)
    )
    torch.testing.assert_close(value, torch.tensor(1.9 - 0.1 * (1 if gradient > 0 else -1)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rule", [Sgd(), MomentumSgd(), AdamW(weight_decay=0.0)])
def test_what_has_no_gradient_does_not_move(rule: Optimizer) -> None:
    """In float32, where 1e-8 under a root is close to nothing: 0 / 0 would be NaN for good."""
    value = torch.tensor([1.0, -2.0])
    slots = {slot: torch.zeros(2) for slot in rule.slots}
    for step in range(1, 4):
        updated, slots = rule.update(value, torch.zeros(2), slots, torch.tensor(0.1), torch.tensor(float(step)))
        assert torch.equal(updated, value)
        assert all(not slot.any() for slot in slots.values())
