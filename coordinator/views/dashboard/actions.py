"""Changes that an operator can make, after a question, by the code of the commands."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import click
from nicegui import ui

from coordinator.record.audit import Actor, acting_as
from coordinator.record.record import Record, open_record
from coordinator.rounds.service.labelling import set_labels
from coordinator.rounds.service.run_requests import RunAct, change_run, release
from coordinator.security.api_tokens import UserRole
from coordinator.security.credentials import Forbidden
from coordinator.security.revoking import revoke_device
from coordinator.views.dashboard.access import PageSession
from coordinator.views.dashboard.frame import SESSION, Site
from fedvit.errors import FedvitError

T = TypeVar("T")

_RUN_BUTTONS: dict[RunAct, tuple[str, str]] = {
    "pause": ("Pause", "Pause run {run}? It finishes its open round, and opens no new one."),
    "unpause": ("End the pause", "Let run {run} open rounds again?"),
    "retry": ("Try again", "Let the service serve run {run} again?"),
    "cancel": ("Cancel this run", "Cancel run {run}? It cannot be resumed."),
}
"""Names and questions."""


class RunButtons:
    """The buttons of a run; only those that apply are shown."""

    def __init__(self, site: Site, run: str) -> None:
        def act_on(act: RunAct) -> Callable[[Record], str]:
            return lambda store: f"run {run}: {change_run(store, site.folder, run, act)}"

        with ui.element("div").classes("buttons"):
            self._buttons = {
                act: button(site, name, question.format(run=run), act_on(act))
                for act, (name, question) in _RUN_BUTTONS.items()
            }

    def show(self, site: Site, status: str, *, is_paused: bool) -> None:
        """Show the buttons that apply to a run with this status."""
        is_active = status in ("queued", "waiting", "running", "interrupted")
        shown: dict[RunAct, bool] = {
            "pause": is_active and not is_paused and site.may("pause"),
            "unpause": is_active and is_paused and site.may("pause"),
            "retry": status == "failed" and site.may("retry"),
            "cancel": is_active and site.may("cancel"),
        }
        for act, is_shown in shown.items():
            self._buttons[act].set_visibility(is_shown)


class DeviceButtons:
    """The buttons of a device; only those that apply are shown."""

    def __init__(self, site: Site, run: str | None, device: str) -> None:
        def end(store: Record) -> str:
            release(store, str(run), device)
            return f"{device}: released, its strikes are reset"

        def revoke(_: Record) -> str:
            assert site.deployment is not None
            return "; ".join(revoke_device(site.deployment, device))

        with ui.element("div").classes("buttons"):
            question = f"End the quarantine of {device} and reset its strikes?"
            self._release = button(site, "Release from quarantine", question, end)
            question = f"Revoke {device}? Its connection ends, and its certificate becomes invalid."
            self._revoke = button(site, "Revoke", question, revoke, role="admin")

    def show(self, site: Site, *, has_strikes: bool, may_connect: bool) -> None:
        """Show the buttons that apply; `may_connect`: it has a certificate that was not revoked."""
        self._release.set_visibility(has_strikes and site.may("release"))
        self._revoke.set_visibility(may_connect and site.deployment is not None and site.may("revoke"))


def label_field(site: Site, device: str) -> None:
    """Show operators a field for labels, and a button that sets them."""

    def set_them(store: Record) -> str:
        set_labels(store, [device], str(field.value or "").split())
        return f"{device}: labels {field.value}"

    with ui.element("div").classes("buttons"):
        field = ui.input("Labels, as in site=berlin board=rpi5").props("outlined dense").classes("search")
        button(site, "Set labels", f"Set these labels of {device} in all runs?", set_them)


def button(
    site: Site, name: str, question: str, act: Callable[[Record], str], *, role: UserRole = "operator"
) -> ui.button:
    """Show a button that asks first; the outcome is shown in the page, printed, and stands in the audit."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)

        async def do() -> None:
            dialog.close()
            try:
                done = await change(site, act, role)
            except FedvitError as error:
                ui.notify(str(error), type="negative", multi_line=True, timeout=0, close_button="Close")
            else:
                ui.notify(done, type="positive", close_button="Close")

        ui.button("Yes", on_click=do)
        ui.button("No", on_click=dialog.close).props("flat")
    return ui.button(name, on_click=dialog.open).props("outline")


async def change(
    site: Site, act: Callable[[Record], T], role: UserRole = "operator", describe: Callable[[T], str] = str
) -> T:
    """Change the record in the name of the page's user; return what `act` returns, and print it as `describe` says.

    Raises Forbidden if the user has a lower role, or the session has ended since the page was opened.
    """
    session, request = _session(), ui.context.client.request
    if not session.is_valid(site.credentials):
        raise Forbidden("FV1812", "your session has ended: sign in again")
    if not session.identity.may(role):
        raise Forbidden("FV1812", f"{session.identity.name} is {session.identity.role}: this needs the role {role}")
    address = request.client.host if request.client else ""
    with acting_as(Actor(session.identity.name, f"dashboard {address}")):
        done = await asyncio.to_thread(_with_store, site, act)
    site.reader.forget()
    click.echo(f"by the dashboard: {describe(done)}")
    return done


def _session() -> PageSession:
    session: PageSession = ui.context.client.request.scope[SESSION]
    return session


def _with_store(site: Site, act: Callable[[Record], T]) -> T:
    with open_record(site.folder, check=False) as store:
        return act(store)
