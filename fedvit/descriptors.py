"""Open files and connections: how many a process may have, and what to say when they are used up."""

import errno
import fcntl
import os
import resource

USED_UP = (errno.EMFILE, errno.ENFILE)
"""What the system says when a process, or all of them together, have as many open as they may."""
MOST_COUNTED = 1 << 16


def raise_limit() -> None:
    """Allow this process as many as its administrator does, not only what programs get that do not ask."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # some systems name a hard limit that they do not grant
            return


def are_used_up() -> bool:
    """Whether nothing can be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in USED_UP
    return False


def how_many() -> str:
    """For the operator; it opens nothing itself."""
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
