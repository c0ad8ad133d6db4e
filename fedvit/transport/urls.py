"""Bytes of a blob to and from a URL that the coordinator signed: HTTP by the standard library, without redirects.

A signed URL is a secret: no text here contains one.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from fedvit.errors import LinkDown

CONNECT_S = 5.0
"""Longest wait for a connection; a device without a route to the store notices it by this."""
SILENCE_S = 20.0
"""Longest silence of a store in the middle of a transfer."""
AT_ONCE = 4
"""Transfers of one process at the same time."""
_SENT_BYTES = 64 * 1024
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_slots = threading.BoundedSemaphore(AT_ONCE)


class NoRoute(LinkDown):
    """No connection to the store can be made, which takes long to find out."""


def in_thread(work: Callable[[], None]) -> None:
    """Run a transfer as soon as fewer than AT_ONCE others run. It does not keep the process from ending."""

    def run() -> None:
        with _slots:
            work()

    threading.Thread(target=run, name="blob-url", daemon=True).start()


def is_at(url: str, origin: str) -> bool:
    """Return whether a URL is one of `origin`, such as `https://store.example:9000`.

    >>> is_at("https://store:9000/b?X=1", "https://store:9000"), is_at("https://a@store:9000/", "https://store:9000")
    (True, False)
    """
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and origin_of(parts) == origin
    except ValueError:  # not a URL
        return False


def origin_of(url: SplitResult) -> str:
    """The scheme, host and port of a URL, for `is_at`; empty unless it is one of HTTP."""
    return f"{url.scheme}://{url.netloc}" if url.scheme in ("http", "https") and "@" not in url.netloc else ""


def download(url: str, first: int, end: int, size: int, piece_bytes: int, take: Callable[[memoryview], bool]) -> None:
    """Pass the bytes from `first` up to `end` of an object of `size` bytes to `take`, in pieces of `piece_bytes`, of
    which the last may be shorter, until it returns False.

    Raises LinkDown if they do not come.
    """
    with _request(url, "GET", {"Range": f"bytes={first}-{end - 1}"}) as (host, response):
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, whole = map(int, found.groups()) if found else (0, response.length)
        if (start, whole) != (first, size):
            raise LinkDown(
                "FV1216", f"{host} has {whole} bytes from byte {start} on, expected {size} from byte {first} on"
            )
        buffer = memoryview(bytearray(piece_bytes))
        while first < end:
            piece = buffer[: min(piece_bytes, end - first)]
            filled = 0
            while filled < len(piece):
                got = response.readinto(piece[filled:])
                if not got:
                    raise LinkDown("FV1216", f"{host} closed the connection {end - first - filled} bytes too early")
                filled += got
            first += filled
            if not take(piece):
                return


def upload(url: str, content: memoryview, goes_on: Callable[[], bool]) -> None:
    """Put `content` to a URL. Raises LinkDown if that fails, or when `goes_on` has become false."""

    def pieces() -> Iterator[memoryview]:
        for start in range(0, len(content), _SENT_BYTES):
            if not goes_on():
                raise LinkDown("FV1216", "the upload is not needed any more")
            yield content[start : start + _SENT_BYTES]

    # Azure asks for the kind of a blob, and other stores ignore it
    headers = {"Content-Length": str(len(content)), "x-ms-blob-type": "BlockBlob"}
    with _request(url, "PUT", headers, pieces()):
        pass  # the status says all; the rest of the answer could be of any length


@contextlib.contextmanager
def _request(
    url: str, method: str, headers: dict[str, str], body: Iterator[memoryview] | None = None
) -> Iterator[tuple[str, HTTPResponse]]:
    """The answer to a request, and its host. Raises LinkDown unless it is a success."""
    parts = urlsplit(url)
    connection = _connection(parts)
    try:
        try:
            connection.connect()
        except ConnectionRefusedError:  # which costs no time
            raise LinkDown("FV1216", f"nobody listens at {parts.netloc}") from None
        except OSError as error:
            raise NoRoute("FV1216", f"no connection to {parts.netloc}: {error}") from None
        connection.sock.settimeout(SILENCE_S)
        connection.request(method, f"{parts.path}?{parts.query}", body, headers)
        response = connection.getresponse()
        if response.status not in (200, 201, 204, 206):
            raise LinkDown("FV1216", f"{parts.netloc} answers {method} with HTTP {response.status}")
        yield parts.netloc, response
    except OSError as error:
        raise LinkDown("FV1216", f"the connection to {parts.netloc} was lost: {error}") from None
    except (HTTPException, ValueError) as error:  # its text may contain the URL, or a number of any length
        raise LinkDown("FV1216", f"{parts.netloc} is not an HTTP server: {type(error).__name__}") from None
    finally:
        connection.close()


def _connection(parts: SplitResult) -> HTTPConnection:
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    assert parts.hostname is not None  # `is_at` holds
    return kind(parts.hostname, parts.port, timeout=CONNECT_S)
