import threading
import time

import pytest

from edge_client.owner.page import access as access_module
from edge_client.owner.page.access import MOST_SESSIONS, AttemptUnderWay, PageAccess
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("method", "host", "origin", "expected"),
    [
        ("GET", "127.0.0.1:1", None, True),
        ("GET", "localhost", None, True),
        ("GET", "[::1]:1", None, True),
        ("GET", "evil.example", None, False),
        ("GET", "", None, False),
        ("GET", "[", None, False),
        ("GET", "localhost:1", "http://evil.example", False),
        ("POST", "localhost:1", "http://localhost:1", True),
        ("POST", "localhost:1", "http://localhost:2", False),
        ("POST", "localhost:1", "null", False),
        ("POST", "localhost:1", None, False),
    ],
)
def test_requests_that_the_page_expects(method: str, host: str, origin: str | None, expected: bool) -> None:
    assert PageAccess(None, "token").is_expected(method, host, origin) is expected


def test_with_a_password_every_name_is_served_and_other_origins_are_not() -> None:
    access = PageAccess("password", None)
    assert access.is_expected("GET", "pi.local:8092", None)
    assert not access.is_expected("POST", "pi.local:8092", "http://evil.example")


def test_wrong_secret_delays_its_own_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one address waits, it may not even send the right password; all others may."""
    go_on = threading.Event()
    monkeypatch.setattr(access_module.time, "sleep", lambda _: go_on.wait())
    access = PageAccess("password", None)
    refused: list[str | None] = ["not yet"]
    waiting = threading.Thread(target=lambda: refused.__setitem__(0, access.enter("wrong", "192.0.2.7")))
    waiting.start()
    try:
        wait_until(lambda: access._waiting)
        with pytest.raises(AttemptUnderWay):
            access.enter("password", "192.0.2.7")
        assert access.enter("password", "192.0.2.8")
    finally:
        go_on.set()
        waiting.join()
    assert refused == [None]
    assert access.enter("password", "192.0.2.7")


def test_oldest_session_ends_when_there_are_too_many() -> None:
    access = PageAccess("password", None, port=1)
    cookies = [str(access.enter("password", "192.0.2.7")).partition(";")[0] for _ in range(MOST_SESSIONS + 1)]
    assert [access.has_session(cookie) for cookie in (cookies[0], cookies[1], cookies[-1])] == [False, True, True]


def test_session_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    access = PageAccess("password", None)
    cookie = str(access.enter("password", "192.0.2.7")).partition(";")[0]
    assert access.has_session(cookie)
    later = time.monotonic() + access_module.SESSION_S
    monkeypatch.setattr(access_module.time, "monotonic", lambda: later)
    assert not access.has_session(cookie)


def test_socket_needs_no_secret_and_no_secret_opens_nothing_else() -> None:
    assert PageAccess(None, None).has_session("")
    assert PageAccess(None, None).enter("", "192.0.2.7") is None
