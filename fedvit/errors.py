"""Every error that fedvit raises on purpose: one root, leaves by who can act.

    FedvitError
    +-- ConfigError      the operator: a setting, flag or folder is wrong
    +-- DataError        the device's owner: images or class folders cannot be used
    +-- LinkDown         nobody, retry: the broker or the peer cannot be reached
    +-- PeerRefused      do not retry: the other side said no, and why
    +-- BadPayload       refuse this one payload, keep the round
    +-- EmptyCohort      the round: no usable result came back, repeat it
    +-- OverBudget       the planner: another variant of the Program is needed
    +-- ExportMismatch   do not ship: a graph does not compute what torch computes
    +-- StorageFailed    the machine's owner: a disk is full or not writable
    |   +-- NoRoom       the same, and the same call will succeed when there is room again
    |   |   +-- DiskFull            on the disk
    |   |   +-- TooManyOpenFiles    among the files that a process, or the system, may have open
    |   +-- Damaged      a file no longer holds what was written to it
    +-- DeviceTrouble    the machine's owner: hardware or engine do not work as they must

A message says what was expected, what came, and which round and device. Programs end with the leaf's
`exit_code`, so that a service manager can tell a typing error from a dead link.
"""


class FedvitError(Exception):
    """Root of all deliberate errors; catch it only at the edge of a program."""

    exit_code = 1


class ConfigError(FedvitError):
    """A setting, flag, file or folder given by the operator cannot be used."""

    exit_code = 2


class DataError(FedvitError):
    """The images on a device cannot be used as they lie."""

    exit_code = 3


class LinkDown(FedvitError):
    """The broker or the peer cannot be reached now; the same call may succeed later."""

    exit_code = 4


class PeerRefused(FedvitError):
    """The other side refused, for a reason that retrying does not change."""

    exit_code = 5


class BadPayload(FedvitError):
    """Something that arrived does not hold what it must; it is dropped, the round goes on."""

    exit_code = 6


class EmptyCohort(FedvitError):
    """A round ended without one usable result."""

    exit_code = 7


class OverBudget(FedvitError):
    """A task does not fit its device, in memory, work or time."""

    exit_code = 8


class ExportMismatch(FedvitError):
    """An exported graph and torch disagree; it must not reach a device."""

    exit_code = 9


class StorageFailed(FedvitError):
    """A file could not be written: disk full, read-only, or no permission."""

    exit_code = 10


class NoRoom(StorageFailed):
    """Something was used up: what stood there before still does, and the same call succeeds when there is more."""


class DiskFull(NoRoom):
    """There was no room for a file on the disk."""


class TooManyOpenFiles(NoRoom):
    """The process, or the whole system, has as many files and connections open as it may."""


class Damaged(StorageFailed):
    """A file does not hold what was written to it: the message names it, what it held, and what to do."""


class DeviceTrouble(FedvitError):
    """The device's processor, engine or a part of it does not work as it must."""

    exit_code = 11


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""
