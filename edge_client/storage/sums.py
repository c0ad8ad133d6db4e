"""Checksums in the vault: digests of a round's files, and of small files themselves."""

from pathlib import Path

import msgspec

from fedvit.blobs import digest_of, medium_failed
from fedvit.errors import BadPayload, StorageFailed
from fedvit.files import atomic_write, name_failure, storage_failed

SUMS = "SUMS"
_MAGIC = b"fedvit checked 1\n"
_DIGEST_BYTES = len(digest_of(b""))


class Sums(msgspec.Struct, frozen=True):
    """Digests of the files of one round in the vault, and how many rounds were stored before it."""

    generation: int
    files: dict[str, str]  # name -> digest


def read_sums(folder: Path) -> Sums | None:
    """Return the checksums of a round; None if the process that wrote it ended before they were complete.

    Raises BadPayload when the file is damaged, StorageFailed when it cannot be read for another reason.
    """
    try:
        raw = (folder / SUMS).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if medium_failed(error):
            raise BadPayload("FV1704", f"{folder / SUMS} is damaged: {error.strerror}") from error
        raise storage_failed(f"cannot read {folder / SUMS}", error) from error
    try:
        return msgspec.msgpack.decode(check_digest(raw), type=Sums)
    except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadPayload("FV1704", f"{folder / SUMS} is damaged: {error}") from error


def write_sums(folder: Path, sums: Sums) -> None:
    """Raises StorageFailed, DiskFull."""
    atomic_write(folder / SUMS, add_digest(msgspec.msgpack.encode(sums)), private=True)


def add_digest(content: bytes) -> bytes:
    """Put a small file's digest in front of its content."""
    return _MAGIC + digest_of(content).encode() + content


def check_digest(raw: bytes) -> bytes:
    """Undo `add_digest`. Raises BadPayload for another digest, or none."""
    body = raw[len(_MAGIC) :]
    digest, content = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
    if not raw.startswith(_MAGIC) or digest != digest_of(content).encode():
        raise BadPayload("FV1704", f"{len(content)} bytes do not have the digest in front of them")
    return content


def read_file(file: Path) -> bytes:
    """Raises StorageFailed."""
    with name_failure(f"cannot read {file}", StorageFailed, "FV1702"):
        return file.read_bytes()
