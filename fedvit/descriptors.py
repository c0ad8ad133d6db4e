"""The limit of open files and connections, and messages about it."""

import errno
import fcntl
import os
import resource

USED_UP = (errno.EMFILE, errno.ENFILE)
"""Errors of the system at the limit of a process, or of all processes."""
MOST_COUNTED = 1 << 16


def raise_limit() -> None:
    """Raise this process's soft limit to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # some systems report a hard limit that they do not grant
            return


def are_used_up() -> bool:
    """Return whether no file can be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in USED_UP
    return False


def how_many() -> str:
    """A message for the operator; made without opening a file."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    counted = MOST_COUNTED if limit == resource.RLIM_INFINITY else max(1024, min(limit, MOST_COUNTED))
    number = sum(map(_is_open, range(counted)))
    return (
        f"{number} files and connections are open, {limit} are allowed; more: `ulimit -n NUMBER` before the start, "
        "LimitNOFILE= in a systemd unit, or fs.file-max for the whole system"
    )


def _is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True
