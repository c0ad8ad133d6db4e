"""The page on which an administrator makes a token for one device, shown once, or admits a device by its code."""

import time
from collections.abc import Callable
from typing import NamedTuple

from nicegui import ui

from coordinator.record.record import Record
from coordinator.rounds.service.labelling import set_labels
from coordinator.security.adoption_service import AdoptionService
from coordinator.security.folder import make_token
from coordinator.views.dashboard.actions import change
from coordinator.views.dashboard.frame import Part, Site, follow, page
from fedvit.errors import FedvitError
from fedvit.quantities import parse_seconds
from fedvit.wire.adoption import ADOPTION_PORT

VALID = {"10m": "10 minutes", "1h": "1 hour", "24h": "1 day"}
"""Validities of a token to choose from."""


class EnrolmentForm(NamedTuple):
    """A device that is to join."""

    device: str
    labels: list[str]
    valid: str  # of VALID
    replaces: bool


def make_invitation(store: Record, site: Site, asked: EnrolmentForm) -> str:
    """Make a token for a device, and set its labels; return the text of the token. Raises ConfigError."""
    assert site.deployment is not None
    token = make_token(site.deployment, asked.device, parse_seconds(asked.valid), replaces=asked.replaces)
    if asked.labels:
        set_labels(store, [asked.device], asked.labels)
    return token.text()


WINDOW_S = 600.0
"""Time for which devices may ask."""


async def show_form(site: Site, service: AdoptionService) -> None:
    """Show the form, which follows the window: anybody may have opened it, and devices come and go."""
    state, outcome = Part("enrol.html", "window"), Part("enrol.html", "outcome")

    async def act(decide: Callable[[], str], *, is_shown: bool = True) -> None:
        try:
            done = await change(site, lambda _: decide(), "admin")
        except FedvitError as error:
            outcome.show(error=str(error), done=None)
        else:
            code.value = ""
            outcome.show(error=None, done=done if is_shown else None)
        await refresh()

    def let_ask() -> str:
        service.open(str(place.value or "").strip(), WINDOW_S)
        return "devices may ask"

    def admit() -> str:
        return f"{service.admit(str(code.value or ''), replaces=bool(replaces.value))} may join: answer yes there"

    def close() -> str:
        service.close()
        return "devices may not ask any more"

    with ui.element("div") as closed:
        place = ui.input("Address at which devices may ask", value=f"0.0.0.0:{ADOPTION_PORT}")
        place.props("outlined dense").classes("search")
        with ui.element("div").classes("buttons"):
            ui.button("Let devices ask", on_click=lambda: act(let_ask, is_shown=False))
    with ui.element("div") as decision:
        code = ui.input("Code on the screen of the device").props("outlined dense").classes("search")
        replaces = ui.checkbox("It replaces the device of this name")
        with ui.element("div").classes("buttons"):
            ui.button("Admit", on_click=lambda: act(admit))
            ui.button("Refuse", on_click=lambda: act(lambda: f"{service.refuse()} is refused")).props("outline")
    with ui.element("div").classes("buttons") as opened:
        ui.button("Let no device ask", on_click=lambda: act(close, is_shown=False)).props("outline")

    async def refresh() -> None:
        seen = service.state
        left_s = None if seen.closes_at is None else max(0.0, seen.closes_at - time.monotonic())
        closed.set_visibility(left_s is None)
        opened.set_visibility(left_s is not None)
        decision.set_visibility(bool(seen.device))
        state.show(seen=seen, left_s=left_s)

    await follow(refresh)


async def show(site: Site) -> None:
    """Show the page."""
    with page("Enrol a device", "/devices"):
        Part("enrol.html", "head").show(may_enrol=site.may("enrol"), has_deployment=site.deployment is not None)
        if not site.may("enrol") or site.deployment is None:
            return
        name = ui.input("Name of the device").props("outlined dense").classes("search")
        labels = ui.input("Labels, as in site=berlin board=rpi5").props("outlined dense").classes("search")
        valid = (
            ui.select(VALID, value="1h", label="The token can be used for").props("outlined dense").classes("search")
        )
        replaces = ui.checkbox("It replaces the device of this name, whose certificate is revoked then")
        made = Part("enrol.html", "made")

        async def enrol() -> None:
            device = str(name.value or "").strip()
            asked = EnrolmentForm(device, str(labels.value or "").split(), str(valid.value), bool(replaces.value))
            try:
                token = await change(
                    site, lambda store: make_invitation(store, site, asked), "admin", lambda _: f"a token for {device}"
                )
            except FedvitError as error:
                made.show(token=None, error=str(error), device=device, valid="")
            else:
                made.show(token=token, error=None, device=device, valid=VALID[str(valid.value)])
                name.value = ""

        with ui.element("div").classes("buttons"):
            ui.button("Make a token", on_click=enrol)
        if site.adoptions:
            await show_form(site, site.adoptions)
