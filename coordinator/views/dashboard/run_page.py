"""The page of one run: progress, accuracy with its spread, bytes, energy, time, refusals, plans."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from nicegui import ui

from coordinator.compute.planning.forecast import read_forecast
from coordinator.record.devices import RefusalCount
from coordinator.record.record import Record
from coordinator.record.reporting import class_accuracies
from coordinator.record.summary import RunSummary, summarise
from coordinator.record.tasks import TaskHistory
from coordinator.rounds.status import Status, read_status
from coordinator.views.dashboard import actions, charts
from coordinator.views.dashboard.frame import Figures, Part, Site, follow, page
from fedvit.errors import ConfigError
from fedvit.resources import Budget
from profiles.report.confusion import confusion
from profiles.report.document import ClassAccuracy

NEWEST_ROUNDS = 20
"""Rounds that the table has; the charts have all."""
LOWEST = 10
"""Devices that are listed with the lowest accuracy."""
MOST_REASONS = 50
MOST_AWAITED = 20


class Plan(NamedTuple):
    """Devices of a round with equal plans, predicted beside measured; medians over these devices."""

    changes: str
    budget: Budget
    devices: int
    peak_rss_bytes: tuple[float | None, float | None]  # predicted, measured
    train_s: tuple[float | None, float | None]
    bytes_up: tuple[float | None, float | None]


class RunView(Struct, frozen=True):
    """What the page needs of the record."""

    summary: RunSummary
    refusals: list[RefusalCount]
    plans: list[Plan]
    classes: list[ClassAccuracy]  # of the newest evaluation
    paused: bool  # by the operator


def view(store: Record, run: str) -> RunView:
    summary = summarise(store, run, accuracy_of=0, refusals_of=0)
    newest = summary.rounds[-1].round if summary.rounds else 0
    return RunView(
        summary,
        store.devices.count_refusals(run, MOST_REASONS),
        plans(store.tasks.read_histories(run, [newest])),
        class_accuracies(store, summary),
        store.runs.is_paused(run),
    )


def plans(tasks: Iterable[TaskHistory]) -> list[Plan]:
    """The plans of a round's tasks, the most frequent first."""
    alike: dict[tuple[str, Budget], list[TaskHistory]] = {}
    for task in tasks:
        if task.expected is not None:
            changes = ", ".join(f"{name} = {value}" for name, value in task.expected.changes.items())
            alike.setdefault((changes, task.expected.budget), []).append(task)
    found = []
    for (changes, budget), of in sorted(alike.items(), key=lambda entry: -len(entry[1])):
        predicted = [task.expected for task in of if task.expected is not None]
        measured = [task.use for task in of if task.use is not None]
        found.append(
            Plan(
                changes or "as configured",
                budget,
                len(of),
                (_median(e.prediction.peak_rss_bytes for e in predicted), _median(m.peak_rss_bytes for m in measured)),
                (_median(e.prediction.train_s for e in predicted), _median(m.train_s for m in measured)),
                (_median(e.bytes_up for e in predicted), _median(m.upload_bytes for m in measured)),
            )
        )
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def status_of(site: Site, run: str) -> Status | None:
    """What the run's coordinator is doing; None if none has served it, or its file cannot be read."""
    try:
        return read_status(site.folder / run)
    except ConfigError:
        return None


# --- charts ---------------------------------------------------------------------------------------------


def _accuracy(run: RunSummary) -> charts.Options:
    return charts.band(
        _numbers(run),
        [entry.accuracy_mean for entry in run.rounds],
        [entry.accuracy_lowest for entry in run.rounds],
        [entry.accuracy_highest for entry in run.rounds],
        x_name="round",
        y_name="accuracy",
    )


def _spread(run: RunSummary) -> charts.Options:
    known = [device.accuracy for device in run.devices if device.accuracy is not None]
    return charts.histogram(known, x_name="accuracy of the last evaluation", y_name="devices")


def _times(run: RunSummary) -> charts.Options:
    waiting = [
        max(0.0, entry.devices_s - (entry.train_s or 0.0)) if entry.devices_s is not None else None
        for entry in run.rounds
    ]
    parts = {
        "training": [entry.train_s for entry in run.rounds],
        "transfers and waiting": waiting,
        "server": [entry.server_s for entry in run.rounds],
    }
    return charts.stacked(_numbers(run), parts, x_name="round", y_name="s")


def _volume(run: RunSummary) -> charts.Options:
    parts = {
        "down": [entry.bytes_down / 1e6 for entry in run.rounds],
        "up": [entry.bytes_up / 1e6 for entry in run.rounds],
    }
    return charts.stacked(_numbers(run), parts, x_name="round", y_name="MB")


def _energy(run: RunSummary) -> charts.Options:
    return charts.lines(_numbers(run), {"energy": [entry.energy_j for entry in run.rounds]}, x_name="round", y_name="J")


def _numbers(run: RunSummary) -> list[float]:
    return [float(entry.round) for entry in run.rounds]


FIGURES = {
    "Accuracy by round: mean and range over devices. The table of rounds has the figures.": _accuracy,
    "Devices by the accuracy of their last evaluation": _spread,
    "Seconds of each round: training, transfers and waiting, server": _times,
    "Megabytes of each round, down and up": _volume,
    "Joules of each round, of the devices that measured it": _energy,
}


async def show(site: Site, run: str) -> None:
    with page(run, "/"):
        head = Part("run_head.html")
        if site.acts:
            with ui.element("div").classes("buttons"):
                actions.pause_buttons(site, run)
                actions.cancel_button(site, run)
        figures = Figures(FIGURES)
        body = Part("run_body.html")

        async def refresh() -> None:
            seen = await site.reader(view, run)
            summary, status = seen.summary, status_of(site, run)
            live = summary.status in ("running", "waiting")
            awaited = status.waiting_for if status and live and not status.is_stale() else []
            head.show(
                run=summary,
                paused=seen.paused,
                status=status if live else None,
                states=Counter(task.state for task in awaited),
                awaited=awaited[:MOST_AWAITED],
                energy_j=_sum(entry.energy_j for entry in summary.rounds),
                forecast=None if summary.rounds else read_forecast(site.folder / run),
            )
            figures.show(summary)
            lowest = sorted(
                (device for device in summary.devices if device.accuracy is not None),
                key=lambda device: device.accuracy or 0.0,
            )
            body.show(
                run=summary,
                rounds=summary.rounds[: -NEWEST_ROUNDS - 1 : -1],
                lowest=lowest[:LOWEST],
                classes=sorted(seen.classes, key=lambda entry: entry.accuracy),
                confusion=confusion(seen.classes),
                refusals=seen.refusals,
                plans=seen.plans,
            )

        await follow(refresh)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
