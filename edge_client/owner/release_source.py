"""Reads a folder of releases: a local one, or one at a web server. Nothing that comes from it is trusted before its
signature or digest is verified."""

import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fedvit.errors import BadPayload, LinkDown
from fedvit.files import sync_file
from fedvit.public_keys import PublicKey
from fedvit.releases import MAX_LIST_BYTES, Package, ReleaseList, decode_list, hash_file

TIMEOUT_S = 30.0
"""Longest wait for the next bytes."""
_PIECE_BYTES = 1 << 20


def read_list(source: str, channel: str, key: PublicKey) -> ReleaseList:
    """Read the list of a channel. Raises LinkDown, PeerRefused if `key` has not signed it, BadPayload."""
    from fedvit.minisign import MAX_SIGNATURE_CHARACTERS, SUFFIX, verify  # a device that trains needs no cryptography

    name = f"{channel}.json"
    with open_file(source, name) as file:
        content = file.read(MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        raise BadPayload("FV1465", f"{source}/{name} exceeds {MAX_LIST_BYTES} bytes: it is no list of releases")
    with open_file(source, name + SUFFIX) as file:
        signature = file.read(MAX_SIGNATURE_CHARACTERS).decode(errors="replace")
    verify(key, content, signature, f"{source}/{name}")
    releases = decode_list(content, f"{source}/{name}")
    if releases.channel != channel:
        raise BadPayload("FV1465", f"{source}/{name} is the list of channel {releases.channel}; nothing of it is used")
    return releases


def download(source: str, package: Package, target: Path) -> None:
    """Fetch a package, durably. Raises LinkDown, BadPayload if it is another file than the list says, OSError."""
    with open_file(source, package.file) as file, target.open("wb") as out:
        left = package.size
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            out.write(piece)
            left -= len(piece)
        has_more = not left and file.read(1)
    if left or has_more or hash_file(target) != package.sha256:
        target.unlink()
        raise BadPayload(
            "FV1465",
            f"{source}/{package.file} is not the file that the signed list names ({package.size} bytes, SHA-256 "
            f"{package.sha256[:16]}...); nothing is installed. Copy the folder of releases anew",
        )
    sync_file(target)


@contextmanager
def open_file(source: str, name: str) -> Iterator[BinaryIO]:
    """Open a file of a folder or below a URL. Raises LinkDown, also if the connection ends while it is read."""
    place = f"{source.rstrip('/')}/{name}"
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(place, timeout=TIMEOUT_S) as answer:
                yield cast(BinaryIO, answer)
        else:
            with open(place, "rb") as file:
                yield file
    except urllib.error.HTTPError as error:
        raise LinkDown("FV1462", f"{place}: {error.code} {error.reason}; is this the folder of releases?") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        reason = getattr(error, "reason", error)
        hint = "the present version goes on; try again when there is a network"
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = f"this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}: set it if wrong"
        raise LinkDown("FV1462", f"{place} cannot be read: {reason}; {hint}") from None
    except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise LinkDown(
            "FV1462", f"{place} cannot be read: {error.strerror}; is this the folder of releases, and mounted?"
        ) from None


def count_free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk with this folder."""
    return shutil.disk_usage(folder).free
