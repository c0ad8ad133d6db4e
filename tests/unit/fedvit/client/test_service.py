"""Downloads: a file is whole, or as it was before."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedvit.client import Service
from fedvit.errors import LinkDown, StorageFailed
from tests.support.waiting import WAIT_S


@contextmanager
def answering(answer: bytes) -> Iterator[Service]:
    """A server that gives this answer to one request, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            link, _ = listening.accept()
            with link:
                link.recv(1 << 16)
                link.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Service(f"http://127.0.0.1:{listening.getsockname()[1]}", "token")
        thread.join(WAIT_S)


def test_download_that_breaks_off_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_bytes(b"of yesterday")
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    with answering(half) as service, pytest.raises(LinkDown):
        service.download(file, "runs", "r", "report")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report.html": b"of yesterday"}


def test_download_is_written(tmp_path: Path) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage"
    with answering(whole) as service:
        service.download(tmp_path / "report.html", "runs", "r", "report")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report.html": b"page"}


def test_file_that_cannot_be_written_is_no_fault_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed):
        Service("http://127.0.0.1:1", "token").download(tmp_path / "none" / "report.html", "runs", "r", "report")
