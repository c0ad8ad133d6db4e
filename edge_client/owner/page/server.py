"""The server of the owner's page: what it answers to whom."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Struct

from edge_client.owner.page.access import PageAccess, TooManyAttempts
from edge_client.owner.page.device_view import DeviceView
from edge_client.owner.page.guesses import Guesses
from edge_client.owner.page.html import document, link, quote_name, tag, unquote_name
from edge_client.owner.page.ledger_view import show_ledger
from edge_client.owner.page.pictures import LARGE, SMALL, Pictures
from edge_client.owner.page.pictures_view import show_labelling, show_picture, show_pictures
from edge_client.owner.page.use import LedgerUse
from edge_client.settings import DeviceSettings
from edge_client.storage.ledger import Ledger
from edge_client.storage.pause import Pause
from edge_client.storage.state import read_device_id
from fedvit.data.images import limit_decoded_bytes
from fedvit.errors import ConfigError, DataError, FedvitError
from fedvit.small_server import ListenAddress, SmallHandler, SmallServer

log = logging.getLogger(__name__)

LONGEST_FORM, MOST_FIELDS = 4096, 20
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),  # with no-referrer forms are sent without their origin
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_ASSETS = {"/page.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}
_DAMAGED = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100"><path d="M25 25 75 75M75 25 25 75" stroke="#888" '
    b'stroke-width="6"/></svg>'
)


class Answer(Struct, frozen=True):
    """An answer to a request."""

    status: int
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class GuessAnswer(Struct, frozen=True, omit_defaults=True):
    """A guess of the model, or the reason why there is none."""

    label: str = ""
    probability: float = 0.0
    reason: str = ""


def lead_to(path: str, *headers: tuple[str, str]) -> Answer:
    """Return the answer that makes the browser get a path."""
    return Answer(303, TEXT, b"", (("Location", path), *headers))


class Page:
    """The owner's page of a device: answers for those who have access to it."""

    def __init__(self, settings: DeviceSettings, state: Path, access: PageAccess) -> None:
        self.access = access
        self._state = state
        self._use = LedgerUse(Ledger(state))
        self._device = DeviceView(settings, state, self._use)
        self._pause = Pause(state)
        self._pictures = Pictures(settings.data_folder, limit_decoded_bytes(settings.policy.train.memory))
        self.guesses = Guesses(settings, state)
        self._gets: dict[str, Callable[[Mapping[str, str]], Answer]] = {
            "/": self._show_device,
            "/left": lambda query: _page(show_ledger(self._use.ledger, self._name(), _number(query))),
            "/pictures": self._show_pictures,
            "/picture": lambda query: _page(show_picture(self._pictures, self._name(), _file(query, "name"))),
            "/label": self._show_labelling,
            "/image": self._show_image,
            "/guess": self._guess,
        }
        self._posts: dict[str, Callable[[Mapping[str, str]], Answer]] = {
            "/pause": lambda _: self._change(self._pause.begin),
            "/resume": lambda _: self._change(self._pause.end),
            "/label": self._label,
        }

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answer a request that changes nothing."""
        return self._answer(self._gets.get(path), query)

    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        """Answer a form."""
        return self._answer(self._posts.get(path), form)

    def _answer(self, act: Callable[[Mapping[str, str]], Answer] | None, values: Mapping[str, str]) -> Answer:
        if act is None:
            return Answer(404, TEXT, b"There is no such page.\n")
        try:
            return act(values)
        except FedvitError as error:
            status = 404 if isinstance(error, DataError) else 500
            return _page(show_trouble(f"{error} [{error.code}]"), status)

    def _name(self) -> str:
        """Return the device's name; it may have none yet."""
        try:
            return read_device_id(self._state / "device-id")
        except (OSError, ConfigError):
            return "This device"

    # --- views ----------------------------------------------------------------------------------------

    def _show_device(self, _: Mapping[str, str]) -> Answer:
        try:
            waiting = len(self._pictures.open_classes().list_waiting())
        except DataError:  # the pages of pictures show why
            waiting = 0
        return _page(self._device.show(self._name(), waiting))

    def _show_pictures(self, query: Mapping[str, str]) -> Answer:
        return _page(show_pictures(self._pictures, self._name(), _file(query, "of"), _number(query)))

    def _show_labelling(self, query: Mapping[str, str]) -> Answer:
        wanted, after = _file(query, "picture"), _file(query, "after")
        return _page(show_labelling(self._pictures, self._name(), wanted, after))

    def _show_image(self, query: Mapping[str, str]) -> Answer:
        side = SMALL if query.get("side") == str(SMALL) else LARGE
        try:
            return Answer(200, "image/jpeg", self._pictures.draw(self._pictures.find(_file(query, "name")), side))
        except DataError:  # a sign in its place, with the picture's name
            return Answer(200, "image/svg+xml", _DAMAGED)

    def _guess(self, query: Mapping[str, str]) -> Answer:
        try:
            guess = self.guesses.guess(self._pictures.find(_file(query, "name")))
        except FedvitError as error:
            return Answer(200, JSON, msgspec.json.encode(GuessAnswer(reason=str(error))))
        return Answer(200, JSON, msgspec.json.encode(GuessAnswer(guess.label, guess.probability)))

    # --- changes --------------------------------------------------------------------------------------

    def _change(self, act: Callable[[], None]) -> Answer:
        act()
        return lead_to("/")

    def _label(self, form: Mapping[str, str]) -> Answer:
        picture = _file(form, "picture")
        try:
            if form.get("act") == "undo":
                undone = self._pictures.undo()
                return lead_to(link("/label", picture=quote_name(undone or picture)))
            if "label" in form:
                self._pictures.label(picture, _file(form, "label"))
        except FedvitError as error:
            return _page(show_labelling(self._pictures, self._name(), picture, picture, str(error)))
        return lead_to(link("/label", after=quote_name(picture)))


def _page(body: bytes, status: int = 200) -> Answer:
    return Answer(status, HTML, body)


def _file(values: Mapping[str, str], key: str) -> str:
    return unquote_name(values.get(key, ""))


def _number(query: Mapping[str, str]) -> int:
    text = query.get("page", "1")
    return min(max(int(text), 1), 10**6) if text.isascii() and text.isdigit() and len(text) < 9 else 1


def show_trouble(text: str) -> bytes:
    """Return a page with an error."""
    return document(
        "Error", tag("main", tag("h1", "fedvit"), tag("p", text, class_="banner bad"), tag("a", "Device", href="/"))
    )


def show_login(what: str, *, is_wrong: bool = False) -> bytes:
    """Return the page that asks for the password, or for the token of the address."""
    wrong = tag("p", f"The {what} is wrong.", class_="banner bad", role="alert") if is_wrong else None
    field = {"name": "secret", "type": "password", "autocomplete": "current-password", "required": True}
    hint = ("The address that ", tag("code", "edge-client page"), " printed contains it.") if what == "token" else None
    return document(
        "Sign in",
        tag(
            "main",
            tag("h1", "fedvit"),
            wrong,
            tag(
                "form",
                tag("label", f"{what.capitalize()} of this device's page", for_="secret"),
                tag("input", id="secret", autofocus=True, **field),
                tag("button", "Sign in"),
                method="post", action="/login", class_="login",
            ),
            tag("p", *hint, class_="note") if hint else None,
        ),
    )  # fmt: skip


class PageServer(SmallServer):
    """Serves the page. Raises ConfigError if it cannot listen."""

    at_once = 32
    at_once_of_one_address = 16

    def __init__(self, listen: ListenAddress, page: Page) -> None:
        self.page = page
        try:
            super().__init__(listen, _Handler)
        except OSError as error:
            where = f"unix:{listen.socket_path}" if listen.socket_path else f"{listen.host}:{listen.port}"
            raise ConfigError("FV1426", f"--listen {where} cannot be opened: {error.strerror or error}") from None
        page.access.port = self.port

    def service_actions(self) -> None:
        """Free what is not used any more; called twice a second."""
        self.page.guesses.drop_idle()


class _Handler(SmallHandler):
    server: PageServer

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._serve("GET")

    def do_POST(self) -> None:
        """Answer a form."""
        self._serve("POST")

    def _serve(self, method: str) -> None:
        try:
            answer = self._find_answer(method)
        except TimeoutError:
            return
        except Exception:  # one request must not end the page
            log.exception("request failed", extra={"path": self.path})
            answer = Answer(500, TEXT, b"Unexpected failure; the program's log has it.\n")
        self.answer(answer.status, answer.kind, answer.body, (*HEADERS, *answer.headers))

    def _find_answer(self, method: str) -> Answer:
        access = self.server.page.access
        try:
            address = urlsplit(self.path)
            query = dict(parse_qsl(address.query, max_num_fields=MOST_FIELDS))
        except ValueError:
            return Answer(400, TEXT, b"This address cannot be read.\n")
        if not access.is_expected(method, self.headers.get("Host", ""), self.headers.get("Origin")):
            return Answer(403, TEXT, b"This address is not served.\n")
        if method == "GET" and address.path in _ASSETS:
            name = address.path.lstrip("/")
            return Answer(200, _ASSETS[address.path], files("edge_client.owner.page").joinpath(name).read_bytes())
        if method == "GET" and access.token and "token" in query:
            return self._enter(query["token"])
        form = self._read_form() if method == "POST" else {}
        if form is None:
            return Answer(413, TEXT, b"This is not a form of this page.\n")
        if method == "POST" and address.path == "/login":
            return self._enter(form.get("secret", ""))
        if not access.has_session(self.headers.get("Cookie", "")):
            return self._ask() if (method, address.path) == ("GET", "/") else lead_to("/")
        page = self.server.page
        return page.post(address.path, form) if method == "POST" else page.get(address.path, query)

    def _ask(self, *, is_wrong: bool = False) -> Answer:
        what = "token" if self.server.page.access.password is None else "password"
        return _page(show_login(what, is_wrong=is_wrong), 403 if is_wrong else 200)

    def _enter(self, secret: str) -> Answer:
        try:
            cookie = self.server.page.access.enter(secret, self.client_address[0] if self.client_address else "")
        except TooManyAttempts as error:
            return Answer(429, TEXT, f"{str(error).capitalize()}.\n".encode())
        return lead_to("/", ("Set-Cookie", cookie)) if cookie else self._ask(is_wrong=True)

    def _read_form(self) -> dict[str, str] | None:
        """Read the body of a form; None if it is none, or too long."""
        text = self.headers.get("Content-Length", "")
        length = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else LONGEST_FORM + 1
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if length > LONGEST_FORM or kind != "application/x-www-form-urlencoded":
            return None
        body = self.rfile.read(length)
        if len(body) < length:
            return None
        try:
            return dict(parse_qsl(body.decode("ascii"), max_num_fields=MOST_FIELDS))
        except ValueError:
            return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request."""
        self.answer(code, TEXT, b"This request cannot be read.\n", HEADERS)

    def answer(self, status: int, kind: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send an answer, unless the client has gone."""
        if self.request_version != "HTTP/0.9":  # which has no headers, and so no policy
            super().answer(status, kind, body, headers)
