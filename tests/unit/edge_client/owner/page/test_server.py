"""Answers of the page, over real connections: to strangers, to other origins, to its owner."""

import os
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

from edge_client.owner.page.access import PageAccess
from edge_client.owner.page.html import quote_name
from edge_client.owner.page.server import HEADERS, LONGEST_FORM
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import lock_state
from tests.support.owner_pages import PASSWORD, RIGHT, Home, Visitor, make_home, serving, write_status

PATHS = (
    "/left",
    "/pictures",
    "/label",
    "/picture?name=cat%2Fknown.png",
    "/image?name=cat%2Fknown.png",
    "/guess",
    "/no",
)
OPEN = ("/page.css", "/page.js", "/icon.svg")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path)


@pytest.fixture
def stranger(home: Home) -> Iterator[Visitor]:
    with serving(home, PageAccess(PASSWORD, None)) as visitor:
        yield visitor


@pytest.fixture
def owner(stranger: Visitor) -> Visitor:
    assert stranger.post("/login", RIGHT).status == 303
    return stranger


def test_stranger_sees_the_question_for_the_password_and_nothing_else(stranger: Visitor, home: Home) -> None:
    write_status(home)
    asked = stranger.get("/")
    assert (asked.status, "Password of this device" in asked.text, "pi" in asked.text.split()) == (200, True, False)
    for path in PATHS:
        reply = stranger.get(path)
        assert (reply.status, reply.headers["Location"], reply.text) == (303, "/", "")
    for path in ("/pause", "/resume", "/label"):
        reply = stranger.post(path, {"picture": "0000.png", "label": "cat"})
        assert (reply.status, reply.headers["Location"]) == (303, "/")
    assert not OwnerPause(home.state).is_on()
    assert "unlabelled/0000.png" in home.files()


@pytest.mark.parametrize("path", ["/", *OPEN, *PATHS])
def test_every_answer_has_the_headers(stranger: Visitor, path: str) -> None:
    for _ in range(2):  # before and after the password
        headers = stranger.get(path).headers
        assert {name: headers[name] for name, _ in HEADERS} == dict(HEADERS)
        stranger.post("/login", RIGHT)


def test_wrong_password_and_guessed_cookies_open_nothing(stranger: Visitor) -> None:
    wrong = stranger.post("/login", {"secret": "seven letters"})
    assert (wrong.status, "password is wrong" in wrong.text, stranger.cookie) == (403, True, "")
    for cookie in (f"fedvit_page_{stranger.port}=x", "fedvit_page_0=", "\x01=;;=", f"fedvit_page_{stranger.port}"):
        assert stranger.get("/left", Cookie=cookie).status == 303
    assert stranger.post("/login", RIGHT).status == 303
    assert stranger.get("/left").status == 200


def test_cookie_is_for_this_page_alone(owner: Visitor) -> None:
    flags = owner.post("/login", RIGHT).headers["Set-Cookie"]
    assert flags.startswith(f"fedvit_page_{owner.port}=")
    assert {"HttpOnly", "SameSite=Strict"} <= set(flags.split("; "))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://["])
def test_forms_of_other_origins_are_refused(owner: Visitor, home: Home, origin: str) -> None:
    """A browser sends the origin of each form, which is the page's own or it is an attack."""
    assert owner.post("/pause", {}, Origin=origin).status == 403
    assert not OwnerPause(home.state).is_on()


def test_without_a_password_the_token_opens_and_other_names_are_refused(home: Home) -> None:
    with serving(home, PageAccess(None, "token-of-the-address")) as visitor:
        assert visitor.get("/left").status == 303
        assert visitor.get("/", Host="evil.example").status == 403
        assert visitor.get("/page.css", Host=f"evil.example:{visitor.port}").status == 403
        assert visitor.get("/?token=wrong").status == 403
        opened = visitor.get("/?token=token-of-the-address")
        assert (opened.status, opened.headers["Location"]) == (303, "/")
        assert visitor.get("/left").status == 200
        assert visitor.get("/left", Host=f"localhost:{visitor.port}").status == 200
        assert visitor.get("/left", Host="[").status == 403


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("a" * (LONGEST_FORM + 1), {}, 413),
        ("label=cat", {"Content-Type": "text/plain"}, 413),
        ("label=cat", {"Content-Length": "-1"}, 413),
        ("label=cat", {"Content-Length": "\u00b2"}, 413),
        ("label=cat", {"Content-Length": "9" * 5000}, 413),
        ("&".join(f"a{number}=1" for number in range(30)), {}, 413),
    ],
)
def test_bodies_that_are_no_form_of_the_page(owner: Visitor, body: str, headers: dict[str, str], status: int) -> None:
    usual = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"http://{owner.host}"}
    sent = {**usual, **headers}
    with socket.create_connection(("127.0.0.1", owner.port)) as link:
        lines = [f"{name}: {value}" for name, value in {"Content-Length": str(len(body)), **sent}.items()]
        head = "\r\n".join(["POST /label HTTP/1.1", f"Host: {owner.host}", f"Cookie: {owner.cookie}", *lines])
        link.sendall(f"{head}\r\n\r\n{body}".encode("latin-1"))
        assert link.recv(100).startswith(f"HTTP/1.0 {status} ".encode())


@pytest.mark.parametrize(
    "line",
    [
        "GET /",
        "BREW / HTTP/1.1",
        "GET",
        "GET / HTTP/9.9",
        "HEAD / HTTP/1.0",
        "\x00\x01",
        f"GET /?{'&'.join(['a=1'] * 30)} HTTP/1.0",
        "GET http://[ HTTP/1.0",
    ],
)
def test_requests_that_are_none(stranger: Visitor, line: str, caplog: pytest.LogCaptureFixture) -> None:
    """They get an error, or no answer: never a page."""
    with socket.create_connection(("127.0.0.1", stranger.port)) as link:
        link.sendall(f"{line}\r\nHost: {stranger.host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    assert not answer or answer.startswith((b"HTTP/1.0 4", b"HTTP/1.0 5"))
    assert b"<html" not in answer
    assert caplog.records == []


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname", "../state/device-id", "unlabelled/../../state/x.png", "train/../cat/known.png",
        "cat//known.png", "cat/.hidden.png", ".hidden/a.png", "cat/notes.txt", "cat/known.png\0", "", "a/b/c/d.png",
        "other/cat/known.png",
    ],
)  # fmt: skip
def test_only_pictures_of_the_folder_are_shown(owner: Visitor, home: Home, name: str) -> None:
    for file in ("cat/.hidden.png", ".hidden/a.png", "cat/notes.txt", "other/cat/known.png"):
        path = home.images / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((home.images / "cat/known.png").read_bytes())
    reply = owner.get(f"/image?name={quote(quote_name(name))}")
    assert reply.headers["Content-Type"] == "image/svg+xml"
    assert owner.get(f"/picture?name={quote(quote_name(name))}").status == 404


def test_pictures_leave_out_what_the_file_says_beside_its_pixels(owner: Visitor) -> None:
    reply = owner.get("/image?name=cat%2Fknown.png&side=240")
    assert reply.headers["Content-Type"] == "image/jpeg"
    assert "Exif" not in reply.text


def test_label_by_form_and_undo(owner: Visitor, home: Home) -> None:
    """A browser without a script sends it so."""
    done = owner.post("/label", {"picture": "0000.png", "label": "dog"})
    assert done.headers["Location"] == "/label?after=0000.png"
    assert "dog/0000.png" in home.files()
    assert "0000.png is <b>dog</b> now" in owner.get(done.headers["Location"]).text
    skipped = owner.post("/label", {"picture": "0001.png", "act": "skip"})
    assert "0002.png" in owner.get(skipped.headers["Location"]).text
    undone = owner.post("/label", {"picture": "0001.png", "act": "undo"})
    assert undone.headers["Location"] == "/label?picture=0000.png"
    assert "unlabelled/0000.png" in home.files()


@pytest.mark.parametrize("form", [{"picture": "0000.png", "label": "../../x"}, {"picture": "gone.png", "label": "cat"}])
def test_label_that_cannot_be_given_is_explained(owner: Visitor, home: Home, form: dict[str, str]) -> None:
    before = home.files()
    assert "banner bad" in owner.post("/label", form).text
    assert home.files() == before


class Elements(HTMLParser):
    """Counts elements, and the attributes that would run a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_markup_in_names_stays_text(owner: Visitor, home: Home) -> None:
    name = '"><img src=x onerror=alert(1)><script>.png'
    (home.images / "unlabelled" / "0000.png").rename(home.images / "unlabelled" / name)
    (home.images / "<script>").mkdir()
    for path in ("/", "/pictures", "/label"):
        found = Elements(owner.get(path).text)
        assert (found.scripts, found.handlers) == (1, [])
    owner.post("/label", {"picture": quote_name(name), "label": quote_name("<script>")})
    assert f"<script>/{name}" in home.files()


def test_device_shows_state_use_and_pause(owner: Visitor, home: Home) -> None:
    assert "It has not run yet" in owner.get("/").text
    write_status(home, "training", run="birds", round=3, done_steps=4, total_steps=8)
    assert "Not running" in owner.get("/").text
    lock = lock_state(home.state)
    shown = owner.get("/").text
    for text in ("Training", "Round 3 of birds", "step 4 of 8", "200 MB of 400 MB", "Label 3 pictures"):
        assert text in shown
    assert owner.post("/pause", {}).headers["Location"] == "/"
    assert OwnerPause(home.state).is_on()
    assert "Paused by you since" in owner.get("/").text
    owner.post("/resume", {})
    assert not OwnerPause(home.state).is_on()
    os.close(lock)
