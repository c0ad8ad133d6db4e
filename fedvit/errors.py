"""All deliberate errors of fedvit: one root, and a class for each party that can act.

    FedvitError
    +-- ConfigError      the operator: a setting, flag or folder is wrong
    +-- DataError        the device's owner: images or class folders cannot be used
    +-- LinkDown         retry: the broker or the peer cannot be reached
    +-- PeerRefused      do not retry: the other side refused, with a reason
    +-- BadPayload       refuse this payload, continue the round
    +-- EmptyCohort      the round: no usable result arrived, repeat it
    +-- OverBudget       the planner: another variant of the Program is needed
    +-- ExportMismatch   do not ship: a graph does not compute what torch computes
    +-- StorageFailed    the machine's owner: a disk is full or not writable
    |   +-- NoRoom       the same, but the call will succeed when resources are free again
    |   |   +-- DiskFull            on the disk
    |   |   +-- DatabaseGone        the database's server does not answer
    |   |   +-- TooManyOpenFiles    among the files that a process, or the system, may have open
    |   +-- Damaged      a file is damaged
    |   +-- LeadershipLost   another coordinator writes the record now
    +-- DeviceTrouble    the machine's owner: hardware or engine are defective
    +-- NotAllowed       the device's owner: a task asks for more than the device allows

A message names the expectation, the value, the round and the device; a code names the explanation. Programs end with
the `exit_code` of the class, so that a service manager can distinguish a wrong setting from a dead link.
"""


class FedvitError(Exception):
    """Root of all deliberate errors; catch it only at the top of a program.

    `code` is a key of `explanations.toml`, such as FV1203. The text of the error does not contain it.
    """

    exit_code = 1
    general_code = "FV0001"
    """Code of an error that nothing explains better than its class does."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


class ConfigError(FedvitError):
    """A setting, flag, file or folder given by the operator cannot be used."""

    exit_code = 2
    general_code = "FV0002"


class DataError(FedvitError):
    """The images on a device cannot be used."""

    exit_code = 3
    general_code = "FV0003"


class LinkDown(FedvitError):
    """The broker or the peer cannot be reached now; the same call may succeed later."""

    exit_code = 4
    general_code = "FV0004"


class PeerRefused(FedvitError):
    """The other side refused, and retrying does not help."""

    exit_code = 5
    general_code = "FV0005"


class BadPayload(FedvitError):
    """Received data are invalid; they are dropped, and the round continues."""

    exit_code = 6
    general_code = "FV0006"


class EmptyCohort(FedvitError):
    """A round ended without one usable result."""

    exit_code = 7
    general_code = "FV0007"


class OverBudget(FedvitError):
    """A task does not fit its device, in memory, work or time."""

    exit_code = 8
    general_code = "FV0008"


class ExportMismatch(FedvitError):
    """An exported graph and torch disagree; it must not reach a device."""

    exit_code = 9
    general_code = "FV0009"


class StorageFailed(FedvitError):
    """A file could not be written: disk full, read-only, or no permission."""

    exit_code = 10
    general_code = "FV0010"


class NoRoom(StorageFailed):
    """A resource is exhausted: old content is unchanged, and the call succeeds when the resource is free again."""

    general_code = "FV0011"


class DiskFull(NoRoom):
    """The disk has no space for a file."""

    general_code = "FV0012"


class TooManyOpenFiles(NoRoom):
    """The process, or the whole system, has reached its limit of open files and connections."""

    general_code = "FV0013"


class DatabaseGone(NoRoom):
    """The server of the record's database does not answer, or refuses connections."""

    general_code = "FV0014"


class Damaged(StorageFailed):
    """A file is damaged: the message names it, its content, and what to do."""

    general_code = "FV0015"


class LeadershipLost(StorageFailed):
    """Another coordinator has taken over the record; this one must write nothing more."""

    general_code = "FV0016"


class DeviceTrouble(FedvitError):
    """The device's processor, engine or another part is defective."""

    exit_code = 11
    general_code = "FV0017"


class NotAllowed(FedvitError):
    """The device does not allow a task; the coordinator may ask again after `again_s` seconds."""

    exit_code = 12
    general_code = "FV0018"

    def __init__(self, code: str, message: str, again_s: float = 86400.0) -> None:
        super().__init__(code, message)
        self.again_s = again_s


def describe_fault(error: BaseException) -> str:
    """Return the text of an error; that of an error which is not deliberate begins with its class."""
    return str(error) if isinstance(error, FedvitError) else f"{type(error).__name__}: {error}"


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect."""
