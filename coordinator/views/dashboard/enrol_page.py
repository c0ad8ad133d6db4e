"""The page on which an administrator makes a token for one device; the token is shown once."""

import asyncio

import click
from nicegui import ui

from coordinator.record.record import open_record
from coordinator.rounds.service.labelling import set_labels
from coordinator.security.folder import make_token
from coordinator.views.dashboard.frame import Part, Site, page
from fedvit.errors import FedvitError
from fedvit.quantities import parse_seconds

VALID = {"10m": "10 minutes", "1h": "1 hour", "24h": "1 day"}
"""Validities of a token to choose from."""


def make_invitation(site: Site, device: str, labels: str, valid: str, *, replaces: bool) -> str:
    """Make a token for a device, and set its labels; return the text of the token. Raises ConfigError."""
    assert site.deployment is not None
    token = make_token(site.deployment, device, parse_seconds(valid), replaces=replaces)
    if labels.split():
        store = open_record(site.folder, check=False)
        try:
            set_labels(store, device, labels.split())
        finally:
            store.close()
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
            try:
                token = await asyncio.to_thread(
                    make_invitation,
                    site,
                    device,
                    str(labels.value or ""),
                    str(valid.value),
                    replaces=bool(replaces.value),
                )
            except FedvitError as error:
                made.show(token=None, error=str(error), device=device, valid="")
            else:
                click.echo(f"by the dashboard: a token for {device}")
                made.show(token=token, error=None, device=device, valid=VALID[str(valid.value)])
                name.value = ""

        with ui.element("div").classes("buttons"):
            ui.button("Make a token", on_click=enrol)
