"""Start Python programs with compiled modules, as installed programs do: otherwise import times mean nothing."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def with_bytecode(command: Sequence[str]) -> list[str]:
    """The command line, with a cache folder for bytecode where this process must not write bytecode beside the sources.

    >>> with_bytecode(["python"])[-1]
    'python'
    """
    if not sys.dont_write_bytecode:
        return list(command)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit" / "bytecode"
    return ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPYCACHEPREFIX={cache}", *command]
