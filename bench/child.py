"""Measurements in processes of their own, and of time."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedvit.errors import FedvitError
from fleet.processes import last_line_of, program


def with_bytecode(command: Sequence[str]) -> list[str]:
    """Let a command use compiled modules, as an installed program does; otherwise import times mean nothing.

    >>> with_bytecode(["python"])[-1]
    'python'
    """
    if not sys.dont_write_bytecode:
        return list(command)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit" / "bytecode"
    return ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPYCACHEPREFIX={cache}", *command]


def run_child(
    module: str,
    *arguments: str,
    what: str,
    on_line: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run `main()` of a module and return the last line that it printed; `on_line` gets the earlier ones.

    The environment is not tuned beyond what `environment` adds; modules are compiled. Raises FedvitError, beginning
    with `what`, when the process fails.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            with_bytecode([*program(module), *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        last = ""
        try:
            assert child.stdout is not None  # asked for above
            for line in child.stdout:
                if last:
                    on_line(last)
                last = line.rstrip("\n")
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
        if child.returncode != 0:
            errors.seek(0)
            raise FedvitError("FV1218", f"{what} ended with code {child.returncode}: {last_line_of(errors.read())}")
        return last


def time_work(work: Callable[[], object]) -> float:
    """Return the seconds that work takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def time_command(runs: Path, *words: str) -> tuple[float, float]:
    """Return wall and processor seconds of a command of the coordinator. Raises FedvitError when it fails."""
    before, began = os.times(), time.monotonic()
    command = with_bytecode([*program("coordinator.cli"), *words, "--runs", str(runs)])
    ended = subprocess.run(command, capture_output=True, text=True)
    wall, after = time.monotonic() - began, os.times()
    if ended.returncode:
        raise FedvitError("FV0001", f"coordinator {words[0]} ended with code {ended.returncode}: {ended.stderr[-400:]}")
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, spent
