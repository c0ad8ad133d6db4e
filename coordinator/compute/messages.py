"""Requests of a run's control side to its compute side, and the answers: plain data, without torch.

The compute side reads the run's record and blobs itself. Every request can be repeated: it only writes blobs, which are
named by their content, and files with the same content again.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.config import RunConfig
from coordinator.record.tables import SavedState, TaskRecord
from fedvit.wire.messages import DeltaStep
from profiles.prediction import Expected

Answer = TypeVar("Answer")


class ComputeRequest(Struct, Generic[Answer], frozen=True, kw_only=True):
    """A request; `answer` is the type of the answer."""

    answer: ClassVar[Any]


# --- parts of answers -------------------------------------------------------------------------------------


class Outlier(NamedTuple):
    """An upload that is left out, and the reason."""

    device: str
    reason: str


class Prepared(Struct, frozen=True, kw_only=True):
    """The starting point of a run that begins or is resumed."""

    program: str  # digest of the Program of a device without a variant, in round 1
    protocol: str  # how accuracy is measured
    groups: dict[str, tuple[str, int]]  # group -> its role, and how many tensors it has
    accelerator: str  # torch device
    saved: SavedState  # the newest state
    remade: list[int]  # rounds whose damaged state was recomputed


class PlannedTask(Struct, frozen=True, kw_only=True):
    """The task of one device in a round. It travels whole from the plan to the device."""

    program: str  # digest
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None = None  # None: the device is unknown
    delta_chain: tuple[DeltaStep, ...] = ()  # steps by which the device can build blobs of `groups` from older ones
    lr_scale: float = 1.0  # factor on the learning rate

    def identity(self) -> tuple[Any, ...]:
        """Return everything on which the result depends."""
        return self.program, sorted(self.groups.items()), self.lr_scale


class Planned(Struct, frozen=True, kw_only=True):
    """The tasks of a cohort."""

    tasks: dict[str, PlannedTask]  # by device
    too_small: dict[str, str]  # device -> reason why nothing fits its budget


class NextState(Struct, frozen=True, kw_only=True):
    """The outcome of a server step."""

    saved: SavedState
    figures: dict[str, float]  # for the round's record
    damaged: dict[str, str]  # device -> digest of its damaged upload of an earlier round, which was left out
    needed: set[str]  # digests that devices may still request, or a restart may need


class Folded(Struct, frozen=True, kw_only=True):
    """The mean of a round's updates, which a region sends to its centre."""

    update: str  # digest of the blob with the mean of each tensor's deltas, by samples
    samples: int  # of all devices in it
    figures: dict[str, float]  # for the round's record
    needed: set[str]  # digests that devices may still request, or a restart may need


# --- requests ---------------------------------------------------------------------------------------------


class Checked(Struct, frozen=True, kw_only=True):
    """The answer for a configuration with which a run can begin on this machine."""

    accelerator: str  # torch device of the server
    parameters: int  # numbers in the model
    notes: list[str]  # warnings for the operator


class Check(ComputeRequest[Checked], frozen=True, kw_only=True, tag=True):
    """Check that a run can begin on this machine: build its model, read its weights and the run that it starts from.

    Raises ConfigError, and Damaged if the state of the earlier run is damaged.
    """

    answer = Checked
    config: RunConfig
    where: str  # begins the message of an error: the file of the configuration, or its flags
    runs: str  # folder of all runs
    is_region: bool = False  # whether the run is that of a region


class Prepare(ComputeRequest[Prepared], frozen=True, kw_only=True, tag=True):
    """Make the Program and find the newest state; forget earlier requests.

    Raises ConfigError if the run began with another Program, Damaged if a damaged state cannot be recomputed.
    """

    answer = Prepared
    classes: tuple[str, ...]
    budgets: bool  # whether some device has a budget
    copies: str  # older records of the run, for the message of an error


class PlanTasks(ComputeRequest[Planned], frozen=True, kw_only=True, tag=True):
    """Plan the tasks of these devices for a round; a target is None for a device that has not sent hello yet."""

    answer = Planned
    round: int
    saved: SavedState
    targets: dict[str, PlannedDevice | None]


class RecallTasks(ComputeRequest[list[PlannedTask]], frozen=True, kw_only=True, tag=True):
    """Plan tasks again as they are recorded, of any round: with the same tensors."""

    answer = list[PlannedTask]
    tasks: list[TaskRecord]


class FindOutliers(ComputeRequest[list[Outlier]], frozen=True, kw_only=True, tag=True):
    """Find the results of a round that are far out of scale."""

    answer = list[Outlier]
    round: int


class Step(ComputeRequest[NextState], frozen=True, kw_only=True, tag=True):
    """Compute the next state from a round's results, without those of devices in quarantine.

    Raises EmptyCohort if no usable result is left.
    """

    answer = NextState
    round: int
    saved: SavedState  # the state before
    drawn: tuple[int, int] | None  # number of free devices, and of drawn devices; None: unknown


class Fold(ComputeRequest[Folded], frozen=True, kw_only=True, tag=True):
    """Make one update of a round's results, without those of devices in quarantine.

    Raises EmptyCohort if no usable result is left.
    """

    answer = Folded
    round: int
    saved: SavedState  # the state that the updates belong to


class Finish(ComputeRequest[None], frozen=True, kw_only=True, tag=True):
    """Write the run's tensors, and those generated per device, into its folder."""

    answer = None
    saved: SavedState
    best: SavedState | None = None  # of the best round, written into `best/` as well


AnyRequest = Check | Prepare | PlanTasks | RecallTasks | FindOutliers | Step | Fold | Finish


class Compute(Protocol):
    """One run's. `ask` waits for the answer, from one thread at a time."""

    progress: Callable[[str], None]
    """Called with a description of the current step, in the thread that asks."""

    def ask(self, request: ComputeRequest[Answer]) -> Answer:
        """Raise the errors that the request documents, DamagedBlob, and StorageFailed."""
        ...

    def damaged(self) -> list[str]:
        """Digests of blobs that were found damaged since the last call."""
        ...

    def take_warnings(self) -> list[str]:
        """To be called often: returns new messages about the compute side itself, for the operator."""
        ...

    def close(self) -> None:
        """End at once, without waiting for a request that is being worked on."""
        ...
