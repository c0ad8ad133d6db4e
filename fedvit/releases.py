"""Releases of the device's software: a folder with packages, and one signed list for each channel.

A package is a ZIP file with what belongs into `site-packages`, dependencies included, for one Python and one kind of
processor. The list says which version is for which labels; a device reads it, nobody can push a version to it.
"""

import hashlib
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from packaging.version import InvalidVersion, Version

from fedvit.errors import BadPayload

LIST_VERSION = 1
MAX_LIST_BYTES = 1 << 20
MAX_PACKAGE_BYTES = 4 << 30
MAX_MEMBERS = 100_000
STABLE = "stable"
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The date of all files in a package, so that equal folders make equal packages."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")]
"""A name of a file, a version or a channel: never a path."""
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, Meta(ge=1, le=MAX_PACKAGE_BYTES)]


class Package(Struct, frozen=True, kw_only=True):
    """A package file beside the list."""

    file: Name
    version: Name
    python: Name  # as 3.11
    machine: Name  # as aarch64, x86_64
    sha256: Digest
    size: Size  # in bytes
    unpacked: Size  # sum of its files, in bytes


class Offer(Struct, frozen=True, kw_only=True):
    """A version for devices that have all of these labels; without labels for all devices."""

    version: Name
    labels: dict[str, str] = {}
    packages: tuple[Package, ...]


class ReleaseList(Struct, frozen=True, kw_only=True):
    """The signed content of CHANNEL.json."""

    v: int = LIST_VERSION
    channel: Name
    serial: Annotated[int, Meta(ge=1)]  # grows with each change: a device refuses a list from before one that it knows
    offers: tuple[Offer, ...]


def encode_list(releases: ReleaseList) -> bytes:
    return msgspec.json.format(msgspec.json.encode(releases)) + b"\n"


def decode_list(raw: bytes, name: str) -> ReleaseList:
    """Undo `encode_list`. Raises BadPayload, naming the file `name`."""
    try:
        releases = msgspec.json.decode(raw, type=ReleaseList)
        for offer in releases.offers:
            parse_version(offer.version)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadPayload("FV1465", f"{name} is no list of releases: {error}") from error
    if releases.v != LIST_VERSION:
        raise BadPayload(
            "FV1465",
            f"{name} is of version {releases.v}, this software reads version {LIST_VERSION}: install fedvit anew",
        )
    return releases


def parse_version(text: str) -> Version:
    """Return a version that can be compared. Raises BadPayload."""
    try:
        return Version(text)
    except InvalidVersion:
        raise BadPayload("FV1465", f"{text[:80]!r} is no version, as 0.2.0 or 0.3.0b1") from None


def choose_offer(releases: ReleaseList, labels: Mapping[str, str]) -> Offer | None:
    """Return the newest version for a device with these labels; None if there is none."""
    meant = [offer for offer in releases.offers if offer.labels.items() <= labels.items()]
    return max(meant, key=lambda offer: parse_version(offer.version), default=None)


def check_members(members: Iterable[zipfile.ZipInfo], name: str) -> int:
    """Check the files of a package before one is unpacked; return the sum of their sizes in bytes.

    Raises BadPayload for a name that leads out of the folder, a link, or a name that occurs twice.
    """
    total, seen = 0, set[str]()
    for member in members:
        path = PurePosixPath(member.filename)
        kind = member.external_attr >> 28  # of the file's mode: 0 and 8 are files, 4 a folder, 10 a link
        parts_out = path.is_absolute() or not {"..", "."}.isdisjoint(member.filename.split("/"))
        if parts_out or not path.parts or set("\\\0:") & set(member.filename) or kind not in (0, 4, 8):
            raise BadPayload("FV1465", f"{name} holds {member.filename[:80]!r}, which leads out of its folder")
        if member.filename in seen or len(seen) >= MAX_MEMBERS:
            raise BadPayload("FV1465", f"{name} holds {member.filename[:80]!r} twice, or more than {MAX_MEMBERS} files")
        seen.add(member.filename)
        total += member.file_size
    return total


def pack_folder(folder: Path, file: Path) -> None:
    """Write a package of a folder's files, without compiled ones; the same files always make the same bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EARLIEST)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o100644 << 16
                with path.open("rb") as source, archive.open(entry, "w") as target:
                    while piece := source.read(1 << 20):
                        target.write(piece)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    pack_folder(Path(sys.argv[1]), Path(sys.argv[2]))
