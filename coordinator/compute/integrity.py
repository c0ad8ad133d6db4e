"""The coordinator's blobs, verified by their digests before they are sent or used.

A damaged blob is recomputed if possible: writing it again replaces the damaged file.
"""

from collections.abc import Collection
from pathlib import Path
from queue import Empty, SimpleQueue

from coordinator.record.record import Record
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore, Verified, digest_of
from fedvit.errors import BadPayload, Damaged
from fedvit.hints import command
from fedvit.program import decode_program
from fedvit.wire.messages import Manifest


class DamagedBlob(Damaged):
    """A blob is missing, or its content does not have the digest in its name."""

    def __init__(self, digest: str, path: Path) -> None:
        missing = not path.exists()
        super().__init__(
            "FV1704", f"{path} is {'missing' if missing else 'damaged: it does not have the digest that is its name'}"
        )
        self.digest = digest
        self.path = path


class VerifiedBlobs(BlobStore):
    """A blob store that verifies digests: when this process first needs a blob, when its file has changed since, and
    whenever its bytes are read.

    A damaged blob counts as missing for `has`, so that `put` writes it again; other methods raise DamagedBlob. Safe
    from any thread.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._verified = Verified()
        self._found: SimpleQueue[str] = SimpleQueue()

    def has(self, digest: str) -> bool:
        return super().has(digest) and self.is_intact(digest)

    def is_intact(self, digest: str, *, anew: bool = False) -> bool:
        """Return whether the blob is intact; `anew`: read it even if it was verified. Raises StorageFailed."""
        path = self.path(digest)
        if anew:
            self._verified.forget(path)
        whole = self._verified.is_whole(path, digest)
        if not whole and path.is_file():
            self._found.put(digest)
        return whole

    def check(self, digest: str, *, anew: bool = False) -> None:
        """Raise DamagedBlob."""
        if not self.is_intact(digest, anew=anew):
            raise DamagedBlob(digest, self.path(digest))

    def manifest(self, digest: str) -> Manifest:
        self.check(digest)
        return super().manifest(digest)

    def get(self, digest: str) -> bytes:
        try:
            content = self.path(digest).read_bytes()
        except OSError:
            self.check(digest, anew=True)  # raises DamagedBlob if the file is damaged
            raise
        if digest_of(content) != digest:
            self.report(digest)
            raise DamagedBlob(digest, self.path(digest))
        return content

    def report(self, digest: str) -> None:
        """The blob was found damaged, here or by another process: verify it again at its next use."""
        self._verified.forget(self.path(digest))
        self._found.put(digest)

    def forget_all_but(self, digests: Collection[str] = ()) -> None:
        """Verify all other blobs again at their next use."""
        self._verified.keep_only(map(self.path, digests))

    def prune(self, keep: set[str], partial_kept_s: float = 0.0) -> int:
        self.forget_all_but(keep)
        return super().prune(keep, partial_kept_s)

    def found(self) -> list[str]:
        """Digests of blobs that were found damaged since the last call."""
        digests: dict[str, None] = {}
        while True:
            try:
                digests[self._found.get_nowait()] = None
            except Empty:
                return list(digests)


def essential(saved: SavedState) -> set[str]:
    """Blobs without which a run cannot continue from a state; all others can be recomputed or omitted."""
    sent = {reference.digest for reference in saved.references.values()}
    return {*saved.groups.values(), *sent} | ({saved.memory} if saved.memory else set())


def blob_description(digest: str, run: str, store: Record, blobs: BlobStore) -> str:
    """Describe what a blob of a run contains, according to the record, for the operator."""
    record = store.runs.read(run)
    if digest == record.program:
        return "the run's program"
    for entry in store.rounds.read_all(run):
        if entry.state is None:
            continue
        after = f"after round {entry.round}"
        for group, named in entry.state.groups.items():
            if named == digest:
                return f"group {group!r} of the state {after}"
        if entry.state.memory == digest:
            return f"the memory of the server's rule {after}"
        for group, reference in entry.state.references.items():
            if digest in reference.blobs():
                return f"the values of group {group!r} {after}"
    for result in store.tasks.read_results(run):
        if result.upload == digest:
            return f"the upload of {result.device} for round {result.round}"
    try:
        program = decode_program(blobs.get(record.program or ""))
    except (BadPayload, Damaged):
        return "a file that devices fetch"
    for graph, spec in program.graphs.items():
        if spec.digest == digest:
            return f"graph {graph!r}"
    if digest in program.list_fetched_once():
        return "initial values of tensors that devices keep"
    return "a file that devices fetch"


def unrepairable(run: str, path: Path, held: str, why: str, copies: str) -> Damaged:
    """The error of a run that cannot continue: names the file and what to do; `copies` names older records."""
    runs = path.parents[3]  # the file is RUNS/RUN/blobs/XX/DIGEST
    resume = command("coordinator", "start", "--resume", run, runs=runs)
    return Damaged(
        "FV1621",
        f"{path} of run {run} is damaged: it held {held}, and cannot be recomputed: {why}. Put the file back from a "
        f"copy of the run's folder and resume with `{resume}`{copies}; or begin a new run, "
        "with --start-from where an earlier one ended",
    )
