"""Command lines that our programs name in their messages, for the reader to run."""

import shlex
from pathlib import Path

USUAL = {"--runs": Path("runs"), "--deployment": Path("deployment")}
"""Folders that a command uses if its option is left out."""


def command(*words: object, **folders: Path | None) -> str:
    """Return a command line, quoted for a shell. `folders`: options by name, left out where the command takes the same
    folder without them.

    >>> command("coordinator", "show", "first", runs=Path("runs"))
    'coordinator show first'
    >>> command("coordinator", "enroll", "NAME", deployment=Path("/srv/my fleet"))
    "coordinator enroll NAME --deployment '/srv/my fleet'"
    """
    line = [str(word) for word in words]
    for name, folder in folders.items():
        option = f"--{name}"
        if folder is not None and folder != USUAL[option]:
            line += [option, str(folder)]
    return shlex.join(line)
