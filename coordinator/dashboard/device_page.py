"""The page of one device: its history in a run."""

import asyncio
from typing import NamedTuple

from msgspec import Struct
from nicegui import ui

from coordinator.dashboard import actions, charts
from coordinator.dashboard.frame import Chart, Part, Site, follow, page
from coordinator.record.standings import Standing, standings
from coordinator.record.store import Store, TaskHistory
from coordinator.record.tables import DeviceRecord, RefusalRecord
from coordinator.run.status import Member, read_members

ROUNDS = 50
"""Rounds of one page of the history."""
REFUSALS = 50


class Entry(NamedTuple):
    """One round of the device."""

    task: TaskHistory
    accuracy: float | None


class DeviceView(Struct, frozen=True):
    """What the page needs of the record."""

    record: DeviceRecord
    first: int  # round of the history
    last: int
    newest: int  # round of the run
    history: list[Entry]  # the newest round first
    refusals: list[RefusalRecord]  # the newest last
    standing: Standing | None


def view(store: Store, run: str, device: str, until: int | None) -> DeviceView:
    """The history ends with round `until`, by default the newest. Raises ConfigError if there is no such run."""
    store.run(run)
    newest = store.last_round(run)
    last = min(until or newest, newest)
    numbers = list(range(max(1, last - ROUNDS + 1), last + 1))
    accuracy = {
        entry.round: entry.metrics["correct"] / entry.samples
        for entry in store.evaluations(run, numbers, device)
        if entry.samples
    }
    tasks = store.task_histories(run, numbers, device)
    return DeviceView(
        store.device(run, device),
        numbers[0] if numbers else 0,
        last,
        newest,
        [Entry(task, accuracy.get(task.round)) for task in reversed(tasks)],
        store.refusals(run, REFUSALS, device=device),
        next((standing for standing in standings(store, run) if standing.device == device), None),
    )


async def show(site: Site, run: str, device: str, until: int | None) -> None:
    with page(device, "/fleet"):
        head = Part("device_head.html")
        if site.acts:
            actions.device_buttons(site, run, device)
            actions.label_field(site, device)
        with ui.element("div").classes("figures"):
            memory = Chart("Megabytes of peak memory by round, beside the budget")
            step = Chart("Milliseconds of a training step by round")
            heat = Chart("Degrees Celsius by round")
            accuracy = Chart("Accuracy on the device's own test images by round")
        body = Part("device_body.html")

        async def refresh() -> None:
            seen = await site.reader(view, run, device, until)
            member = _member(read_members(site.folder / run), device)
            revoked = device in await asyncio.to_thread(site.revoked)
            head.show(run=run, device=device, seen=seen, member=member, revoked=revoked)
            rounds = [(entry, entry.task.use) for entry in reversed(seen.history) if entry.task.use is not None]
            numbers = [float(entry.task.round) for entry, _ in rounds]
            budgets = [entry.task.expected.budget.memory_bytes if entry.task.expected else None for entry, _ in rounds]
            lines = {"peak": [charts.scaled(use.peak_rss_bytes, 1e6) for _, use in rounds]}
            if any(budgets):
                lines["budget"] = [charts.scaled(budget, 1e6) for budget in budgets]
            memory.show(charts.lines(numbers, lines, x_name="round", y_name="MB"))
            steps = [charts.scaled(use.step_s, 1e-3) for _, use in rounds]
            step.show(charts.lines(numbers, {"step": steps}, x_name="round", y_name="ms"))
            degrees = [use.temperature_c for _, use in rounds]
            heat.show(charts.lines(numbers, {"temperature": degrees}, x_name="round", y_name="°C"))
            known = [entry.accuracy for entry, _ in rounds]
            accuracy.show(charts.lines(numbers, {"accuracy": known}, x_name="round", y_name="accuracy"))
            body.show(run=run, device=device, seen=seen)

        await follow(refresh)


def _member(members: list[Member], device: str) -> Member | None:
    return next((member for member in members if member.device == device), None)
