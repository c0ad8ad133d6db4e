"""How tests wait: for what is meant, and never for seconds."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 480.0
"""Bound of every wait; only a failing test waits so long."""


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "it did not happen",
    *,
    wait_s: float = WAIT_S,
    pause_s: float = 0.005,
    meanwhile: Callable[[], object] = lambda: None,
) -> T:
    """The first true value of `condition()`. `meanwhile` is called after each look that found nothing.

    Fails after `wait_s` seconds and says `what`, which is asked for then if it has to be called.
    """
    until = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < until, f"{what if isinstance(what, str) else what()} (waited {wait_s:.0f} s)"
        meanwhile()
        time.sleep(pause_s)
    return value
