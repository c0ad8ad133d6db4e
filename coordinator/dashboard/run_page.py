"""The page of one run: progress, accuracy with its spread, bytes, energy, time, refusals, plans."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from nicegui import ui

from coordinator.dashboard import actions, charts
from coordinator.dashboard.frame import Chart, Part, Site, follow, page
from coordinator.record.store import RefusalCount, Store, TaskHistory
from coordinator.record.summary import RunSummary, summarise
from coordinator.run.status import Status, read_status
from fedvit.errors import ConfigError
from fedvit.resources import Budget

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
    paused: bool  # by the operator


def view(store: Store, run: str) -> RunView:
    summary = summarise(store, run, accuracy_of=0, refusals_of=0)
    newest = summary.rounds[-1].round if summary.rounds else 0
    return RunView(
        summary,
        store.refusal_counts(run, MOST_REASONS),
        plans(store.task_histories(run, [newest])),
        store.is_paused(run),
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


async def show(site: Site, run: str) -> None:
    with page(run, "/"):
        head = Part("run_head.html")
        if site.acts:
            with ui.element("div").classes("buttons"):
                actions.pause_buttons(site, run)
                actions.cancel_button(site, run)
        with ui.element("div").classes("figures"):
            accuracy = Chart("Accuracy by round: mean and range over devices. The table of rounds has the figures.")
            spread = Chart("Devices by the accuracy of their last evaluation")
            times = Chart("Seconds of each round: training, transfers and waiting, server")
            volume = Chart("Megabytes of each round, down and up")
            energy = Chart("Joules of each round, of the devices that measured it")
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
            )
            rounds = summary.rounds
            numbers = [float(entry.round) for entry in rounds]
            accuracy.show(
                charts.band(
                    numbers,
                    [entry.accuracy_mean for entry in rounds],
                    [entry.accuracy_lowest for entry in rounds],
                    [entry.accuracy_highest for entry in rounds],
                    x_name="round",
                    y_name="accuracy",
                )
            )
            known = [device.accuracy for device in summary.devices if device.accuracy is not None]
            spread.show(charts.histogram(known, x_name="accuracy of the last evaluation", y_name="devices"))
            times.show(
                charts.stacked(
                    numbers,
                    {
                        "training": [entry.train_s for entry in rounds],
                        "transfers and waiting": [
                            max(0.0, entry.devices_s - (entry.train_s or 0.0)) if entry.devices_s is not None else None
                            for entry in rounds
                        ],
                        "server": [entry.server_s for entry in rounds],
                    },
                    x_name="round",
                    y_name="s",
                )
            )
            volume.show(
                charts.stacked(
                    numbers,
                    {
                        "down": [entry.bytes_down / 1e6 for entry in rounds],
                        "up": [entry.bytes_up / 1e6 for entry in rounds],
                    },
                    x_name="round",
                    y_name="MB",
                )
            )
            energy.show(
                charts.lines(numbers, {"energy": [entry.energy_j for entry in rounds]}, x_name="round", y_name="J")
            )
            lowest = sorted(
                (device for device in summary.devices if device.accuracy is not None),
                key=lambda device: device.accuracy or 0.0,
            )
            body.show(
                run=summary,
                rounds=rounds[: -NEWEST_ROUNDS - 1 : -1],
                lowest=lowest[:LOWEST],
                refusals=seen.refusals,
                plans=seen.plans,
            )

        await follow(refresh)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
