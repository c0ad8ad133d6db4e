"""Reads a folder of releases: a local one, or one at a web server. Nothing that comes from it is trusted before its
signature or digest is verified."""

import http.client
import os
import shutil
import ssl
import string
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fedvit.errors import BadPayload, LinkDown, PeerRefused
from fedvit.files import sync_file
from fedvit.public_keys import PublicKey
from fedvit.releases import MAX_LIST_BYTES, Package, ReleaseList, decode_list, hash_file

TIMEOUT_S = 30.0
"""Longest wait for the next bytes."""
TRIES = 3
"""Connections in a row that bring less than a piece, after which a download waits for the next update."""
PAUSE_S = 2.0
"""Between two connections."""
_PIECE_BYTES = 1 << 20
_HINT = "the present version goes on; try again when there is a network"


class FileMissing(LinkDown):
    """The folder, or what is taken for it, has no such file."""


def read_list(source: str, channel: str, key: PublicKey) -> ReleaseList:
    """Read the list of a channel. Raises LinkDown, PeerRefused if `key` has not signed it, BadPayload."""
    from fedvit.minisign import MAX_SIGNATURE_CHARACTERS, SUFFIX, verify  # a device that trains needs no cryptography

    name = f"{channel}.json"
    with open_file(source, name) as file:
        content = file.read(MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        raise BadPayload("FV1465", f"{source}/{name} exceeds {MAX_LIST_BYTES} bytes: it is no list of releases")
    try:
        with open_file(source, name + SUFFIX) as file:
            signature = file.read(MAX_SIGNATURE_CHARACTERS).decode(errors="replace")
    except FileMissing:
        raise PeerRefused(
            "FV1463",
            f"{source}/{name} is not signed: {name}{SUFFIX} is missing; nothing of it is used. Copy the folder of "
            "releases anew, or ask who publishes them",
        ) from None
    verify(key, content, signature, f"{source}/{name}")
    releases = decode_list(content, f"{source}/{name}")
    if releases.channel != channel:
        raise BadPayload("FV1465", f"{source}/{name} is the list of channel {releases.channel}; nothing of it is used")
    return releases


def download(source: str, package: Package, target: Path) -> None:
    """Fetch a package, durably; what an earlier call has left in `target` is not fetched again.

    Raises LinkDown, after which `target` has what came so far; BadPayload if it is another file than the list says;
    OSError.
    """
    was_begun = target.exists()
    try:
        _fetch_whole(source, package, target)
    except BadPayload:
        target.unlink(missing_ok=True)
        if not was_begun:
            raise
        # a power cut may have damaged what was there, so once more from the beginning
        try:
            _fetch_whole(source, package, target)
        except BadPayload:
            target.unlink(missing_ok=True)
            raise
    sync_file(target)


def _fetch_whole(source: str, package: Package, target: Path) -> None:
    """Fetch what is missing of a package, again after each cut. Raises LinkDown after TRIES cuts without a piece."""
    failures = 0
    with target.open("ab") as out:
        while (had := _count_bytes(out)) < package.size:
            try:
                _fetch_rest(source, package, out)
            except LinkDown:
                failures = 0 if _count_bytes(out) - had >= _PIECE_BYTES else failures + 1
                if failures == TRIES:
                    raise
                time.sleep(PAUSE_S)
    if target.stat().st_size != package.size or hash_file(target) != package.sha256:
        raise _other_file(source, package)


def _fetch_rest(source: str, package: Package, out: BinaryIO) -> None:
    """Append what is missing. Raises LinkDown if the connection ends early, BadPayload if the size is another one."""
    had = _count_bytes(out)
    with open_file(source, package.file, had) as file:
        if isinstance(file, http.client.HTTPResponse):
            if file.status != http.HTTPStatus.PARTIAL_CONTENT:  # a server without ranges sends all
                out.truncate(0)
                had = 0
            if file.length is not None and had + file.length != package.size:
                raise _other_file(source, package)
        left = package.size - had
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            out.write(piece)
            left -= len(piece)
        if left <= 0 and file.read(1):
            raise _other_file(source, package)
        if left > 0 and not isinstance(file, http.client.HTTPResponse):
            raise _other_file(source, package)
        if left > 0:
            raise LinkDown("FV1462", f"{source}/{package.file}: the connection ended early; {_HINT}")


def _count_bytes(out: BinaryIO) -> int:
    out.flush()
    return os.fstat(out.fileno()).st_size


def _other_file(source: str, package: Package) -> BadPayload:
    return BadPayload(
        "FV1465",
        f"{source}/{package.file} is not the file that the signed list names ({package.size} bytes, SHA-256 "
        f"{package.sha256[:16]}...); nothing is installed. Copy the folder of releases anew",
    )


def _encode_path(url: str) -> str:
    """Encode what is not ASCII in the path of a URL, as browsers do. Raises LinkDown for what is no URL."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise LinkDown("FV1462", f"{url} is no URL: {error}; name the folder or URL of releases again") from None
    return parts._replace(path=urllib.parse.quote(parts.path, safe=string.printable)).geturl()


@contextmanager
def open_file(source: str, name: str, start: int = 0) -> Iterator[BinaryIO]:
    """Open a file of a folder or below a URL, from byte `start` on if the server can do that.

    Raises LinkDown, also if the connection ends while it is read; BadPayload if the file is too short for `start`.
    """
    place = f"{source.rstrip('/')}/{name}"
    try:
        if source.startswith(("http://", "https://")):
            ask = urllib.request.Request(_encode_path(place), headers={"Range": f"bytes={start}-"} if start else {})
            with urllib.request.urlopen(ask, timeout=TIMEOUT_S) as answer:
                yield cast(BinaryIO, answer)
        else:
            with open(place, "rb") as file:
                file.seek(start)
                yield file
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise BadPayload("FV1465", f"{place} is shorter than the signed list says; nothing is installed") from None
        kind = FileMissing if error.code == http.HTTPStatus.NOT_FOUND else LinkDown
        raise kind("FV1462", f"{place}: {error.code} {error.reason}; is this the folder of releases?") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        reason = getattr(error, "reason", error)
        hint = _HINT
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = f"this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}: set it if wrong"
        raise LinkDown("FV1462", f"{place} cannot be read: {reason}; {hint}") from None
    except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
        kind = FileMissing if isinstance(error, FileNotFoundError) else LinkDown
        raise kind(
            "FV1462", f"{place} cannot be read: {error.strerror}; is this the folder of releases, and mounted?"
        ) from None


def count_free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk with this folder."""
    return shutil.disk_usage(folder).free
