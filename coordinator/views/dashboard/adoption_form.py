"""The form in which an administrator lets devices ask for adoption, and types the code of the one that does."""

import time
from collections.abc import Callable

from nicegui import ui

from coordinator.record.record import Record
from coordinator.security.adoption_service import AdoptionService
from coordinator.views.dashboard.actions import change
from coordinator.views.dashboard.frame import Part, Site, follow
from fedvit.errors import FedvitError
from fedvit.wire.adoption import ADOPTION_PORT

WINDOW_S = 600.0
"""Time for which devices may ask."""


async def show_form(site: Site, service: AdoptionService) -> None:
    """Show the form, which follows the window: anybody may have opened it, and devices come and go."""
    state, outcome = Part("enrol.html", "window"), Part("enrol.html", "outcome")

    async def act(decide: Callable[[], str], *, is_shown: bool = True) -> None:
        def do(_: Record) -> str:
            done.append(decide())
            return done[0]

        done: list[str] = []
        try:
            await change(site, do, "admin")
        except FedvitError as error:
            outcome.show(error=str(error), done=None)
        else:
            code.value = ""
            outcome.show(error=None, done=done[0] if is_shown else None)
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
