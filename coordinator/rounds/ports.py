# ruff: noqa: B027 - empty methods are defaults
"""The ports of the round engine: who can be asked, who computes, and what survives.

What they do unless they say otherwise holds for devices that are always there, answer at once, and are asked in one
process that starts from the beginning.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from coordinator.compute.messages import NextState
from coordinator.record.rounds import ClosedRound
from coordinator.record.tables import Asked, ResultRecord, RoundRecord, TaskRecord
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.tasks import Work
from fedvit.errors import EmptyCohort

MakeState = Callable[[OpenRound, list[ResultRecord]], NextState]
"""Makes the next state of a round's results. Raises EmptyCohort if there is no usable result."""


class RoundResult(NamedTuple):
    """A round whose training has closed, with everything that is kept of it."""

    number: int
    updates: list[ResultRecord]
    stepped: NextState
    figures: dict[str, float]
    is_last: bool


class Roster(ABC):
    """The devices of a run, and which of them can be asked now."""

    @abstractmethod
    def online(self) -> list[str]:
        """Devices that are connected and admitted."""

    @abstractmethod
    def admit(self, devices: Iterable[str]) -> list[str]:
        """Return the devices that are neither revoked nor in quarantine."""

    def has_online(self) -> bool:
        """Return whether any device is connected, admitted or not."""
        return True

    def available(self) -> list[str]:
        """Devices that can be asked now."""
        return self.online()

    def at_work(self) -> list[str]:
        """Devices with a task."""
        return []

    def has_seen(self, device: str) -> bool:
        """Return whether this process knows the device's profile."""
        return True

    def is_online(self, device: str) -> bool:
        return True

    def is_complete(self, patience_s: float) -> bool:
        """Return whether no device that was online within this time may return."""
        return True

    def may_answer_later(self) -> bool:
        """Return whether a device will be available after a while."""
        return False


class Trainer(ABC):
    """Computes what rounds ask: devices behind a broker, or a cohort in this process."""

    is_repeatable = True
    """Another attempt at a round without a usable result can give one."""

    @abstractmethod
    def begin(self, number: int, *, is_new: bool) -> None:
        """Make a round the current one. A paused run waits here before a new round."""

    @abstractmethod
    def plan(self, devices: Iterable[str]) -> dict[str, Work]:
        """Plan the work of devices in the current round. Devices for which no Program fits are left out."""

    @abstractmethod
    def offer(self, opened: OpenRound, devices: Iterable[str]) -> None:
        """Give devices their work of a round, now or when they are free."""

    def recall(self, tasks: Iterable[TaskRecord]) -> dict[str, Work]:
        """Return the work that an earlier process assigned. Tasks with missing blobs are left out."""
        return {}

    def open(self, opened: OpenRound) -> None:
        """Open a round: results count in it from now on."""

    def wait(self, until: Callable[[], bool]) -> None:
        """Serve devices until a condition holds. Raises EmptyCohort if it cannot."""
        if not until():
            raise EmptyCohort("FV1501", "no device can be asked: all are in quarantine")

    def close(self, opened: OpenRound) -> None:
        """Close a round: no more results are awaited."""

    def withdraw(self, opened: OpenRound, devices: Iterable[str]) -> None:
        """End the tasks of a closed round, unless late results still count."""

    def add_up(self, opened: OpenRound) -> None:
        """Add up the results of a closed round in secret, if the run asks for it. Raises EmptyCohort if that failed."""

    def dismiss(self) -> None:
        """End all tasks: the last round is closed."""


class RunHistory(ABC):
    """Rounds as earlier processes left them."""

    @abstractmethod
    def first_round(self) -> int:
        """The first round that is not finished, or the last one, which may lack its evaluation."""

    @abstractmethod
    def open_round(self) -> int:
        """The round after the newest closed one."""

    @abstractmethod
    def find(self, number: int) -> RoundRecord | None:
        """Return a round; None if no earlier process opened it."""

    @abstractmethod
    def read_past(self, first: int) -> list[ClosedRound]:
        """Rounds before the round `first`, in order."""

    @abstractmethod
    def show_command(self) -> str:
        """Command line that shows the run."""


class Journal(ABC):
    """Keeps what a restart needs: on the disk before a device is asked or answered, or with the next checkpoint."""

    # --- an open round ----------------------------------------------------------------------------------

    @abstractmethod
    def count_asked(self) -> Mapping[str, Asked]:
        """When each device was asked last, and how often."""

    @abstractmethod
    def newest_answers(self, number: int) -> Mapping[str, ResultRecord]:
        """The newest training result of each device that a server step before round `number` used."""

    @abstractmethod
    def open(self, number: int, cohort: list[str], needed: int) -> None:
        """Keep a round's cohort, before devices are asked."""

    @abstractmethod
    def results(self, opened: OpenRound) -> list[ResultRecord]:
        """Results that the server step of a round uses."""

    def find_unanswered(self, number: int | None = None) -> list[TaskRecord]:
        """Tasks that are under way: those of a round, or all."""
        return []

    def devices_s(self, number: int) -> float:
        """Seconds in which earlier processes waited for the results of a round."""
        return 0.0

    def begin(self, number: int) -> None:
        """Count the results that come from now on in this round."""

    def find_counted(self) -> set[str]:
        """Devices with a result for the current round."""
        return set()

    def add_tasks(self, number: int, work: Mapping[str, Work]) -> None:
        """Keep the tasks of a round, before they are sent to devices."""

    def drop_damaged(self, results: list[ResultRecord], repeats: int) -> bool:
        """Drop results that can no longer be read; True if there were any. `repeats`: earlier ones of this round."""
        return False

    # --- a closed round ---------------------------------------------------------------------------------

    def open_test(self) -> RoundRecord:
        """Return the round of the earlier run that this one only tests, closed with the state that it begins with."""
        raise NotImplementedError("only runs on devices test an earlier run")

    @abstractmethod
    def close(self, result: RoundResult) -> None:
        """Keep a round's state as the newest."""

    @abstractmethod
    def keep_evaluation(self, number: int) -> float | None:
        """Keep the evaluation of a round, and return its mean accuracy; None: no device has test images."""

    def keep_best(self, number: int) -> None:
        """Keep the state of the best round so far, in place of an earlier one."""

    @abstractmethod
    def finish(self, number: int, *, is_last: bool = False) -> None:
        """Complete a round, and show it to the operator."""

    def prune(self, result: RoundResult) -> None:
        """Delete what is no longer needed now that a round has closed."""


class Comparisons(ABC):
    """Devices of a run have models of their own, which they can compare with the model of a round."""

    @abstractmethod
    def can_compare(self, device: str) -> bool:
        """Return whether a device knows tasks that compare, and its owner allows them."""

    @abstractmethod
    def find_round(self) -> int:
        """The round whose model devices compare at the end: the best one if its state is kept, else the newest."""

    @abstractmethod
    def has(self, number: int) -> bool:
        """Return whether devices have compared the model of a round."""

    @abstractmethod
    def keep(self, number: int) -> None:
        """Keep the comparison of a round's model, and let devices use it as the run's rules say."""


class Ports(NamedTuple):
    """Everything that differs between runs on devices, regions and simulations."""

    roster: Roster
    trainer: Trainer
    journal: Journal
    history: RunHistory
    comparisons: Comparisons | None = None  # None: devices have no models of their own
