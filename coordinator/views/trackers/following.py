"""Writers that follow a run: each reads the record in its own thread, so that it neither fails nor delays the run.

Every writer is a module of this package, and a row of `WRITERS`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from coordinator.config import RunConfig, TrackersConfig
from coordinator.config.trackers import WriterName
from coordinator.record.record import Record
from coordinator.views.trackers.mlflow import MlflowWriter
from coordinator.views.trackers.tensorboard import TensorBoardWriter
from coordinator.views.trackers.writer import RunInfo, Writer, flatten_settings, read_rounds
from fedvit.errors import ConfigError
from fedvit.hints import command

log = logging.getLogger(__name__)

WRITERS: dict[WriterName, type[Writer]] = {"tensorboard": TensorBoardWriter, "mlflow": MlflowWriter}
LOOK_EVERY_S = 1.0
"""Interval of reading new rounds from the record."""
RETRY_S = 10.0
"""Interval between attempts after an error."""
PATIENCE_S = 10.0
"""Longest wait of a run's end for a writer without progress."""
MOST_ROUNDS = 50
"""Most rounds that are written at a time."""


def check_writers(config: TrackersConfig, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if the library of a writer is not installed."""
    for name in config.writers:
        library = WRITERS[name].library
        if find_spec(library) is None:
            raise ConfigError(
                "FV1016",
                f"{where}: writers: {name!r} needs the package {library!r}, which is not installed: "
                f"pip install 'fedvit[{name}]', or leave the writer out",
            )


def make_writers(run: str, config: RunConfig, folder: Path) -> list[Writer]:
    """Make the configured writers; `run` is the run's name for them, `folder` its folder."""
    info = RunInfo(run, folder, flatten_settings(config))
    return [WRITERS[name](info, config.trackers) for name in config.trackers.writers]


@contextmanager
def following(
    run: str,
    config: RunConfig,
    store: Record,
    folder: Path,
    operator_log: Callable[[str], None],
    *,
    label: str | None = None,
) -> Iterator[None]:
    """Let the configured writers write, during the block, the rounds that `store` receives.

    `folder` is the run's folder, `label` its name for the writers, by default its own name. An error is reported once,
    and the writer retries.
    """
    writers = make_writers(label or run, config, folder)
    followers = [Follower(writer, run, config, store, operator_log) for writer in writers]
    try:
        yield
    finally:
        for follower in followers:
            follower.finish()
        for follower in followers:
            follower.wait()


def write_all(writer: Writer, run: str, config: RunConfig, store: Record) -> int:
    """Write the rounds that a writer lacks; returns their number. Raises the errors of the writer's library."""
    newest = first = writer.begin()
    while rounds := read_rounds(store, run, config, newest, MOST_ROUNDS):
        writer.write(rounds)
        newest = rounds[-1].round
    writer.end(store.runs.read(run).status)
    return newest - first


class Follower:
    """One writer that follows one run."""

    def __init__(
        self, writer: Writer, run: str, config: RunConfig, store: Record, operator_log: Callable[[str], None]
    ) -> None:
        self._writer = writer
        self._run, self._config, self._store = run, config, store
        self._operator_log = operator_log
        self._newest: int | None = None  # newest written round; None: unknown, `begin` returns it
        self._trouble = False
        self._over = threading.Event()  # set at the end of the run
        self._abandoned = False  # the run no longer waits
        self._active_at = time.monotonic()  # time of the last progress
        self._thread = threading.Thread(target=self._follow, name=f"metrics-{run}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Announce the end of the run: no further rounds follow."""
        self._active_at = time.monotonic()
        self._over.set()

    def wait(self) -> None:
        """Wait until everything is written, or until there was no progress for PATIENCE_S."""
        while self._thread.is_alive() and time.monotonic() - self._active_at < PATIENCE_S:
            self._thread.join(0.1)
        if self._thread.is_alive():
            self._abandoned = True
            self._log_missing()

    def _follow(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._over.wait(pause_s):
            pause_s = LOOK_EVERY_S if self._catch_up() else RETRY_S
        if not self._catch_up(last=True) and not self._abandoned:
            self._log_missing()

    def _catch_up(self, *, last: bool = False) -> bool:
        """Write all new rounds; returns whether that worked."""
        try:
            if self._newest is None:
                if self._store.runs.read(self._run).status != "running" and not self._store.rounds.find_last(self._run):
                    return True  # the run may never begin, and must leave nothing behind then
                self._newest = self._writer.begin()
            while not self._abandoned and (
                rounds := read_rounds(self._store, self._run, self._config, self._newest, MOST_ROUNDS)
            ):
                self._writer.write(rounds)
                self._newest = rounds[-1].round
                self._active_at = time.monotonic()
            if self._abandoned:
                return False
            if last:
                self._writer.end(self._store.runs.read(self._run).status)
        except Exception as error:  # noqa: BLE001 - an error of a library must not end the run
            self._newest = None  # it may have written more than is known
            self._report_failure(error)
            return False
        if self._trouble:
            self._trouble = False
            self._operator_log(f"metrics are written to {self._writer.where} again; none are missing")
        return True

    def _report_failure(self, error: Exception) -> None:
        log.warning("metrics not written", extra={"run": self._run, "where": self._writer.where, "reason": repr(error)})
        if not self._trouble and not self._abandoned:
            self._trouble = True
            self._operator_log(
                f"metrics are not written to {self._writer.where}: {_shorten_error(error)}. {self._writer.remedy}. "
                "The run continues; missing metrics are written once that works"
            )

    def _log_missing(self) -> None:
        self._operator_log(
            f"the last metrics are not written to {self._writer.where}; to write them later: "
            f"{command('coordinator', 'show', self._run, '--track', runs=self._store.database.folder)}"
        )


def _shorten_error(error: Exception) -> str:
    """The error as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else f"{text[:240]} ..."
