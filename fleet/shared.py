"""What the virtual devices of one process have in common, so that it is there once: blobs, graphs, threads."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from edge_client.runtime import Evaluated, Runtime, Trained
from fedvit.blobs import BlobStore, digest_of
from fedvit.partials import MAP, PART, in_use
from fedvit.transport.exchange import BlobExchange, Finished
from fedvit.wire.messages import Manifest


class SharedRuntime(Runtime):
    """One runtime for all devices of a process: each graph is loaded once, since weights are its inputs.

    `at_once` devices compute at a time: more of them than cores would only take memory, and each other's time.
    """

    def __init__(self, threads: int, at_once: int) -> None:
        super().__init__(threads)
        self._computing = threading.BoundedSemaphore(at_once)

    def keep_only(self, digests: set[str]) -> None:
        """Nothing is closed: another device may still be at work with an earlier program."""

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        with self._computing:
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Evaluated:
        with self._computing:
            return super().evaluate(*args, **kwargs)


class Turn:
    """A piece of work that waits for its turn, or has it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()

    def join(self, timeout: float | None = None) -> None:
        self.done.wait(timeout)


class Turns:
    """Threads in which the devices of a process work, `at_once` of them at a time, first come, first served."""

    def __init__(self, at_once: int) -> None:
        self._waiting: SimpleQueue[Turn | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"work-{number}", daemon=True) for number in range(at_once)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, work: Callable[[], None], name: str) -> Turn:
        """Have something done when its turn comes."""
        turn = Turn(work)
        self._waiting.put(turn)
        return turn

    def close(self) -> None:
        """No more work will come; what waits is still done."""
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (turn := self._waiting.get()) is not None:
            try:
                turn.work()
            finally:
                turn.done.set()


class SharedBlobs:
    """One folder of blobs for all devices of a process: a blob goes when no device keeps it any more.

    What an earlier process left there stays until every device has said what it keeps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._keepers: Counter[str] = Counter()  # digest -> devices that keep it
        self._silent: set[BlobView] = set()  # that have not said yet what they keep
        self._unclaimed: set[Path] = set()
        for file in folder.glob("*/*"):
            if file.suffix in (PART, MAP):  # nobody receives it any more
                file.unlink(missing_ok=True)
            else:
                self._unclaimed.add(file)

    def view(self) -> "BlobView":
        """The store as one device sees it."""
        view = BlobView(self)
        self._silent.add(view)
        return view

    def hold(self, view: "BlobView", digest: str) -> None:
        """A device is about to write a blob: from here on nobody else's pruning takes it away."""
        with self._lock:
            if digest not in view.held:
                view.held.add(digest)
                self._keepers[digest] += 1

    def keep_only(self, view: "BlobView", keep: set[str]) -> int:
        """A device keeps these alone; returns how many bytes went because nobody keeps them now."""
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
    """What one device sees of `SharedBlobs`: everything that is there; what it does not keep, others may."""

    def __init__(self, shared: SharedBlobs) -> None:
        super().__init__(shared.folder)
        self.held: set[str] = set()
        self._shared = shared

    def keeps(self, digest: str) -> bool:
        return digest in self.held and self.has(digest)

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
    """Which blobs the devices of a process are fetching: one fetches, the others wait and find it in the store.

    For one thread.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Waiting]] = {}  # digest under way -> who else needs it

    def ended(self, digest: str) -> None:
        """It is here, or will not come this way: then the first of those that wait fetches it."""
        for waiting in self.waiting.pop(digest, []):
            waiting.again()

    def exchange(self, *args: Any, **kwargs: Any) -> "SharingExchange":
        """As `BlobExchange(...)`, for one device."""
        return SharingExchange(self, *args, **kwargs)


class SharingExchange(BlobExchange):
    """The exchange of one virtual device; see `Fetches`."""

    def __init__(self, fetches: Fetches, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetches = fetches
        self._leads: dict[str, str] = {}  # digest -> sender: those that it fetches itself

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished, dedicated_topic: str = "") -> None:
        digest = manifest.digest
        others = self._fetches.waiting.get(digest)
        if others is not None:
            others.append(
                _Waiting(self, sender, lambda: self.fetch(manifest, sender, topic, finished, dedicated_topic))
            )
            return

        def ended(manifest: Manifest, error: Exception | None) -> None:
            if self._leads.pop(digest, None) is not None:
                self._fetches.ended(digest)
            finished(manifest, error)

        if not self._blobs.has(digest):
            self._leads[digest] = sender
            self._fetches.waiting[digest] = []
        super().fetch(manifest, sender, topic, ended, dedicated_topic)

    def cancel(self, sender: str | None = None) -> None:
        super().cancel(sender)
        for others in self._fetches.waiting.values():
            others[:] = [each for each in others if each.exchange is not self or sender not in (None, each.sender)]
        for digest in [digest for digest, source in self._leads.items() if sender in (None, source)]:
            del self._leads[digest]
            self._fetches.ended(digest)
