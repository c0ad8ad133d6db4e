"""The page of one device: its history in a run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.tables import RefusalRecord
from coordinator.record.tasks import TaskHistory
from coordinator.rounds.status import read_members
from coordinator.run_view import DeviceView, Standing, read_standings, view_device
from coordinator.security.registry import JoinedDevice
from coordinator.views.dashboard import actions, charts
from coordinator.views.dashboard.devices_page import is_served
from coordinator.views.dashboard.frame import Figures, Part, Site, anchor, find_status, follow, page, refusal_sheet
from coordinator.views.service_facts import count_days, show_date
from fedvit.resources import ResourceUse
from profiles.report.tables import Column, Sheet

ROUNDS = 50
"""Rounds of one page of the history."""
REFUSALS = 50


class HistoryEntry(NamedTuple):
    """One round of the device."""

    task: TaskHistory
    accuracy: float | None

    @property
    def use(self) -> ResourceUse:
        """Figures that the device measured; nothing without a result."""
        return self.task.use or ResourceUse()


class DeviceDetails(Struct, frozen=True):
    """A device's figures, and its rounds up to one."""

    status: str  # of the run
    device: DeviceView
    times_asked: int
    first: int  # round of the history
    last: int
    newest: int  # round of the run
    history: list[HistoryEntry]  # the newest round first
    refusals: list[RefusalRecord]  # the newest last
    standing: Standing | None


def read_details(store: Record, run: str, device: str, until: int | None) -> DeviceDetails:
    """Read what the page shows; the history ends with round `until`, by default the newest.

    Raises ConfigError if there is no such run."""
    status = store.runs.read(run).status
    newest = store.rounds.find_last(run)
    last = min(until or newest, newest)
    numbers = list(range(max(1, last - ROUNDS + 1), last + 1))
    accuracy = {
        entry.round: entry.metrics["correct"] / entry.samples
        for entry in store.tasks.read_evaluations(run, numbers, device)
        if entry.samples
    }
    tasks, record = store.tasks.read_histories(run, numbers, device), store.devices.read(run, device)
    return DeviceDetails(
        status,
        view_device(device, record.totals),
        record.times_asked,
        numbers[0] if numbers else 0,
        last,
        newest,
        [HistoryEntry(task, accuracy.get(task.round)) for task in reversed(tasks)],
        store.devices.read_refusals(run, REFUSALS, device=device),
        next((standing for standing in read_standings(store, run) if standing.device == device), None),
    )


def _by_round(
    name: str, unit: str, of: Callable[[HistoryEntry], float | None]
) -> Callable[[DeviceDetails], charts.Options | None]:
    """A line of the rounds in which the device measured something."""

    def draw(seen: DeviceDetails) -> charts.Options | None:
        measured = _list_measured(seen)
        values = [of(entry) for entry in measured]
        if not charts.has_values({name: values}):
            return None
        return charts.lines(_numbers(measured), {name: values}, x_name="round", y_name=unit)

    return draw


def _memory(seen: DeviceDetails) -> charts.Options | None:
    measured = _list_measured(seen)
    budgets = [entry.task.expected.budget.memory_bytes if entry.task.expected else None for entry in measured]
    lines = {"peak": [charts.scale(entry.use.peak_rss_bytes, 1e6) for entry in measured]}
    if not charts.has_values(lines):
        return None
    if any(budgets):
        lines["budget"] = [charts.scale(budget, 1e6) for budget in budgets]
    return charts.lines(_numbers(measured), lines, x_name="round", y_name="MB")


def _list_measured(seen: DeviceDetails) -> list[HistoryEntry]:
    """The oldest round first."""
    return [entry for entry in reversed(seen.history) if entry.task.use is not None]


def _numbers(entries: list[HistoryEntry]) -> list[float]:
    return [float(entry.task.round) for entry in entries]


FIGURES = {
    "Accuracy on the device's own test images": _by_round("accuracy", "accuracy", lambda entry: entry.accuracy),
    "Peak memory and budget": _memory,
    "Training step": _by_round("step", "ms", lambda entry: charts.scale(entry.use.step_s, 1e-3)),
    "Temperature": _by_round("temperature", "°C", lambda entry: entry.use.temperature_c),
}
"""Charts by their titles; one without data is left out."""


def _history_sheet(history: list[HistoryEntry], run: str) -> Sheet:
    def read_use(name: str, heading: str) -> Column:
        return Column(name, heading, lambda entry: getattr(entry.use, name))

    def outcome(entry: HistoryEntry) -> str:
        attempt = f", attempt {entry.task.attempt}" if entry.task.attempt > 1 else ""
        return f"{entry.task.outcome or 'under way'}{attempt}"

    def budget_bytes(entry: HistoryEntry) -> int | None:
        return entry.task.expected.budget.memory_bytes if entry.task.expected else None

    return Sheet(
        history,
        [
            Column("round", "round", lambda e: anchor("/round", f"round {e.task.round}", run=run, number=e.task.round)),
            Column("outcome", "outcome", outcome),
            Column("accuracy", "accuracy"),
            Column("asked_at", "asked, UTC", lambda entry: entry.task.asked_at),
            Column("received_at", "result, UTC", lambda entry: entry.task.received_at),
            read_use("train_s", "training"),
            read_use("step_s", "step"),
            read_use("peak_rss_bytes", "peak memory"),
            Column("budget_bytes", "budget", budget_bytes),
            read_use("temperature_c", "temperature"),
            read_use("throttled", "throttled"),
            read_use("energy_j", "energy"),
            read_use("upload_bytes", "upload"),
        ],
    )


def describe_certificate(device: JoinedDevice) -> str:
    """Describe the newest certificate of a device in a sentence."""
    if device.revoked_at is not None:
        return f"Its certificate was revoked on {show_date(device.revoked_at)}."
    days = count_days(device.expires_at)
    return f"Its certificate {'ends' if days >= 0 else 'ended'} on {show_date(device.expires_at)}."


def find_newest_run(store: Record, device: str) -> str | None:
    """Find the newest run in which a device took part; None if there is none."""
    return store.devices.find_newest_run(device)


async def show(site: Site, run: str | None, device: str, until: int | None) -> None:
    """Show the page; without a `run` it is the newest in which the device took part."""
    with page(device, "/devices"):
        run = run if run is not None else await site.reader(find_newest_run, device)
        head = Part("device.html", "head" if run else "idle_head")
        may_act = site.may("release") or site.may("revoke")
        buttons = actions.DeviceButtons(site, run, device) if may_act else None
        if site.may("label"):
            actions.label_field(site, device)
        show_run = _make_run_parts(site, run, device, until, head) if run else None

        async def refresh() -> None:
            joined = (await asyncio.to_thread(site.read_joined)).get(device)
            certificate = describe_certificate(joined) if joined else None
            has_strikes = False
            if show_run:
                has_strikes = await show_run(certificate)
            else:
                head.show(device=device, certificate=certificate)
            if buttons:
                may_connect = joined is not None and joined.revoked_at is None
                buttons.show(site, has_strikes=has_strikes, may_connect=may_connect)

        await follow(refresh)


def _make_run_parts(
    site: Site, run: str, device: str, until: int | None, head: Part
) -> Callable[[str | None], Awaitable[bool]]:
    """Make the parts about a run; return a function that fills them, and returns whether the device has strikes."""
    figures, body = Figures(FIGURES), Part("device.html", "body")

    async def show_run(certificate: str | None) -> bool:
        seen = await site.reader(read_details, run, device, until)
        member = next((member for member in read_members(site.folder / run) if member.device == device), None)
        served = is_served(seen.status, find_status(site, run))
        head.show(run=run, device=device, seen=seen, member=member, served=served, certificate=certificate)
        figures.show(seen)
        history = _history_sheet(seen.history, run)
        body.show(run=run, device=device, seen=seen, history=history, refusals=refusal_sheet(seen.refusals))
        return bool(seen.standing and (seen.standing.strikes or seen.standing.quarantine))

    return show_run
