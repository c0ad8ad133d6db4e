"""The page of one device: its history in a run."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.standings import Standing, standings
from coordinator.record.tables import DeviceRecord, RefusalRecord
from coordinator.record.tasks import TaskHistory
from coordinator.rounds.status import read_members
from coordinator.views.dashboard import actions, charts
from coordinator.views.dashboard.fleet_page import is_served
from coordinator.views.dashboard.frame import Figures, Part, Site, follow, page
from coordinator.views.dashboard.run_page import status_of
from fedvit.resources import ResourceUse

ROUNDS = 50
"""Rounds of one page of the history."""
REFUSALS = 50


class Entry(NamedTuple):
    """One round of the device."""

    task: TaskHistory
    accuracy: float | None

    @property
    def use(self) -> ResourceUse:
        """What the device measured; nothing where there is no result."""
        return self.task.use or ResourceUse()


class DeviceView(Struct, frozen=True):
    """What the page needs of the record."""

    status: str  # of the run
    record: DeviceRecord
    first: int  # round of the history
    last: int
    newest: int  # round of the run
    history: list[Entry]  # the newest round first
    refusals: list[RefusalRecord]  # the newest last
    standing: Standing | None


def view(store: Record, run: str, device: str, until: int | None) -> DeviceView:
    """The history ends with round `until`, by default the newest. Raises ConfigError if there is no such run."""
    status = store.runs.read(run).status
    newest = store.rounds.find_last(run)
    last = min(until or newest, newest)
    numbers = list(range(max(1, last - ROUNDS + 1), last + 1))
    accuracy = {
        entry.round: entry.metrics["correct"] / entry.samples
        for entry in store.tasks.read_evaluations(run, numbers, device)
        if entry.samples
    }
    tasks = store.tasks.read_histories(run, numbers, device)
    return DeviceView(
        status,
        store.devices.read(run, device),
        numbers[0] if numbers else 0,
        last,
        newest,
        [Entry(task, accuracy.get(task.round)) for task in reversed(tasks)],
        store.devices.read_refusals(run, REFUSALS, device=device),
        next((standing for standing in standings(store, run) if standing.device == device), None),
    )


def _by_round(name: str, unit: str, of: Callable[[Entry], float | None]) -> Callable[[DeviceView], charts.Options]:
    """A line of the rounds in which the device measured something."""

    def draw(seen: DeviceView) -> charts.Options:
        measured = _measured(seen)
        values = [of(entry) for entry in measured]
        return charts.lines(_numbers(measured), {name: values}, x_name="round", y_name=unit)

    return draw


def _memory(seen: DeviceView) -> charts.Options:
    measured = _measured(seen)
    budgets = [entry.task.expected.budget.memory_bytes if entry.task.expected else None for entry in measured]
    lines = {"peak": [charts.scaled(entry.use.peak_rss_bytes, 1e6) for entry in measured]}
    if any(budgets):
        lines["budget"] = [charts.scaled(budget, 1e6) for budget in budgets]
    return charts.lines(_numbers(measured), lines, x_name="round", y_name="MB")


def _measured(seen: DeviceView) -> list[Entry]:
    """The oldest round first."""
    return [entry for entry in reversed(seen.history) if entry.task.use is not None]


def _numbers(entries: list[Entry]) -> list[float]:
    return [float(entry.task.round) for entry in entries]


FIGURES = {
    "Megabytes of peak memory by round, beside the budget": _memory,
    "Milliseconds of a training step by round": _by_round(
        "step", "ms", lambda entry: charts.scaled(entry.use.step_s, 1e-3)
    ),
    "Degrees Celsius by round": _by_round("temperature", "°C", lambda entry: entry.use.temperature_c),
    "Accuracy on the device's own test images by round": _by_round(
        "accuracy", "accuracy", lambda entry: entry.accuracy
    ),
}


async def show(site: Site, run: str, device: str, until: int | None) -> None:
    with page(device, "/fleet"):
        head = Part("device_head.html")
        if site.acts:
            actions.device_buttons(site, run, device)
            actions.label_field(site, device)
        figures = Figures(FIGURES)
        body = Part("device_body.html")

        async def refresh() -> None:
            seen = await site.reader(view, run, device, until)
            member = next((member for member in read_members(site.folder / run) if member.device == device), None)
            revoked = device in await asyncio.to_thread(site.revoked)
            served = is_served(seen.status, status_of(site, run))
            head.show(run=run, device=device, seen=seen, member=member, served=served, revoked=revoked)
            figures.show(seen)
            body.show(run=run, device=device, seen=seen)

        await follow(refresh)
