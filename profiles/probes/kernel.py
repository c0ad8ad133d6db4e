"""Reads small files and commands of the system, below a root that tests choose. Absent is None."""

import subprocess
from pathlib import Path

ROOT = Path("/")
COMMAND_S = 2.0
"""Patience with a command; the firmware of a Raspberry Pi answers in a few milliseconds."""


def read_text(path: Path) -> str | None:
    """The content without the space or NUL around it; None when it cannot be read or is empty.

    Some sensors are there but refuse to be read while their unit is switched off (a Jetson's cv-thermal).
    """
    try:
        return path.read_text(errors="replace").strip(" \t\r\n\0") or None
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def run(root: Path, name: str, *arguments: str) -> str | None:
    """The output of a command; None when it is not installed below `root`, fails or hangs."""
    for folder in ("usr/bin", "opt/vc/bin"):
        program = root / folder / name
        if program.is_file():
            break
    else:
        return None
    try:
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
