"""What the control of a run asks of the compute side, and what it is answered: data alone, without torch.

The compute side reads the run's record and blobs itself. Every request can be repeated: nothing follows from it but
blobs that are named by their content, and files that hold the same again.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from coordinator.config import RunConfig
from coordinator.planning.planned_device import PlannedDevice
from coordinator.record.tables import SavedState
from fedvit.wire.messages import DeltaStep
from profiles.prediction import Expected

Answer = TypeVar("Answer")


class Request(Struct, Generic[Answer], frozen=True, kw_only=True):
    """A request; `answer` is the type of what is answered."""

    answer: ClassVar[Any]


# --- what is told of devices and of a round ---------------------------------------------------------------


class Outlier(NamedTuple):
    """An upload that is left out, and why."""

    device: str
    reason: str


class Prepared(Struct, frozen=True, kw_only=True):
    """What the run begins, or is resumed, with."""

    program: str  # digest of the Program of a device that no pattern names, in round 1
    protocol: str  # how accuracy is measured
    groups: dict[str, tuple[str, int]]  # group -> its role, and how many tensors it has
    accelerator: str  # torch device
    saved: SavedState  # the newest state
    remade: list[int]  # rounds whose damaged state was computed again


class PlannedTask(Struct, frozen=True, kw_only=True):
    """What one device is asked to do in a round."""

    program: str  # digest
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None  # None: nothing is known of the device
    recipes: tuple[DeltaStep, ...]  # how it may make blobs of `groups`
    lr_scale: float  # factor on the learning rate


class Planned(Struct, frozen=True, kw_only=True):
    """The tasks of a cohort."""

    tasks: dict[str, PlannedTask]  # by device
    too_small: dict[str, str]  # device -> why nothing fits its budget


class Stepped(Struct, frozen=True, kw_only=True):
    """What a round's results made of the state."""

    saved: SavedState
    figures: dict[str, float]  # for the round's record
    damaged: dict[str, str]  # device -> digest of its upload of an earlier round, which is damaged and was left out
    needed: set[str]  # digests that devices may still ask for, or a restart may need


# --- requests ---------------------------------------------------------------------------------------------


class Checked(Struct, frozen=True, kw_only=True):
    """A configuration with which a run can begin here."""

    accelerator: str  # torch device that its server will compute on
    parameters: int  # numbers in the model
    notes: list[str]  # what its operator should know, and is no mistake


class Check(Request[Checked], frozen=True, kw_only=True, tag=True):
    """Whether a run could begin here: its model is built, its weights and the run that it starts from are read.

    Raises ConfigError, and Damaged where the state of an earlier run is.
    """

    answer = Checked
    config: RunConfig
    where: str  # begins the message of an error: the file of the configuration, or its flags
    runs: str  # folder of all runs


class Prepare(Request[Prepared], frozen=True, kw_only=True, tag=True):
    """Make the Program, and find the newest state; what was known of earlier requests is forgotten.

    Raises ConfigError when the run began with another Program, Damaged when a damaged state cannot be made anew.
    """

    answer = Prepared
    classes: tuple[str, ...]
    budgets: bool  # whether some device has a budget
    copies: str  # older records of the run, for the message of an error


class PlanTasks(Request[Planned], frozen=True, kw_only=True, tag=True):
    """Make what each of these devices gets in a round; None for one that has not said hello to this process."""

    answer = Planned
    round: int
    saved: SavedState
    targets: dict[str, PlannedDevice | None]


class LearningRates(Request[list[float]], frozen=True, kw_only=True, tag=True):
    """The factors on the learning rate of tasks: of each the device and the round."""

    answer = list[float]
    tasks: list[tuple[str, int]]


class FindOutliers(Request[list[Outlier]], frozen=True, kw_only=True, tag=True):
    """Which results of a round are far out of scale."""

    answer = list[Outlier]
    round: int


class Step(Request[Stepped], frozen=True, kw_only=True, tag=True):
    """Make the next state of a round's results, without those of devices that are in quarantine.

    Raises EmptyCohort when there is nothing to make it of.
    """

    answer = Stepped
    round: int
    saved: SavedState  # the state before
    drawn: tuple[int, int] | None  # devices that were free, and how many of them were drawn; None: not known


class Finish(Request[None], frozen=True, kw_only=True, tag=True):
    """Write the tensors of the run, and what is made for each device, into its folder."""

    answer = None
    saved: SavedState


AnyRequest = Check | Prepare | PlanTasks | LearningRates | FindOutliers | Step | Finish


class Compute(Protocol):
    """One run's. `ask` waits for the answer, from one thread at a time."""

    progress: Callable[[str], None]
    """Called with what is being done, in the thread that asks."""

    def ask(self, request: Request[Answer]) -> Answer:
        """Raises what the request says, DamagedBlob, and StorageFailed."""
        ...

    def damaged(self) -> list[str]:
        """Digests of blobs that were found to be damaged since this was asked last."""
        ...

    def keep(self) -> list[str]:
        """To be called often: what happened to the compute side itself, for the operator."""
        ...

    def close(self) -> None:
        """What is being done is not waited for."""
        ...
