"""Bounds of the small server, against clients that want to keep it busy."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedvit import small_server
from fedvit.small_server import LONGEST_REQUEST, ListenAddress, SmallHandler, SmallServer
from tests.support.waiting import WAIT_S, wait_until

FREE = ListenAddress("127.0.0.1", 0)


class Hello(SmallHandler):
    def do_GET(self) -> None:
        self.answer(200, "text/plain", b"hello")

    def do_POST(self) -> None:
        self.answer(200, "text/plain", self.rfile.read())


class Few(SmallServer):
    at_once = 4
    at_once_of_one_address = 2

    def __init__(self, listen: ListenAddress, handler: type[SmallHandler]) -> None:
        self.names: dict[object, str] = {}  # by port of the client, in place of its address
        super().__init__(listen, handler)

    def _client(self, client_address: Any) -> str:
        return "" if self.socket_path else self.names.get(client_address[1], "a")


@contextmanager
def serve(listen: ListenAddress = FREE) -> Iterator[Few]:
    server = Few(listen, Hello)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)


def connect(server: Few) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
    link.settimeout(WAIT_S)
    return link


def read_all(link: socket.socket) -> bytes:
    """The rest of a connection; b"" if the server has reset it."""
    try:
        return b"".join(iter(lambda: link.recv(65536), b""))
    except ConnectionResetError:
        return b""


def ask(server: Few) -> bytes:
    with connect(server) as link:
        link.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return read_all(link)


def test_one_address_cannot_take_all_connections() -> None:
    """It has two of four; another address is served, and itself when one of its connections ends."""
    with serve() as server:
        silent = [connect(server) for _ in range(3)]
        assert read_all(silent[2]) == b""
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            server.names[other.getsockname()[1]] = "b"
            other.settimeout(WAIT_S)
            other.connect(("127.0.0.1", server.port))
            other.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert read_all(other).endswith(b"hello")
        for link in silent:
            link.close()
        wait_until(lambda: not server._open)
        assert ask(server).endswith(b"hello")


def test_request_that_arrives_in_drops_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the whole never would."""
    monkeypatch.setattr(small_server, "REQUEST_S", 0.5)
    with serve() as server, connect(server) as link:
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.05):
                try:
                    link.sendall(b"G")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert read_all(link) == b""
        finally:
            over.set()
            dripping.join(WAIT_S)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.0\r\nX: ", b"POST / HTTP/1.0\r\n\r\n", b""])
def test_request_that_is_too_large_ends_without_an_answer(head: bytes) -> None:
    with serve() as server, connect(server) as link:
        with suppress(ConnectionResetError, BrokenPipeError):
            link.sendall(head + b"x" * (2 * LONGEST_REQUEST))
        assert read_all(link) == b""


def test_clients_of_a_socket_are_bounded_together(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serve(ListenAddress(socket_path=path)) as server:
        assert server.address == f"unix:{path}"
        links = []
        for _ in range(4):
            links.append(socket.socket(socket.AF_UNIX))
            links[-1].connect(str(path))
        for link in links:
            link.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert read_all(link).endswith(b"hello")
            link.close()


def test_connection_without_a_thread_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could start no more threads is served again afterwards."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serve() as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            assert [ask(server) for _ in range(3)] == [b""] * 3
        assert ask(server).endswith(b"hello")
