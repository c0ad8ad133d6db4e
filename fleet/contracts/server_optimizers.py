"""Laws of the server's optimizers."""

import numpy as np

from fedvit.methods.aggregators import Floats
from fedvit.methods.server_optimizers import Moments, ServerOptimizer, make_server_optimizer
from fleet.contracts.laws import Law, require

SHAPES = ((3, 4), (5,), ())
ROUNDS = 6


def stand_still_without_an_update(name: str) -> None:
    """An update of zeros in the first round moves nothing."""
    for shape in SHAPES:
        step, _ = _make(name).step(np.zeros(shape), {})
        require(not np.any(step), f"shape {shape}: the step is {np.abs(step).max():.3g}")


def go_with_the_update(name: str) -> None:
    """Repeated updates in one direction move the tensor in that direction."""
    for update in _draw_updates(3):
        moments: Moments = {}
        for number in range(1, ROUNDS + 1):
            step, moments = _make(name).step(update.copy(), _store(moments))
            require(float(np.sum(step * update)) > 0, f"round {number}: the step is against the update")


def resume_from_moments(name: str) -> None:
    """It has no state but its moments: a new process continues with the same steps."""
    updates = _draw_updates(ROUNDS)
    one = _make(name)
    straight, resumed = _run(updates, [one] * ROUNDS), _run(updates, [_make(name) for _ in updates])
    again = _run(updates, [one] * ROUNDS)
    for number, steps in enumerate(zip(straight, resumed, again, strict=True), 1):
        same = all(np.array_equal(steps[0], step) for step in steps)
        require(same, f"round {number}: the step depends on what else the optimizer did")


def leave_its_inputs_alone(name: str) -> None:
    """It does not change the update and the moments that it is given."""
    first, second = _draw_updates(2)
    _, moments = _make(name).step(first.copy(), {})
    before = {moment: value.copy() for moment, value in moments.items()}
    update = second.copy()
    _make(name).step(update, moments)
    require(np.array_equal(update, second), "it changes the update")
    require(all(np.array_equal(moments[moment], value) for moment, value in before.items()), "it changes the moments")


LAWS: tuple[Law, ...] = (
    stand_still_without_an_update,
    go_with_the_update,
    resume_from_moments,
    leave_its_inputs_alone,
)


def _make(name: str) -> ServerOptimizer:
    return make_server_optimizer(name, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3)


def _draw_updates(count: int) -> list[Floats]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(4, 3)) for _ in range(count)]


def _store(moments: Moments) -> Moments:
    """Moments as the server reads them back in the next round."""
    return {moment: value.astype(np.float32).astype(np.float64) for moment, value in moments.items()}


def _run(updates: list[Floats], optimizers: list[ServerOptimizer]) -> list[Floats]:
    moments: Moments = {}
    steps = []
    for update, optimizer in zip(updates, optimizers, strict=True):
        step, moments = optimizer.step(update.copy(), _store(moments))
        steps.append(step)
    return steps
