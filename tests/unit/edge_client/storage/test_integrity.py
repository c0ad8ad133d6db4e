"""Files of a device that a memory card changed: found when they are used, and in idle time."""

import os
from pathlib import Path

import pytest

import fedvit.blobs
from edge_client.storage import integrity as integrity_module
from edge_client.storage.integrity import KEPT_REPORTS, DamagedBlobs, Integrity
from fedvit.blobs import BlobStore, Verified, digest_of
from fedvit.errors import BadPayload, StorageFailed
from tests.support.codes import has_code
from tests.support.damage import flip


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_a_file_is_read_once_while_it_looks_the_same(blobs: BlobStore) -> None:
    """What a flip changes under the same stamp, only another process or the scrub finds."""
    verified, digest = Verified(), blobs.put(b"content").digest
    path = blobs.path(digest)
    assert verified.is_whole(path, digest)
    flip(path)
    assert verified.is_whole(path, digest)
    assert not Verified().is_whole(path, digest)
    os.utime(path)
    assert not verified.is_whole(path, digest)
    path.unlink()
    assert not verified.is_whole(path, digest)


def test_a_file_that_took_the_place_of_another_is_read(blobs: BlobStore, tmp_path: Path) -> None:
    verified, digest = Verified(), blobs.put(b"content").digest
    path = blobs.path(digest)
    assert verified.is_whole(path, digest)
    state = path.stat()
    (tmp_path / "other").write_bytes(b"CONTENT")
    os.utime(tmp_path / "other", ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(tmp_path / "other", path)
    assert not verified.is_whole(path, digest)


def test_a_damaged_blob_is_deleted_and_reported_once(blobs: BlobStore) -> None:
    whole, damaged = blobs.put(b"whole").digest, blobs.put(b"damaged").digest
    flip(blobs.path(damaged))
    integrity = Integrity(blobs)
    with pytest.raises(DamagedBlobs) as raised:
        integrity.check([whole, damaged, digest_of(b"elsewhere"), damaged])
    assert raised.value.digests == [damaged]
    assert blobs.has(whole)
    assert not blobs.has(damaged)
    [told] = integrity.reports()
    assert str(blobs.path(damaged)) in told
    assert integrity.reports() == ()
    integrity.check([whole, damaged])


def test_a_blob_can_be_looked_at_afresh(blobs: BlobStore) -> None:
    digest = blobs.put(b"content").digest
    integrity = Integrity(blobs)
    integrity.check([digest])
    flip(blobs.path(digest))
    integrity.check([digest])
    with pytest.raises(DamagedBlobs):
        integrity.check([digest], afresh=True)


def test_a_small_blob_is_read_as_its_digest_says_or_not_at_all(blobs: BlobStore) -> None:
    digest = blobs.put(b"content").digest
    integrity = Integrity(blobs)
    assert integrity.read(digest) == b"content"
    integrity.check([digest])
    flip(blobs.path(digest))
    with pytest.raises(DamagedBlobs):
        integrity.read(digest)
    with pytest.raises(BadPayload):
        integrity.read(digest)


def test_what_cannot_be_read_for_want_of_something_else_is_not_deleted(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = blobs.put(b"content").digest

    def failing(path: Path, digest: str) -> bool:
        raise StorageFailed("FV0010", "too many open files")

    monkeypatch.setattr(fedvit.blobs, "is_whole", failing)
    with pytest.raises(StorageFailed, check=has_code("FV0010")):
        Integrity(blobs).check([digest])
    assert blobs.has(digest)


def test_so_many_reports_wait_and_no_more(blobs: BlobStore) -> None:
    integrity = Integrity(blobs)
    for number in range(KEPT_REPORTS + 3):
        integrity.report(f"{number} " + "x" * 2000)
    told = integrity.reports()
    assert len(told) == KEPT_REPORTS
    assert all(len(what) <= 500 for what in told)


# --- in idle time -------------------------------------------------------------------------------------


def run_pass(integrity: Integrity, monkeypatch: pytest.MonkeyPatch) -> int:
    """Scrub until a pass is over; returns how many pieces that took."""
    monkeypatch.setattr(integrity_module, "SCRUB_EVERY_S", 0.0)
    for pieces in range(1000):
        integrity.scrub()
        if integrity._pass is None:
            return pieces
    raise AssertionError("no end")


def test_a_scrub_finds_what_looks_the_same(blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece; what is being received or written is no business of its."""
    monkeypatch.setattr(integrity_module, "SCRUB_PIECE_BYTES", 1000)
    digests = [blobs.put(bytes([number]) * 2500).digest for number in range(3)]
    (blobs.path(digests[0]).parent / ".writing-0123").write_bytes(b"half")
    blobs.path(digests[0]).with_name(blobs.path(digests[0]).name + ".part").write_bytes(b"half")
    other = tmp_path / "other"
    other.write_bytes(b"personal")
    integrity = Integrity(blobs, lambda: [(other, digest_of(b"personal")), (tmp_path / "gone", digest_of(b"gone"))])
    integrity.check(digests)
    assert integrity.verified.is_whole(other, digest_of(b"personal"))
    assert run_pass(integrity, monkeypatch) >= 3 * 3
    assert integrity.reports() == ()
    integrity.check(digests)
    flip(blobs.path(digests[1]), 0.9)
    flip(other)
    integrity.scrub()
    assert blobs.has(digests[1]), "a pass ended a moment ago"
    monkeypatch.setattr(integrity_module, "SCRUB_AGAIN_S", 0.0)
    integrity._due = 0.0
    run_pass(integrity, monkeypatch)
    assert [blobs.has(digest) for digest in digests] == [True, False, True]
    assert other.exists(), "what is not a blob is the vault's own business"
    assert not integrity.verified.is_whole(other, digest_of(b"personal"))
    [told] = integrity.reports()
    assert str(blobs.path(digests[1])) in told
