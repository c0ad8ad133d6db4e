"""Instructions of a program that QEMU's plugin counts (instructions.c)."""

import os
from pathlib import Path


def mark() -> None:
    """Mark a place in an emulated program of one thread: the plugin writes the number of instructions so far."""
    os.getpriority(os.PRIO_USER, 0)


def read_counts(file: Path) -> list[int]:
    """Read the numbers at all marks, and at the end of the program."""
    return [int(line) for line in file.read_text().splitlines()]
