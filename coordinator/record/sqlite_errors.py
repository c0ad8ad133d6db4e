"""The meaning of SQLite's errors: damage, no space, no descriptors, or a storage that fails."""

from collections.abc import Callable

from fedvit.descriptors import are_used_up, how_many
from fedvit.errors import Damaged, DiskFull, FedvitError, StorageFailed, TooManyOpenFiles

_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
"""Errors when a write finds no space; the second also for a limit on file sizes."""
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS")
"""Prefixes of the error names for a damaged file."""
_FOREIGN = ("Could not decode to UTF-8", "no such table", "no such column")
"""Prefixes of messages that also mean a damaged file."""


def convert_error(error: Exception, database: str, make_damaged_error: Callable[[str], Damaged] | None) -> FedvitError:
    """Return the error for one of SQLAlchemy or of its driver.

    `database`: begins the message. `make_damaged_error`: makes the error of a damaged file; None if it is not SQLite's.
    """
    cause = getattr(error, "orig", None) or error
    name = getattr(cause, "sqlite_errorname", None) or ""
    if make_damaged_error and (name.startswith(_DAMAGED) or str(cause).startswith(_FOREIGN)):
        return make_damaged_error(str(cause))
    if are_used_up():  # SQLite only reports that it cannot open a file
        return TooManyOpenFiles(TooManyOpenFiles.general_code, f"{database}: {cause}; {how_many()}")
    kind = DiskFull if name in _FULL else StorageFailed
    return kind(kind.general_code, f"{database}: {cause}")
