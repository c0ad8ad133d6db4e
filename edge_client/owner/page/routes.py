"""The routes of the owner's page: what it answers to those who have access."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_client.owner.page.access import PageAccess
from edge_client.owner.page.device_view import DevicePart
from edge_client.owner.page.guesses import Guesses
from edge_client.owner.page.html import make_link, quote_name, render_document, tag, unquote_name
from edge_client.owner.page.ledger_view import show_ledger
from edge_client.owner.page.pictures import LARGE, SMALL, PictureFolder
from edge_client.owner.page.pictures_view import show_labelling, show_picture, show_pictures
from edge_client.owner.page.use import LedgerUse
from edge_client.settings import DeviceSettings
from edge_client.storage.ledger import Ledger
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import read_device_id
from fedvit.data.images import limit_decoded_bytes
from fedvit.errors import ConfigError, DataError, FedvitError

HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_DAMAGED = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100"><path d="M25 25 75 75M75 25 25 75" stroke="#888" '
    b'stroke-width="6"/></svg>'
)


class PageAnswer(Struct, frozen=True):
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


def lead_to(path: str, *headers: tuple[str, str]) -> PageAnswer:
    """Return the answer that makes the browser get a path."""
    return PageAnswer(303, TEXT, b"", (("Location", path), *headers))


class OwnerPage:
    """The owner's page of a device: answers for those who have access to it."""

    def __init__(self, settings: DeviceSettings, state: Path, access: PageAccess) -> None:
        self.access = access
        self._state = state
        self._use = LedgerUse(Ledger(state))
        self._device = DevicePart(settings, state, self._use)
        self._pause = OwnerPause(state)
        self._pictures = PictureFolder(settings.data_folder, limit_decoded_bytes(settings.policy.train.memory))
        self.guesses = Guesses(settings, state)
        self._gets: dict[str, Callable[[Mapping[str, str]], PageAnswer]] = {
            "/": self._show_device,
            "/left": lambda query: answer_page(show_ledger(self._use.ledger, self._name(), _read_page(query))),
            "/pictures": self._show_pictures,
            "/picture": self._show_picture,
            "/label": self._show_labelling,
            "/image": self._show_image,
            "/guess": self._guess,
        }
        self._posts: dict[str, Callable[[Mapping[str, str]], PageAnswer]] = {
            "/pause": lambda _: self._change(self._pause.begin),
            "/resume": lambda _: self._change(self._pause.end),
            "/label": self._label,
        }

    def get(self, path: str, query: Mapping[str, str]) -> PageAnswer:
        """Answer a request that changes nothing."""
        return self._answer(self._gets.get(path), query)

    def post(self, path: str, form: Mapping[str, str]) -> PageAnswer:
        """Answer a form."""
        return self._answer(self._posts.get(path), form)

    def _answer(self, act: Callable[[Mapping[str, str]], PageAnswer] | None, values: Mapping[str, str]) -> PageAnswer:
        if act is None:
            return PageAnswer(404, TEXT, b"There is no such page.\n")
        try:
            return act(values)
        except FedvitError as error:
            status = 404 if isinstance(error, DataError) else 500
            return answer_page(show_trouble(f"{error} [{error.code}]"), status)

    def _name(self) -> str:
        """Return the device's name; it may have none yet."""
        try:
            return read_device_id(self._state / "device-id")
        except (OSError, ConfigError):
            return "This device"

    # --- views ----------------------------------------------------------------------------------------

    def _show_device(self, _: Mapping[str, str]) -> PageAnswer:
        try:
            waiting = len(self._pictures.open_classes().list_waiting())
        except DataError:  # the pages of pictures show why
            waiting = 0
        return answer_page(self._device.show(self._name(), waiting))

    def _show_pictures(self, query: Mapping[str, str]) -> PageAnswer:
        return answer_page(show_pictures(self._pictures, self._name(), _read_name(query, "of"), _read_page(query)))

    def _show_picture(self, query: Mapping[str, str]) -> PageAnswer:
        return answer_page(show_picture(self._pictures, self._name(), _read_name(query, "name")))

    def _show_labelling(self, query: Mapping[str, str]) -> PageAnswer:
        wanted, after = _read_name(query, "picture"), _read_name(query, "after")
        return answer_page(show_labelling(self._pictures, self._name(), wanted, after))

    def _show_image(self, query: Mapping[str, str]) -> PageAnswer:
        side = SMALL if query.get("side") == str(SMALL) else LARGE
        try:
            return PageAnswer(
                200, "image/jpeg", self._pictures.draw(self._pictures.find(_read_name(query, "name")), side)
            )
        except DataError:  # a sign in its place, with the picture's name
            return PageAnswer(200, "image/svg+xml", _DAMAGED)

    def _guess(self, query: Mapping[str, str]) -> PageAnswer:
        try:
            guess = self.guesses.guess(self._pictures.find(_read_name(query, "name")))
        except FedvitError as error:
            return PageAnswer(200, JSON, msgspec.json.encode(GuessAnswer(reason=str(error))))
        return PageAnswer(200, JSON, msgspec.json.encode(GuessAnswer(guess.label, guess.probability)))

    # --- changes --------------------------------------------------------------------------------------

    def _change(self, act: Callable[[], None]) -> PageAnswer:
        act()
        return lead_to("/")

    def _label(self, form: Mapping[str, str]) -> PageAnswer:
        picture = _read_name(form, "picture")
        try:
            if form.get("act") == "undo":
                undone = self._pictures.undo()
                return lead_to(make_link("/label", picture=quote_name(undone or picture)))
            if "label" in form:
                self._pictures.label(picture, _read_name(form, "label"))
        except FedvitError as error:
            return answer_page(show_labelling(self._pictures, self._name(), picture, picture, str(error)))
        return lead_to(make_link("/label", after=quote_name(picture)))


def answer_page(body: bytes, status: int = 200) -> PageAnswer:
    return PageAnswer(status, HTML, body)


def _read_name(values: Mapping[str, str], key: str) -> str:
    return unquote_name(values.get(key, ""))


def _read_page(query: Mapping[str, str]) -> int:
    text = query.get("page", "1")
    return min(max(int(text), 1), 10**6) if text.isascii() and text.isdigit() and len(text) < 9 else 1


def show_trouble(text: str) -> bytes:
    """Return a page with an error."""
    return render_document(
        "Error", tag("main", tag("h1", "fedvit"), tag("p", text, class_="banner bad"), tag("a", "Device", href="/"))
    )
