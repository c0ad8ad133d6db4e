"""Python programs start with their modules compiled, as installed ones do, or their import times mean nothing."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def with_bytecode(command: Sequence[str]) -> list[str]:
    """A command line whose Python keeps what it compiles; where this one must write none beside the sources, elsewhere.

    >>> with_bytecode(["python"])[-1]
    'python'
    """
    if not sys.dont_write_bytecode:
        return list(command)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit" / "bytecode"
    return ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPYCACHEPREFIX={cache}", *command]
