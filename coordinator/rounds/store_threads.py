"""Threads that call the object store of a run, so that a slow store never stops the thread that handles messages."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from fedvit.errors import LinkDown

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

THREADS = 4
CLOSE_S = 10.0
ENDED_CHECK_S = 0.2
"""Interval in which a thread that waits for the store looks whether the run has ended."""


class StoreThreads:
    """The threads of one run; they are started by the first work. `closed` is set when the run ends."""

    def __init__(self, url: str) -> None:
        self.closed = threading.Event()
        self._url = url
        self._lock = threading.Lock()  # for `_threads`
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def begin(self, work: Callable[[], object]) -> None:
        """Run work in a thread."""
        with self._lock:
            if not self._threads:  # they do not keep the process from ending
                self._threads = [
                    threading.Thread(target=self._run, name=f"object-store-{number}", daemon=True)
                    for number in range(THREADS)
                ]
                for thread in self._threads:
                    thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("error in a thread of the object store")

    def do_all(self, jobs: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
        """Do work in the threads. Raises its first error, and LinkDown when the run ends meanwhile."""
        futures = [Future[Outcome]() for _ in jobs]
        for future, job in zip(futures, jobs, strict=True):
            self.begin(partial(_settle, future, job))
        for future in futures:
            while not future.done():
                if self.closed.is_set():
                    raise LinkDown("FV1018", f"object store {self._url} did not answer until the run ended")
                wait([future], timeout=ENDED_CHECK_S)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Finish what has begun, as far as the store answers."""
        self.closed.set()
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _settle(future: "Future[Outcome]", job: Callable[[], Outcome]) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
        future.set_exception(error)
