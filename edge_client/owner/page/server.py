"""The server of the owner's page: who has access, and the headers of every answer."""

import logging
import re
from collections.abc import Iterable
from importlib.resources import files
from urllib.parse import parse_qsl, urlsplit

from edge_client.owner.page.access import AttemptUnderWay
from edge_client.owner.page.html import render_document, tag
from edge_client.owner.page.routes import TEXT, OwnerPage, PageAnswer, answer_page, lead_to
from fedvit.errors import ConfigError
from fedvit.small_server import ListenAddress, SmallHandler, SmallServer

log = logging.getLogger(__name__)

LONGEST_FORM, MOST_FIELDS = 4096, 20
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


def show_login(what: str, *, is_wrong: bool = False) -> bytes:
    """Return the page that asks for the password, or for the token of the address."""
    wrong = tag("p", f"The {what} is wrong.", class_="banner bad", role="alert") if is_wrong else None
    field = {"name": "secret", "type": "password", "autocomplete": "current-password", "required": True}
    hint = ("The address that ", tag("code", "edge-client page"), " printed contains it.") if what == "token" else None
    return render_document(
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

    def __init__(self, listen: ListenAddress, page: OwnerPage) -> None:
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
            answer = PageAnswer(500, TEXT, b"Unexpected failure; the program's log has it.\n")
        self.answer(answer.status, answer.kind, answer.body, (*HEADERS, *answer.headers))

    def _find_answer(self, method: str) -> PageAnswer:
        access = self.server.page.access
        try:
            address = urlsplit(self.path)
            query = dict(parse_qsl(address.query, max_num_fields=MOST_FIELDS))
        except ValueError:
            return PageAnswer(400, TEXT, b"This address cannot be read.\n")
        if not access.is_expected(method, self.headers.get("Host", ""), self.headers.get("Origin")):
            return PageAnswer(403, TEXT, b"This address is not served.\n")
        if method == "GET" and address.path in _ASSETS:
            name = address.path.lstrip("/")
            return PageAnswer(200, _ASSETS[address.path], files("edge_client.owner.page").joinpath(name).read_bytes())
        if method == "GET" and access.token and "token" in query:
            return self._enter(query["token"])
        form = self._read_form() if method == "POST" else {}
        if form is None:
            return PageAnswer(413, TEXT, b"This is not a form of this page.\n")
        if method == "POST" and address.path == "/login":
            return self._enter(form.get("secret", ""))
        if not access.has_session(self.headers.get("Cookie", "")):
            return self._ask() if (method, address.path) == ("GET", "/") else lead_to("/")
        page = self.server.page
        return page.post(address.path, form) if method == "POST" else page.get(address.path, query)

    def _ask(self, *, is_wrong: bool = False) -> PageAnswer:
        what = "token" if self.server.page.access.password is None else "password"
        return answer_page(show_login(what, is_wrong=is_wrong), 403 if is_wrong else 200)

    def _enter(self, secret: str) -> PageAnswer:
        try:
            cookie = self.server.page.access.enter(secret, self.client_address[0] if self.client_address else "")
        except AttemptUnderWay as error:
            return PageAnswer(429, TEXT, f"{str(error).capitalize()}.\n".encode())
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
