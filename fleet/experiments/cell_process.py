"""Cells as processes that are forked from one which has imported what they need.

A cell of a second or two would otherwise spend most of its time on the start of Python and torch.
"""

import gc
import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

from fleet.experiments.cells import CellOptions, GridCell
from fleet.experiments.folder import LOG_FILE, CellFolder
from fleet.processes import PASSIVE_THREADS, STOP_S

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["fleet.experiments.cell", "coordinator.record.migrations", "coordinator.rounds.modes.synchronous"]
TRACED, COMPILED = "torch._dynamo", "torch._inductor.compile_fx"
"""Modules that cells of the engines of torch import when they trace a step, and when they compile one."""


class CellProcess:
    """A cell in a process of its own, which ends with this process even by kill -9."""

    def __init__(self, folder: CellFolder, *, options: CellOptions) -> None:
        log = folder.folder / LOG_FILE
        log.write_bytes(b"")
        _start_server(folder.cell, options)
        arguments = (folder.folder, folder.parts, options)
        self._process = FORKS.Process(target=_run, args=(log, dict(os.environ), arguments))
        self._process.start()

    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def stop(self) -> None:
        """End the process, by SIGKILL after STOP_S."""
        self._process.terminate()
        self._process.join(STOP_S)
        self._process.kill()
        self._process.join()


def _start_server(cell: GridCell, options: CellOptions) -> None:
    """Start the process to fork from; if it runs, nothing changes."""
    more = [] if cell.engine == "onnx" else [COMPILED if options.compiles else TRACED]
    FORKS.set_forkserver_preload([*IMPORTED, *more])
    before = dict(os.environ)
    os.environ |= {**PASSIVE_THREADS, **before, "PYTHONSAFEPATH": "1"}  # nothing is imported from the current folder
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(log: Path, environment: Mapping[str, str], arguments: tuple[Path, Path, CellOptions]) -> None:
    """Run a cell in a session of its own, so that Ctrl-C reaches only the process that started it."""
    os.setsid()
    Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what was imported stays to the end
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    from fleet.experiments.cell import run_alone  # the process that started this one has no torch

    run_alone(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
