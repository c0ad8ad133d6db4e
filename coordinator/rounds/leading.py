"""Who decides which rounds a run has: the run itself, or the centre of a region."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.compute.messages import FindOutliers, NextState, Step
from coordinator.record.tables import ResultRecord
from coordinator.rounds.engine import RoundEngine
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.parts import RunParts
from coordinator.rounds.recovery import DAMAGED_HERE
from fedvit.errors import EmptyCohort


class Lead(Protocol):
    """Leads a run through its rounds."""

    def step(self, opened: OpenRound, results: list[ResultRecord]) -> NextState:
        """Make the next state of a round's results; see `MakeState`."""
        ...

    def run(self, engine: RoundEngine) -> None:
        """Do all rounds that are left."""
        ...

    def on_tick(self) -> None:
        """Called several times a second."""
        ...

    def close(self) -> None:
        """Called when the run ends, in whatever way."""
        ...


class OwnLead:
    """The rounds of an ordinary run: as many as its configuration says, each with a server step."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts

    def step(self, opened: OpenRound, results: list[ResultRecord]) -> NextState:
        """Compute the next state; devices are served meanwhile. Raises EmptyCohort if there is no usable result."""
        parts, state, number = self._parts, self._parts.state, opened.number
        if not results:
            raise EmptyCohort("FV1501", f"none of the asked devices returned a result for round {number}")
        state.doing = f"round {number}/{state.config.rounds}: server step"
        strike_outliers(parts, number)
        stepped = parts.ask(Step(round=number, saved=state.newest(), drawn=opened.drawn))
        for device, digest in stepped.damaged.items():
            reason = f"its upload of an earlier round {DAMAGED_HERE}"
            state.refuse(device, "train", f"left out: {reason}: {state.blobs.path(digest)}", number)
            parts.operator_log(f"{device}: {reason}, and is no longer used")
        return stepped

    def run(self, engine: RoundEngine) -> None:
        engine.run()

    def on_tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def strike_outliers(parts: RunParts, number: int) -> None:
    """Strike the devices of outliers. A quarantine that follows holds in the server step of the round already."""
    for device, reason in parts.ask(FindOutliers(round=number)) if parts.state.config.robust.reject_scale else ():
        parts.state.refuse(device, "train", f"left out: {reason}", number)
        parts.operator_log(f"round {number}: {device} is left out: {reason}")
        parts.strike(device, number, reason)


@dataclass(frozen=True)
class Owner:
    """The program that serves a run."""

    watch: Callable[[], None] = lambda: None
    """Called several times a second, in the thread that serves the run."""
    revoke: Callable[[str, str], bool] = lambda device, reason: False
    """Withdraws the certificate of a device that floods the coordinator, given a reason; False if it has none."""
    lead: Callable[[RunParts], Lead] = OwnLead
