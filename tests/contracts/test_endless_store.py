"""Object stores whose answers do not end: a real HTTP server, of which no more is read than is expected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.config import BlobsConfig
from coordinator.rounds.object_store import ObjectStore
from fedvit.blobs import BlobStore
from fedvit.errors import LinkDown
from fedvit.transport.urls import download, upload
from fedvit.wire.messages import Manifest
from tests.support.codes import has_code
from tests.support.waiting import WAIT_S

PIECE = bytes(64 * 1024)
END_BYTES = 256 << 20
"""The server gives up here, so that a client without a limit does not hang."""
BUFFERS_BYTES = 32 << 20
"""Buffers of both sockets, which fill whatever the client reads."""


class EndlessServer:
    """Answers everything with the same head and a body that does not end."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.sent_bytes = 0
        self.answered = threading.Semaphore(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                chunked = "Transfer-Encoding" in server.headers
                piece = b"%x\r\n" % len(PIECE) + PIECE + b"\r\n" if chunked else PIECE
                with suppress(OSError):
                    while server.sent_bytes < END_BYTES:
                        self.wfile.write(piece)
                        server.sent_bytes += len(piece)
                self.close_connection = True
                server.answered.release()

            do_PUT = do_GET
            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="endless", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[EndlessServer]:
    server = EndlessServer()
    yield server
    server.close()


def read_by(server: EndlessServer, act: Callable[[], object]) -> int:
    """Bytes that the server could send until its client ended the connection."""
    act()
    server.answered.acquire()
    return server.sent_bytes


@pytest.mark.parametrize("headers", [{}, {"Content-Length": str(2**40)}, {"Transfer-Encoding": "chunked"}])
def test_answer_to_an_upload_is_not_read(server: EndlessServer, headers: dict[str, str]) -> None:
    server.headers = headers
    content = memoryview(b"a blob")
    assert read_by(server, lambda: upload(f"{server.endpoint}/b?X=1", content, lambda: True)) < BUFFERS_BYTES


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_error_that_does_not_end_is_an_error(server: EndlessServer, method: str) -> None:
    server.status, url = 500, f"{server.endpoint}/b?X=1"
    transfers: dict[str, Callable[[], None]] = {
        "GET": lambda: download(url, 0, 100, 100, 10, lambda piece: True),
        "PUT": lambda: upload(url, memoryview(b"a blob"), lambda: True),
    }

    def act() -> None:
        with pytest.raises(LinkDown, check=has_code("FV1216", "500")):
            transfers[method]()

    assert read_by(server, act) < BUFFERS_BYTES


def test_download_ends_at_the_declared_size(server: EndlessServer) -> None:
    server.status, server.headers = 206, {"Content-Range": "bytes 0-99/100"}
    pieces: list[bytes] = []

    def take(piece: memoryview) -> bool:
        pieces.append(bytes(piece))
        return True

    assert read_by(server, lambda: download(f"{server.endpoint}/b?X=1", 0, 100, 100, 64, take)) < BUFFERS_BYTES
    assert b"".join(pieces) == bytes(100)


def test_a_size_of_any_length_is_an_error(server: EndlessServer) -> None:
    """Python reads no number of so many digits; the blob then comes in chunks, as from any store that fails."""
    server.status, server.headers = 206, {"Content-Range": f"bytes 0-99/{'9' * 5000}"}

    def act() -> None:
        with pytest.raises(LinkDown, check=has_code("FV1216", "ValueError")):
            download(f"{server.endpoint}/b?X=1", 0, 100, 100, 10, lambda piece: True)

    assert read_by(server, act) < BUFFERS_BYTES


@pytest.mark.parametrize(
    "headers",
    [{"Content-Length": str(2**40)}, {"Transfer-Encoding": "chunked", "Content-Length": "100"}],
    ids=["another size", "a size that is not kept"],
)
def test_coordinator_reads_a_piece_up_to_its_size(
    server: EndlessServer, headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device puts pieces of its upload; what is there is read by the coordinator."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    server.headers = {"Last-Modified": "Tue, 24 Nov 2026 18:00:00 GMT", "ETag": '"1"', **headers}
    store = ObjectStore(BlobsConfig(url="s3://bucket", endpoint=server.endpoint), "run", BlobStore(tmp_path))
    read: list[bytes | None] = []
    done = threading.Event()

    def take(content: bytes | None) -> None:
        read.append(content)
        done.set()

    try:
        store.read_upload("pi", Manifest("blake3:" + "ab" * 32, 100, 1024), 0, 100, take)
        assert done.wait(WAIT_S)
    finally:
        store.close()
    assert server.sent_bytes < BUFFERS_BYTES
    assert read in ([None], [bytes(100)])
