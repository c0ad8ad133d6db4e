import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedvit import blobs as blobs_module
from fedvit import partials
from fedvit.blobs import BlobStore, digest_of, digest_of_file, is_whole
from fedvit.errors import BadPayload, StorageFailed
from fedvit.wire.messages import Manifest
from fedvit.wire.transfer import CHUNK_BYTES
from tests.support.codes import has_code

CHUNK = 1024
CONTENT = bytes(range(256)) * 12 + b"tail"
"""3076 bytes: three whole chunks of 1024, and one of 4."""


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def chunk(content: bytes, index: int) -> bytes:
    return content[index * CHUNK : (index + 1) * CHUNK]


def test_blobs_that_are_gathered_are_here_together(store: BlobStore) -> None:
    old = store.put(b"old").digest
    with store.commit_together() as batched_commit:
        made = [batched_commit.put(bytes([number]), b"end") for number in range(40)]
        assert batched_commit.put(b"\0end") == made[0] == batched_commit.manifest(made[0].digest)
        assert batched_commit.has(made[0].digest)
        assert batched_commit.get(old) == b"old"
        assert not any(store.has(manifest.digest) for manifest in made)
    assert [store.get(manifest.digest) for manifest in made] == [bytes([number]) + b"end" for number in range(40)]
    assert [store.manifest(manifest.digest) for manifest in made] == made
    assert len(files_in(store.folder)) == 41


def test_blobs_of_a_failed_batch_are_not_kept(store: BlobStore) -> None:
    def half_done() -> None:
        with store.commit_together() as batched_commit:
            batched_commit.put(b"content")
            raise StorageFailed("FV0010", "no more")

    with pytest.raises(StorageFailed, check=has_code("FV0010")):
        half_done()
    assert files_in(store.folder) == []


# --- digests ------------------------------------------------------------------------------------------


def test_digests_are_blake3() -> None:
    """The test vector of the empty input in BLAKE3's own repository (test_vectors.json)."""
    assert digest_of(b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_file_has_the_digest_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert digest_of_file(tmp_path / "file") == digest_of(CONTENT)


@pytest.mark.parametrize("place", [0, 1700, 3075])
def test_a_blob_can_be_verified(store: BlobStore, place: int) -> None:
    """One flipped bit anywhere is found, although size and modification time are those of before."""
    digest = store.put(CONTENT).digest
    assert is_whole(store.path(digest), digest)
    before = store.path(digest).stat()
    with open(store.path(digest), "r+b") as file:
        file.seek(place)
        file.write(bytes([CONTENT[place] ^ 0x10]))
    os.utime(store.path(digest), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_whole(store.path(digest), digest)
    assert store.has(digest), "who calls it decides what becomes of it"


def test_a_blob_that_is_not_here_is_not_whole(store: BlobStore) -> None:
    assert not is_whole(store.path(digest_of(b"elsewhere")), digest_of(b"elsewhere"))
    with pytest.raises(BadPayload):
        is_whole(store.path("nonsense"), "nonsense")


@pytest.mark.parametrize(("number", "damaged"), [(errno.EIO, True), (errno.EMFILE, False), (errno.EACCES, False)])
def test_only_a_medium_that_fails_is_damage(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, number: int, damaged: bool
) -> None:
    """Too many open files say nothing of the blob."""
    digest = store.put(CONTENT).digest

    def failing(path: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(blobs_module, "digest_of_file", failing)
    if damaged:
        assert not is_whole(store.path(digest), digest)
    else:
        with pytest.raises(StorageFailed):
            is_whole(store.path(digest), digest)


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "blake3",
        "blake3:",
        "blake3:" + "a" * 63,
        "blake3:" + "a" * 65,
        "blake3:" + "A" * 64,
        "blake3:" + "g" * 64,
        "blake3:" + "１" * 64,  # digits to Python, but not to us
        "blake3:" + "a" * 63 + "\n",
        "blake3:" + "a" * 63 + "\0",
        "sha256:" + "a" * 64,
        "a" * 64,
        "blake3::" + "a" * 63,
        "blake3:../../../../etc/passwd",
        "blake3:" + "../" * 21 + "x",  # 64 letters
        "blake3:/" + "a" * 63,
        "blake3:" + "a" * 31 + "/" + "a" * 32,
    ],
)
def test_malformed_digests_reach_no_file(store: BlobStore, tmp_path: Path, digest: str) -> None:
    """Digests come from the other side; none may lead out of the folder."""
    calls: list[Callable[[], object]] = [
        lambda: store.path(digest),
        lambda: store.has(digest),
        lambda: store.get(digest),
        lambda: store.manifest(digest),
        lambda: store.receive(Manifest(digest, 10, CHUNK)),
        lambda: store.prune({digest}),
    ]
    for call in calls:
        with pytest.raises(BadPayload) as refused:
            call()
        assert str(refused.value) == f"{digest!r} is not a blake3 digest"
    assert files_in(tmp_path) == []


# --- whole blobs --------------------------------------------------------------------------------------


def test_put_and_get(store: BlobStore) -> None:
    digest = digest_of(CONTENT)
    assert not store.has(digest)
    assert store.put(CONTENT) == Manifest(digest, len(CONTENT), CHUNK_BYTES)
    assert store.has(digest)
    assert store.get(digest) == BlobStore(store.folder).get(digest) == CONTENT
    assert store.manifest(digest) == Manifest(digest, len(CONTENT), CHUNK_BYTES)
    name = digest.removeprefix("blake3:")
    assert files_in(store.folder) == [Path(name[:2]) / name]
    before = store.path(digest).stat()
    store.put(CONTENT)  # is not written again
    after = store.path(digest).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_is_not_here(store: BlobStore) -> None:
    digest = digest_of(b"elsewhere")
    for call in (store.get, store.manifest):
        with pytest.raises(BadPayload) as refused:
            call(digest)
        assert str(refused.value) == f"blob {digest} is not in {store.folder}"


def test_a_full_disk_leaves_nothing_half(tmp_path: Path) -> None:
    """The child may write files of 10 000 bytes at most, as on a full disk: neither a whole blob of 50 000 nor the
    chunk that crosses the limit gets in."""
    code = """
import resource, sys
from pathlib import Path
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import StorageFailed
from fedvit.wire.messages import Manifest
store = BlobStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
content = bytes(50_000)
try:
    store.put(content)
except StorageFailed as error:
    print("put:", error)
partial = store.receive(Manifest(digest_of(content), len(content), 1024))
try:
    for index in range(49):
        partial.write(index, content[index * 1024 : (index + 1) * 1024])
except StorageFailed as error:
    print("chunk", index, error)
partial.abandon()
print(store.has(digest_of(content)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    put, chunks, has = done.stdout.splitlines()
    assert put.startswith(f"put: cannot write {tmp_path}")
    assert put.endswith("File too large")
    assert chunks.startswith("chunk 9 cannot write 1024 bytes to")  # 9 * 1024 = 9216 bytes fit, 10 240 do not
    assert has == "False"
    assert files_in(tmp_path) == []


def test_a_disk_with_room_for_half_of_the_notes_is_full(tmp_path: Path) -> None:
    """The notes of 400 000 chunks take 800 kB. An access to their other half would end the process later."""
    code = """import sys; from fedvit.blobs import *; from pathlib import Path; folder = Path(sys.argv[1])
(folder / "other").write_bytes(bytes(600_000))
BlobStore(folder).receive(Manifest(digest_of(b"large"), 400_000 * 1024, 1024))"""
    script = 'mount -t tmpfs -o size=1m tmpfs "$1"; exec "$2" -c "$3" "$1"'
    enter = ["unshare", "--map-root-user", "--mount", "sh", "-ec", script, "sh", str(tmp_path), sys.executable, code]
    assert "DiskFull" in subprocess.run(enter, capture_output=True, text=True).stderr


# --- pruning ------------------------------------------------------------------------------------------


def test_prune_deletes_all_but_what_is_kept(store: BlobStore) -> None:
    """50 + 70 bytes go, and 10 bytes of a blob that was never finished."""
    kept = store.put(b"k" * 30)
    store.put(b"a" * 50)
    store.put(b"b" * 70)
    partial = store.receive(Manifest(digest_of(b"never"), 2048, CHUNK))
    partial.write(0, b"1234567890")
    partial.leave()
    assert store.prune({kept.digest}) == 130
    assert files_in(store.folder) == [store.path(kept.digest).relative_to(store.folder)]


def test_prune_of_an_empty_store(store: BlobStore) -> None:
    assert store.prune({digest_of(b"anything")}) == 0


def test_two_may_prune_at_once(store: BlobStore) -> None:
    """Every byte is counted by one of them, whichever is faster: 300 blobs of 4 bytes are 1200 bytes."""
    for number in range(300):
        path = store.path(digest_of(number.to_bytes(4, "big")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "big"))
    freed: list[int] = []
    together = threading.Barrier(4)

    def prune() -> None:
        together.wait()
        freed.append(BlobStore(store.folder).prune(set()))

    threads = [threading.Thread(target=prune) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(freed) == 4
    assert sum(freed) == 1200
    assert files_in(store.folder) == []


# --- blobs that come in pieces ------------------------------------------------------------------------


def test_chunks_in_any_order_make_the_blob(store: BlobStore) -> None:
    digest = digest_of(CONTENT)
    partial = store.receive(Manifest(digest, len(CONTENT), CHUNK))
    for index in (3, 0, 2, 0, 1):
        assert not store.has(digest)
        partial.write(index, chunk(CONTENT, index))
    partial.commit()
    assert store.get(digest) == CONTENT
    assert files_in(store.folder) == [store.path(digest).relative_to(store.folder)]


def test_a_blob_with_another_digest_is_not_kept(store: BlobStore) -> None:
    """One byte of one chunk is wrong. What came can still be put right, as a repeated transfer does."""
    digest = digest_of(CONTENT)
    partial = store.receive(Manifest(digest, len(CONTENT), CHUNK))
    for index in range(4):
        partial.write(index, chunk(CONTENT, index))
    partial.write(1, b"!" + chunk(CONTENT, 1)[1:])
    with pytest.raises(BadPayload, check=has_code("FV1704", digest)):
        partial.commit()
    assert not store.has(digest)
    partial.write(1, chunk(CONTENT, 1))
    partial.commit()
    assert store.get(digest) == CONTENT


def test_a_missing_chunk_is_noticed(store: BlobStore) -> None:
    digest = digest_of(CONTENT)
    partial = store.receive(Manifest(digest, len(CONTENT), CHUNK))
    for index in (0, 1, 3):
        partial.write(index, chunk(CONTENT, index))
    with pytest.raises(BadPayload, check=has_code("FV1704")):
        partial.commit()
    assert not store.has(digest)


def test_what_is_abandoned_leaves_nothing(store: BlobStore) -> None:
    partial = store.receive(Manifest(digest_of(CONTENT), len(CONTENT), CHUNK))
    partial.write(0, chunk(CONTENT, 0))
    partial.abandon()
    assert files_in(store.folder) == []


def test_two_may_receive_the_same_blob(store: BlobStore) -> None:
    """Devices on one machine may share a folder: neither disturbs the other's file."""
    manifest = Manifest(digest_of(CONTENT), len(CONTENT), CHUNK)
    first, second = store.receive(manifest), store.receive(manifest)
    for index in range(4):
        first.write(index, chunk(CONTENT, index))
    second.write(0, b"x" * CHUNK)
    first.commit()
    assert store.get(manifest.digest) == CONTENT
    for index in range(4):
        second.write(index, chunk(CONTENT, index))
    second.commit()
    assert store.get(manifest.digest) == CONTENT
    assert len(files_in(store.folder)) == 1


def test_a_second_process_goes_on_where_the_first_one_ended(store: BlobStore) -> None:
    """What was written counts without any farewell: only the lock goes with a killed process."""
    manifest = Manifest(digest_of(CONTENT), len(CONTENT), CHUNK)
    code = """
import os, signal, sys
from pathlib import Path
from fedvit.blobs import BlobStore
from fedvit.wire.messages import Manifest
content = bytes.fromhex(sys.argv[2])
partial = BlobStore(Path(sys.argv[1])).receive(Manifest(sys.argv[3], len(content), 1024))
for index in (0, 2):
    partial.write(index, content[index * 1024 : (index + 1) * 1024])
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(store.folder), CONTENT.hex(), manifest.digest], check=False)
    partial = store.receive(manifest)
    assert partial.have == bytes([1, 0, 1, 0])
    for index in (1, 3):
        partial.write(index, chunk(CONTENT, index))
    partial.commit()
    assert store.get(manifest.digest) == CONTENT


def test_after_a_power_cut_only_what_was_synced_counts(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot: the kernel may have kept the map and not the bytes. Two chunks were synced, the third was not."""
    monkeypatch.setattr(partials, "SYNC_BYTES", 2 * CHUNK)
    manifest = Manifest(digest_of(CONTENT), len(CONTENT), CHUNK)
    partial = store.receive(manifest)
    for index in (0, 1):
        partial.write(index, chunk(CONTENT, index))
    partial._await_sync()
    partial.write(3, chunk(CONTENT, 3))
    partial.leave()
    monkeypatch.setattr(partials, "boot_id", lambda: b"another boot")
    partial = store.receive(manifest)
    assert partial.have == bytes([1, 1, 0, 0])
    partial.abandon()
    assert files_in(store.folder) == []


def test_a_map_of_another_blob_or_without_its_file_means_nothing(store: BlobStore) -> None:
    manifest = Manifest(digest_of(CONTENT), len(CONTENT), CHUNK)
    for spoil in (lambda path: path.with_suffix(".part").unlink(), lambda path: path.write_bytes(b"?" * 60)):
        partial = store.receive(manifest)
        partial.write(1, chunk(CONTENT, 1))
        partial.leave()
        [path] = store.folder.rglob("*.map")
        spoil(path)
        partial = store.receive(manifest)
        assert not any(partial.have)
        partial.abandon()


def test_prune_spares_what_is_wanted_what_is_in_use_and_what_is_young(store: BlobStore) -> None:
    wanted, used, young = (Manifest(digest_of(name), 2048, CHUNK) for name in (b"wanted", b"used", b"young"))
    kept = [store.receive(manifest) for manifest in (wanted, used, young)]
    for partial in kept:
        partial.write(0, bytes(CHUNK))
    kept[0].leave()
    kept[2].leave()
    assert store.prune({wanted.digest}, partial_kept_s=3600) == 0
    assert store.prune({wanted.digest}) == CHUNK  # the young one
    assert len(files_in(store.folder)) == 4
    assert any(store.receive(wanted).have)


def test_a_folder_that_cannot_be_written(store: BlobStore) -> None:
    store.folder.write_bytes(b"a file where the folder should be")
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(store.folder))):
        store.receive(Manifest(digest_of(CONTENT), len(CONTENT), CHUNK))
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(store.folder))):
        store.put(CONTENT)
    assert os.path.isfile(store.folder)
