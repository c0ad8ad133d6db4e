"""The record as pages read it: each question is asked again only after the record has changed."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from coordinator.record.liveness import STALE_S
from coordinator.record.record import Record
from coordinator.security.clock import find_doubt
from coordinator.security.folder import Deployment
from coordinator.security.registry import JoinedDevice

P = ParamSpec("P")
T = TypeVar("T")

MOST_ANSWERS = 64
"""Answers that are kept, so that browsers on the same page share one."""
SHARE = 0.02
"""Share of a processor core that one question may take while the record changes all the time."""


class _Answer(NamedTuple):
    value: Any
    stamp: tuple[tuple[int, int], ...]  # of the record's files
    asked_again_at: float  # monotonic


@dataclass
class RecordReader:
    """Asks one question at a time, in a thread. Questions are functions of the store; their arguments can be hashed.

    An answer is kept until the record's files change, and longer where the question took long.
    """

    store: Record
    folder: Path

    def __post_init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], _Answer] = OrderedDict()
        self._one = asyncio.Lock()
        self._forgotten = 0  # times

    def forget(self) -> None:
        """Ask every question again, since this process has changed the record."""
        self._kept.clear()
        self._forgotten += 1

    async def __call__(self, question: Callable[Concatenate[Record, P], T], *arguments: P.args, **no: P.kwargs) -> T:
        """The answer to `question(store, *arguments)`. Raises what the question raises."""
        key = (question, arguments)
        kept = self._find(key)
        if kept is not None:
            before: T = self._use(key, kept)
            return before
        async with self._one:
            kept, stamp, began = self._find(key), self._stamp(), time.monotonic()
            if kept is None:
                forgotten = self._forgotten
                value = await asyncio.to_thread(question, self.store, *arguments, **no)
                ended = time.monotonic()
                # what was asked before a change is not kept beyond it
                rests_s = (ended - began) / SHARE if forgotten == self._forgotten else 0.0
                kept = _Answer(value, stamp, ended + rests_s)
            answer: T = self._use(key, kept)
            return answer

    def _find(self, key: tuple[Any, ...]) -> _Answer | None:
        """Return the answer to a question that is kept; None if it has to be asked again."""
        kept = self._kept.get(key)
        if kept is None or (kept.stamp != self._stamp() and time.monotonic() >= kept.asked_again_at):
            return None
        return kept

    def _use(self, key: tuple[Any, ...], kept: _Answer) -> Any:
        self._kept[key] = kept
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_ANSWERS:
            self._kept.popitem(last=False)
        return kept.value

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """A value that changes with every commit: SQLite appends to its journal, or writes the database. With another
        database it changes every second. It also changes every STALE_S, since a killed coordinator writes nothing."""
        if not self.store.database.file:
            return ((int(time.monotonic()), 0),)
        return (int(time.monotonic() / STALE_S), 0), *(
            _stat(self.folder / name) for name in ("fedvit.db", "fedvit.db-wal")
        )


class Registered(NamedTuple):
    """The devices of a deployment."""

    devices: dict[str, JoinedDevice]
    doubt: str | None  # of this machine's clock


class RegistryReader:
    """Reads a deployment's registry again only after its files have changed. Safe from any thread."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._stamp: tuple[object, ...] = ()
        self._known = Registered({}, None)
        self._lock = threading.Lock()

    def read(self) -> Registered:
        """Return the devices. Raises the errors of `Registry`."""
        with self._lock:
            path = self._deployment.registry.path
            stamp = (int(time.monotonic() / STALE_S), *(_stat(path.with_name(path.name + end)) for end in ("", "-wal")))
            if stamp != self._stamp:
                with self._deployment.registry.read() as rows:
                    doubt = find_doubt(self._deployment, rows.clock_s())
                    self._known = Registered({device.name: device for device in rows.read_devices()}, doubt)
                self._stamp = stamp
            return self._known


def _stat(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)
