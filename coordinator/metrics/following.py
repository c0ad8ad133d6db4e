"""Writers that follow a run: each reads the record in a thread of its own, so that none fails or delays the run."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.config import RunConfig
from coordinator.metrics.figures import read_rounds
from coordinator.metrics.writer import Writer
from coordinator.metrics.writers import make_writers
from coordinator.record.store import Store

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""How often the record is asked for new rounds."""
RETRY_S = 10.0
"""Between attempts to write where that failed."""
PATIENCE_S = 10.0
"""How long the end of a run waits for a writer that gets nothing done."""
MOST_ROUNDS = 50
"""Written at a time."""


@contextmanager
def following(
    run: str, config: RunConfig, store: Store, folder: Path, say: Callable[[str], None], *, label: str | None = None
) -> Iterator[None]:
    """Everything that the record in `store` gets of a run meanwhile is written by the configured writers.

    `folder` is that of the run, `label` what writers call it, by default its name. What fails is said, once, and tried
    again.
    """
    writers = make_writers(label or run, config, folder)
    followers = [Follower(writer, run, config, store, say) for writer in writers]
    try:
        yield
    finally:
        for follower in followers:
            follower.finish()
        for follower in followers:
            follower.wait()


def write_all(writer: Writer, run: str, config: RunConfig, store: Store) -> int:
    """Write the rounds of a run that the writer does not have yet; how many these were. Raises what it raises."""
    newest = first = writer.begin()
    while rounds := read_rounds(store, run, config, newest, MOST_ROUNDS):
        writer.write(rounds)
        newest = rounds[-1].round
    writer.end(store.run(run).status)
    return newest - first


class Follower:
    """One writer at one run."""

    def __init__(self, writer: Writer, run: str, config: RunConfig, store: Store, say: Callable[[str], None]) -> None:
        self._writer = writer
        self._run, self._config, self._store = run, config, store
        self._say = say
        self._newest: int | None = None  # round that is written; None: not known, `begin` says it
        self._trouble = False
        self._over = threading.Event()  # the run is
        self._left = False  # nobody waits any more
        self._active_at = time.monotonic()  # when something was last done
        self._thread = threading.Thread(target=self._follow, name=f"metrics-{run}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """What is in the record by now is the last that is written."""
        self._active_at = time.monotonic()
        self._over.set()

    def wait(self) -> None:
        """Until everything is written, or nothing was for PATIENCE_S."""
        while self._thread.is_alive() and time.monotonic() - self._active_at < PATIENCE_S:
            self._thread.join(0.1)
        if self._thread.is_alive():
            self._left = True
            self._say_missing()

    def _follow(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._over.wait(pause_s):
            pause_s = LOOK_EVERY_S if self._catch_up() else RETRY_S
        if not self._catch_up(last=True) and not self._left:
            self._say_missing()

    def _catch_up(self, *, last: bool = False) -> bool:
        """Write what there is; whether that worked."""
        try:
            if self._newest is None:
                if self._store.run(self._run).status != "running" and not self._store.last_round(self._run):
                    return True  # it may never begin, and leave nothing behind
                self._newest = self._writer.begin()
            while not self._left and (
                rounds := read_rounds(self._store, self._run, self._config, self._newest, MOST_ROUNDS)
            ):
                self._writer.write(rounds)
                self._newest = rounds[-1].round
                self._active_at = time.monotonic()
            if self._left:
                return False
            if last:
                self._writer.end(self._store.run(self._run).status)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is no reason to end a run
            self._newest = None  # it may have got further than it could say
            self._failed(error)
            return False
        if self._trouble:
            self._trouble = False
            self._say(f"metrics are written to {self._writer.where} again, and none is missing")
        return True

    def _failed(self, error: Exception) -> None:
        log.warning("metrics not written", extra={"run": self._run, "where": self._writer.where, "reason": repr(error)})
        if not self._trouble and not self._left:
            self._trouble = True
            self._say(
                f"metrics are not written to {self._writer.where}: {_in_short(error)}. {self._writer.remedy}. "
                "The run goes on; what is missing is written once that works"
            )

    def _say_missing(self) -> None:
        self._say(
            f"the last metrics are not written to {self._writer.where}; once that works again: "
            f"coordinator metrics {self._run}"
        )


def _in_short(error: Exception) -> str:
    """One line, also of what a server sent."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 240 else f"{text[:240]} ..."
