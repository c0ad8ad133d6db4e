"""The page on which an administrator makes a token for one device, shown once, or admits a device by its code."""

from typing import NamedTuple

from nicegui import ui

from coordinator.record.record import Record
from coordinator.rounds.service.labelling import set_labels
from coordinator.security.folder import make_token
from coordinator.views.dashboard.actions import change
from coordinator.views.dashboard.adoption_form import show_form
from coordinator.views.dashboard.frame import Part, Site, page
from fedvit.errors import FedvitError
from fedvit.quantities import parse_seconds

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
            tokens: list[str] = []

            def make(store: Record) -> str:
                tokens.append(make_invitation(store, site, asked))
                return f"a token for {device}"

            try:
                await change(site, make, "admin")
            except FedvitError as error:
                made.show(token=None, error=str(error), device=device, valid="")
            else:
                made.show(token=tokens[0], error=None, device=device, valid=VALID[str(valid.value)])
                name.value = ""

        with ui.element("div").classes("buttons"):
            ui.button("Make a token", on_click=enrol)
        if site.adoptions:
            await show_form(site, site.adoptions)
