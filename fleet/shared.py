"""Blobs, graphs, folders and threads that the virtual devices of one process share."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from edge_client.work.runtime import Evaluated, Runtime, Trained
from fedvit.blobs import BlobStore, digest_of
from fedvit.data.folder import DeviceData
from fedvit.data.growing import GrowingFolder
from fedvit.partials import MAP, PART, in_use
from fedvit.transport.blob_receiver import Finished
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Manifest

LOOK_S = 1.0
"""Shortest time between two looks at a folder."""


class SharedRuntime(Runtime):
    """One runtime for all devices of a process: each graph is loaded once, since weights are its inputs.

    `at_once` devices compute at a time: more than cores would take memory and be no faster.
    """

    def __init__(self, threads: int, at_once: int) -> None:
        super().__init__(threads)
        self._computing = threading.BoundedSemaphore(at_once)

    def keep_only(self, digests: set[str]) -> None:
        """Keep all graphs: another device may still use an earlier Program."""

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        with self._computing:
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Evaluated:
        with self._computing:
            return super().evaluate(*args, **kwargs)


class SharedFolder:
    """The images of a folder that grows, for several devices.

    It is looked through when one of them is about to get a task, but at most once in LOOK_S, and more rarely where that
    would take more than `share` of the process's time. Raises DataError and StorageFailed as GrowingFolder.
    """

    def __init__(self, folder: Path, *, split_file: Path, cache_bytes: int, share: float) -> None:
        self._folder, self._split_file = folder, split_file
        self._cache_bytes, self._share = cache_bytes, share
        self._opened: dict[frozenset[str] | None, GrowingFolder] = {}  # by the classes of the devices' runs
        self._due: dict[frozenset[str] | None, float] = {}

    def look(self, classes: Collection[str] | None) -> GrowingFolder:
        """Return its images of these classes; None: of all."""
        key = None if classes is None else frozenset(classes)
        if key not in self._opened:
            self._opened[key] = GrowingFolder(self._folder, split_file=self._split_file, cache_bytes=self._cache_bytes)
            self._due[key] = time.monotonic() + (LOOK_S if key is None else 0.0)  # the classes are not looked at yet
        if (began := time.monotonic()) >= self._due[key]:
            try:
                self._opened[key].look(key)
            finally:
                ended = time.monotonic()
                self._due[key] = ended + max(LOOK_S, (ended - began) / self._share)
        return self._opened[key]


class OwnFolder:
    """The images of a shared folder as one device has them, with a cache of its own."""

    def __init__(self, shared: SharedFolder, own: Callable[[DeviceData], DeviceData]) -> None:
        self._shared, self._own = shared, own
        self._growing = shared.look(None)
        self._seen = self._growing.data
        self.data = own(self._seen)

    def look(self, classes: Collection[str] | None = None) -> bool:
        """Look for new images; return True if there are some."""
        self._growing = self._shared.look(classes)
        if self._growing.data is self._seen:
            return False
        self._seen = self._growing.data
        self.data = self._own(self._seen)
        return True

    def log_problems(self) -> None:
        self._growing.log_problems()


class QueuedWork:
    """Work that waits for a thread, or runs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()

    def join(self, timeout: float | None = None) -> None:
        self.done.wait(timeout)


class WorkQueue:
    """A pool of `at_once` threads that runs the devices' work, first in, first out."""

    def __init__(self, at_once: int) -> None:
        self._waiting: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"work-{number}", daemon=True) for number in range(at_once)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, work: Callable[[], None], name: str) -> QueuedWork:
        """Add work to the queue."""
        queued = QueuedWork(work)
        self._waiting.put(queued)
        return queued

    def close(self) -> None:
        """End the threads after all waiting work."""
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (queued := self._waiting.get()) is not None:
            try:
                queued.work()
            finally:
                queued.done.set()


class SharedBlobs:
    """One folder of blobs for all devices of a process: a blob is deleted when no device keeps it any more.

    Blobs of an earlier process stay until every device has called `keep_only`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._keepers: Counter[str] = Counter()  # digest -> devices that keep it
        self._silent: set[BlobView] = set()  # that have not called `keep_only`
        self._unclaimed: set[Path] = set()
        for file in folder.glob("*/*"):
            if file.suffix in (PART, MAP):  # of an interrupted transfer
                file.unlink(missing_ok=True)
            else:
                self._unclaimed.add(file)

    def view(self) -> "BlobView":
        """The store as one device sees it."""
        view = BlobView(self)
        self._silent.add(view)
        return view

    def hold(self, view: "BlobView", digest: str) -> None:
        """Protect a blob that a device is about to write from other devices' pruning."""
        with self._lock:
            if digest not in view.held:
                view.held.add(digest)
                self._keepers[digest] += 1

    def may_keep(self, view: "BlobView", digest: str) -> bool:
        """Return whether a device may have kept a blob in an earlier process: it has not called `keep_only` yet."""
        with self._lock:
            return view in self._silent and view.path(digest) in self._unclaimed

    def keep_only(self, view: "BlobView", keep: set[str]) -> int:
        """Set the blobs that a device keeps; return the bytes of deleted blobs, which no device keeps."""
        with self._lock:
            self._keepers.update(keep - view.held)
            gone = view.held - keep
            view.held = set(keep)
            self._keepers.subtract(gone)
            files = [view.path(digest) for digest in gone if not self._keepers[digest]]
            for digest in gone:
                if not self._keepers[digest]:
                    del self._keepers[digest]
            self._silent.discard(view)
            if self._unclaimed and not self._silent:
                files += self._unclaimed - {view.path(digest) for digest in self._keepers}
                self._unclaimed = set()
            return sum(_delete(file) + _delete_partial(file) for file in files)


class BlobView(BlobStore):
    """One device's view of `SharedBlobs`: it can read all blobs, also those that only others keep."""

    def __init__(self, shared: SharedBlobs) -> None:
        super().__init__(shared.folder)
        self.held: set[str] = set()
        self._shared = shared

    def keeps(self, digest: str) -> bool:
        return (digest in self.held or self._shared.may_keep(self, digest)) and self.has(digest)

    def put(self, *pieces: bytes | memoryview) -> Manifest:
        self._shared.hold(self, digest_of(*pieces))
        return super().put(*pieces)

    def prune(self, keep: set[str], partial_kept_s: float = 0.0) -> int:
        return self._shared.keep_only(self, keep)


def _delete_partial(final: Path) -> int:
    part = final.with_name(final.name + PART)
    if in_use(part):
        return 0
    _delete(part.with_suffix(MAP))
    return _delete(part)


def _delete(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        size = file.stat().st_size
        file.unlink()
        return size
    return 0


class _Waiting(NamedTuple):
    exchange: "SharingExchange"
    sender: str
    again: Callable[[], None]


class Fetches:
    """The blobs that the devices of a process are fetching: one device fetches, the others wait for it.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Waiting]] = {}  # digest that is being fetched -> waiting devices

    def finish(self, digest: str) -> None:
        """Continue the waiting devices: they find the blob, or the first of them fetches it."""
        for waiting in self.waiting.pop(digest, []):
            waiting.again()

    def exchange(self, *args: Any, **kwargs: Any) -> "SharingExchange":
        """Make the exchange of one device, from the arguments of `BlobExchange`."""
        return SharingExchange(self, *args, **kwargs)


class SharingExchange(BlobExchange):
    """The exchange of one virtual device; a blob that another device fetches is awaited."""

    def __init__(self, fetches: Fetches, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetches = fetches
        self._leads: dict[str, str] = {}  # digest -> sender: those that this device fetches

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished, dedicated_topic: str = "") -> None:
        digest = manifest.digest
        others = self._fetches.waiting.get(digest)
        if others is not None:
            others.append(
                _Waiting(self, sender, lambda: self.fetch(manifest, sender, topic, finished, dedicated_topic))
            )
            return

        def finish(manifest: Manifest, error: Exception | None) -> None:
            if self._leads.pop(digest, None) is not None:
                self._fetches.finish(digest)
            finished(manifest, error)

        if not self._blobs.has(digest):
            self._leads[digest] = sender
            self._fetches.waiting[digest] = []
        super().fetch(manifest, sender, topic, finish, dedicated_topic)

    def cancel(self, sender: str | None = None) -> None:
        super().cancel(sender)
        for others in self._fetches.waiting.values():
            others[:] = [each for each in others if each.exchange is not self or sender not in (None, each.sender)]
        for digest in [digest for digest, source in self._leads.items() if sender in (None, source)]:
            del self._leads[digest]
            self._fetches.finish(digest)
