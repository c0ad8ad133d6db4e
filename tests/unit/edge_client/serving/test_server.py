"""Requests from outside: bounded, and answered with a reason."""

import socket
import threading
from collections.abc import Iterator

import pytest

from edge_client.serving.models import ModelServer
from edge_client.serving.server import MAX_PICTURE_BYTES, SMALL_PICTURE_BYTES, PredictServer
from fedvit.errors import ConfigError
from fedvit.small_server import ListenAddress
from tests.support.codes import has_code
from tests.support.served import encode_picture, request, split_digits

PICTURE = encode_picture(split_digits(0).stream.pixels[0])


@pytest.fixture
def web(server: ModelServer) -> Iterator[PredictServer]:
    web = PredictServer(ListenAddress("127.0.0.1", 0), server, None)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()


def test_picture_is_answered(web: PredictServer) -> None:
    for form in ("JPEG", "PNG", "WEBP"):
        picture = encode_picture(split_digits(0).stream.pixels[0], form)
        status, answer = request(web.port, "POST", "/predict?top=2", picture)
        assert status == 200
        assert answer["model"] == "digits-1"
        assert len(answer["answers"]) == 2
        assert answer["answers"][0]["confidence"] == answer["confidence"]
        assert answer["label"] in (None, answer["answers"][0]["label"])
        assert answer["seconds"] > 0
    health = request(web.port, "GET", "/health")
    assert health[0] == 200
    assert (health[1]["model"], health[1]["state"], health[1]["answered"]) == ("digits-1", "champion", 3)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/predict", b"", 413),
        ("POST", "/predict", b"no picture", 422),
        ("POST", "/predict", PICTURE[:200], 422),
        ("POST", "/predict", b"x" * (SMALL_PICTURE_BYTES + 1), 422),
        ("POST", "/predict?top=0", PICTURE, 400),
        ("POST", "/predict?top=x", PICTURE, 400),
        ("POST", "/predict?top=99999", PICTURE, 400),
        ("POST", "/predict?a=1&b=1&c=1&d=1&e=1&top=1", PICTURE, 400),
        ("POST", "/other", PICTURE, 404),
        ("GET", "/predict", b"", 404),
        ("PUT", "/predict", b"", 501),
    ],
)
def test_wrong_request_gets_a_reason(web: PredictServer, method: str, path: str, body: bytes, status: int) -> None:
    got, answer = request(web.port, method, path, body)
    assert got == status
    assert answer["error"]
    assert answer["code"].startswith("FV")
    assert request(web.port, "POST", "/predict", PICTURE)[0] == 200


def test_address_that_cannot_be_read_gets_a_reason(web: PredictServer) -> None:
    with socket.create_connection(("127.0.0.1", web.port), timeout=60) as link, link.makefile("rb") as answer:
        link.sendall(b"GET http://[/health HTTP/1.1\r\n\r\n")
        assert answer.readline().startswith(b"HTTP/1.1 400 ")
        assert b"FV1493" in answer.read()


def test_size_is_bounded_before_anything_is_read(web: PredictServer) -> None:
    for length in (str(MAX_PICTURE_BYTES + 1), "9" * 9):
        assert request(web.port, "POST", "/predict", b"", {"Content-Length": length})[0] == 413
    for length in ("-1", "9" * 10, "1e3"):
        assert request(web.port, "POST", "/predict", b"", {"Content-Length": length})[0] == 411


def test_client_may_ask_before_it_sends(web: PredictServer) -> None:
    """As curl does for pictures above 1 MB, and waits for a second without an invitation."""
    for length, first in ((len(PICTURE), b"HTTP/1.1 100 Continue"), (MAX_PICTURE_BYTES + 1, b"HTTP/1.1 413 ")):
        with socket.create_connection(("127.0.0.1", web.port), timeout=60) as link, link.makefile("rb") as answer:
            head = f"POST /predict HTTP/1.1\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
            link.sendall(head.encode())
            assert answer.readline().startswith(first)
            if length == len(PICTURE):
                assert answer.readline() == b"\r\n"
                link.sendall(PICTURE)
                assert answer.read().startswith(b"HTTP/1.1 200 "), "and the connection ends"


def test_picture_that_would_take_much_memory_is_refused(web: PredictServer) -> None:
    """A small file may stand for a huge picture."""
    head = b"P5 60000 60000 255\n" + b"0" * 100
    status, answer = request(web.port, "POST", "/predict", head)
    assert status == 422
    assert "MiB" in answer["error"]


def test_client_that_leaves_disturbs_nobody(web: PredictServer) -> None:
    with socket.create_connection(("127.0.0.1", web.port)) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 1000\r\n\r\nhalf")
    with socket.create_connection(("127.0.0.1", web.port)) as link:
        link.sendall(b"\x00\xff garbage\r\n\r\n")
    assert request(web.port, "POST", "/predict", PICTURE)[0] == 200


def test_page_of_a_browser_is_refused(web: PredictServer) -> None:
    assert request(web.port, "POST", "/predict", PICTURE, {"Origin": "http://example.org"})[0] == 403


def test_token(server: ModelServer) -> None:
    web = PredictServer(ListenAddress("127.0.0.1", 0), server, "eight letters")
    threading.Thread(target=web.serve_forever, daemon=True).start()
    for sent in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "eight letters"}):
        assert request(web.port, "POST", "/predict", PICTURE, sent)[0] == 401
        assert request(web.port, "GET", "/health", b"", sent)[0] == 401
    assert request(web.port, "POST", "/predict", PICTURE, {"Authorization": "Bearer eight letters"})[0] == 200
    with pytest.raises(ConfigError, check=has_code("FV1493")):
        PredictServer(ListenAddress("127.0.0.1", web.port), server, None)
    web.shutdown()
    web.server_close()
