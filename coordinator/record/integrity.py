"""Blobs of the coordinator's own, verified by their digests before they are served or used.

What no longer holds what was written is made anew where it can be: whatever is put again replaces it.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path
from queue import Empty, SimpleQueue

from coordinator.record.store import Store
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import BadPayload, Damaged
from fedvit.program import decode_program
from fedvit.wire.messages import Manifest

log = logging.getLogger(__name__)


class DamagedBlob(Damaged):
    """A blob that is not here, or holds other bytes than its name says."""

    def __init__(self, digest: str, path: Path) -> None:
        missing = not path.exists()
        super().__init__(
            f"{path} is {'missing' if missing else 'damaged: it does not have the digest that is its name'}"
        )
        self.digest = digest
        self.path = path


class SoundBlobs(BlobStore):
    """A store that gives no damaged blob: each is read as a whole when this process first needs it, when its file is
    another one since, and whenever its bytes are asked for.

    A damaged one is not here (`has`), so that `put` writes it again; everything else raises DamagedBlob. Safe from any
    thread.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._whole: dict[str, tuple[int, int, int]] = {}  # digest -> its file when it was read
        self._found: SimpleQueue[str] = SimpleQueue()

    def has(self, digest: str) -> bool:
        return super().has(digest) and self.is_sound(digest)

    def is_sound(self, digest: str, *, anew: bool = False) -> bool:
        """Whether the blob is here and whole; `anew`: read it, whatever is known of it. Raises StorageFailed."""
        path = self.path(digest)
        try:
            state = os.stat(path)
        except FileNotFoundError:
            return False
        file = (state.st_size, state.st_mtime_ns, state.st_ino)
        if self._whole.get(digest) == file and not anew:
            return True
        if self.verify(digest):
            self._whole[digest] = file
            return True
        self._whole.pop(digest, None)
        self._found.put(digest)
        return False

    def check(self, digest: str, *, anew: bool = False) -> None:
        """Raises DamagedBlob."""
        if not self.is_sound(digest, anew=anew):
            raise DamagedBlob(digest, self.path(digest))

    def manifest(self, digest: str) -> Manifest:
        self.check(digest)
        return super().manifest(digest)

    def get(self, digest: str) -> bytes:
        try:
            content = self.path(digest).read_bytes()
        except OSError:
            self.check(digest, anew=True)  # says whether it is the file that is damaged
            raise
        if digest_of(content) != digest:
            self._whole.pop(digest, None)
            self._found.put(digest)
            raise DamagedBlob(digest, self.path(digest))
        return content

    def report(self, digest: str) -> None:
        """Another process found the blob to be damaged: it is read anew when it is needed next."""
        self._whole.pop(digest, None)
        self._found.put(digest)

    def forget_all_but(self, digests: Collection[str] = ()) -> None:
        """Every other blob is read anew when it is needed next."""
        self._whole = {digest: file for digest, file in self._whole.items() if digest in digests}

    def prune(self, keep: set[str], partial_kept_s: float = 0.0) -> int:
        self.forget_all_but(keep)
        return super().prune(keep, partial_kept_s)

    def found(self) -> list[str]:
        """Digests of blobs that were found to be damaged since this was asked last."""
        digests: dict[str, None] = {}
        while True:
            try:
                digests[self._found.get_nowait()] = None
            except Empty:
                return list(digests)


def essential(saved: SavedState) -> set[str]:
    """Blobs without which nobody can go on from a state; all others are made anew, or done without."""
    sent = {reference.digest for reference in saved.references.values()}
    return {*saved.groups.values(), *sent} | ({saved.memory} if saved.memory else set())


def what_it_held(digest: str, run: str, store: Store, blobs: BlobStore) -> str:
    """For the operator: what a blob of a run is, going by the record; of every round that names it the first."""
    record = store.run(run)
    if digest == record.program:
        return "the run's program"
    for entry in store.rounds(run):
        if entry.state is None:
            continue
        after = f"after round {entry.round}"
        for group, named in entry.state.groups.items():
            if named == digest:
                return f"group {group!r} of the state {after}"
        if entry.state.memory == digest:
            return f"what the server's rule remembers {after}"
        for group, reference in entry.state.references.items():
            if digest in reference.blobs():
                return f"what devices get of group {group!r} {after}"
    for result in store.results(run):
        if result.upload == digest:
            return f"the upload of {result.device} for round {result.round}"
    try:
        program = decode_program(blobs.get(record.program or ""))
    except (BadPayload, Damaged):
        return "a file that devices fetch"
    for graph, spec in program.graphs.items():
        if spec.digest == digest:
            return f"graph {graph!r}"
    if digest in program.fetched_once():
        return "first values of tensors that devices keep"
    return "a file that devices fetch"


def beyond_repair(run: str, path: Path, held: str, why: str, copies: str) -> Damaged:
    """The run cannot go on: which file, what it held, and what to do; `copies` names older records of the run."""
    return Damaged(
        f"{path} of run {run} is damaged: it held {held}, and cannot be made anew: {why}. Put the file back from a "
        f"copy of the run's folder and resume with `coordinator start --resume {run}`{copies}; or begin a new run, "
        "with --start-from where an earlier one ended"
    )
