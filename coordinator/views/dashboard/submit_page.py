"""The page on which an operator puts a run into the queue: the text of a run.toml, with what is wrong by key."""

import asyncio
import tomllib
from typing import Any

from nicegui import ui

from coordinator.config import find_errors
from coordinator.views.dashboard.actions import change
from coordinator.views.dashboard.frame import Part, Site, page
from fedvit.errors import FedvitError

WHERE = "run.toml"
LONGEST_TEXT = 100_000
EXAMPLE = 'method = "fedavg"\nmodel = "vit_small_images"\nrounds = 20\ndevices = 3\n'


def read_text(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a run.toml, and what is wrong by key; "" for the whole file."""
    if len(text) > LONGEST_TEXT:
        return {}, {"": f"the text has {len(text)} characters, at most {LONGEST_TEXT} are read"}
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return {}, {"": f"this is not TOML: {error}"}
    errors = {
        key: str(error).removeprefix(f"{WHERE}").lstrip(": ") for key, error in find_errors(values, WHERE).items()
    }
    if "broker" in values:
        errors["broker"] = "a run of a service uses the service's broker: leave this table out"
    return values, errors


async def show(site: Site) -> None:
    """Show the page."""
    with page("Submit a run", "/runs"):
        head = Part("submit.html", "head")
        head.show(may_submit=site.may("submit"))
        if not site.may("submit"):
            return
        text = ui.textarea("run.toml", value=EXAMPLE).props("for=config outlined autogrow spellcheck=false")
        name = ui.input("Name of the run; by default date, time and method").props("outlined dense").classes("search")
        outcome = Part("submit.html", "outcome")

        async def check() -> dict[str, Any] | None:
            """Show what is wrong; return the values if nothing is."""
            values, errors = await asyncio.to_thread(read_text, str(text.value or ""))
            outcome.show(errors=errors, run=None, warning=None, checked=not errors)
            return None if errors else values

        async def submit() -> None:
            if (values := await check()) is None:
                return
            try:
                own_name, places = str(name.value or "").strip() or None, site.user.may("admin")
                run, warning = await change(
                    site,
                    lambda _: site.submit(values, own_name, places),
                    describe=lambda made: f"run {made[0]} is in the queue",
                )
            except FedvitError as error:
                outcome.show(errors={"": str(error)}, run=None, warning=None, checked=False)
            else:
                outcome.show(errors={}, run=run, warning=warning, checked=False)

        with ui.element("div").classes("buttons"):
            ui.button("Submit", on_click=submit)
            ui.button("Check only", on_click=check).props("outline")
