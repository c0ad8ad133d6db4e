"""The request for a prediction: a run and boards. It needs no torch, so that its errors are reported at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from coordinator.config import RunConfig
from fedvit.resources import Budget
from profiles.catalogue import Board, in_mode


class BoardMode(NamedTuple):
    """A board of the catalogue in one of its power modes."""

    board: Board
    mode: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """ID, or ID@MODE. Raises ConfigError for a board or a mode that the catalogue does not have."""
        return cls(*in_mode(text))


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A run in some variants of its method, and the boards to price it for."""

    config: RunConfig
    classes: int  # where the configuration names none
    targets: Sequence[BoardMode]
    masks: Sequence[float]  # empty: the method's own
    splits: Sequence[int]
    images: int
    test_images: int
    budget: Budget  # of every device, beside the limits of its board
