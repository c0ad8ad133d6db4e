"""The page of one run: progress, accuracy with its spread, bytes, energy, time, refusals, plans."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from coordinator.compute.planning.forecast import BoardForecast, read_forecast
from coordinator.record.devices import RefusalCount
from coordinator.record.record import Record
from coordinator.record.tasks import TaskHistory
from coordinator.run_view import RunView, read_run
from coordinator.views.dashboard import actions, charts
from coordinator.views.dashboard.frame import Figures, Part, Site, anchor, describe_kind, find_status, follow, page
from coordinator.views.fleet import ROUNDS_TIMED, estimate_left_s
from coordinator.views.report.classes import class_sheet, make_confusion
from coordinator.views.report.document import ClassAccuracy, read_classes
from coordinator.views.report.words import sum_words
from fedvit.resources import Budget
from profiles.prediction import Expected
from profiles.report.tables import Column, Sheet, columns

NEWEST_ROUNDS = 20
"""Rounds that the table has; the charts have all."""
LOWEST = 10
"""Devices that are listed with the lowest accuracy."""
MOST_REASONS = 50
MOST_AWAITED = 20


class PlanGroup(NamedTuple):
    """Tasks of a round with equal plans."""

    changes: str
    budget: Budget
    tasks: list[TaskHistory]

    def find_median(self, read: Callable[[TaskHistory], float | None]) -> float | None:
        """Median over the tasks that have the figure."""
        values = [value for task in self.tasks if (value := read(task)) is not None]
        return median(values) if values else None


class RunDetails(Struct, frozen=True):
    """A run with its refusals, plans and classes."""

    run: RunView
    refusals: list[RefusalCount]
    plans: list[PlanGroup]
    classes: list[ClassAccuracy]  # of the newest evaluation
    is_paused: bool  # by the operator
    openings: list[str]  # of its newest rounds
    opened: int  # number of the newest round

    def estimate_left_s(self) -> float | None:
        """Estimate the seconds until the run ends; None: unknown."""
        return estimate_left_s(self.openings, self.run.rounds_planned - self.opened)


def read_details(store: Record, run: str) -> RunDetails:
    """Read what the page shows. Raises ConfigError if there is no such run."""
    view = read_run(store, run, accuracy_of=0, refusals_of=0)
    newest = view.rounds[-1].round if view.rounds else 0
    return RunDetails(
        view,
        store.devices.count_refusals(run, MOST_REASONS),
        group_plans(store.tasks.read_histories(run, [newest])),
        read_classes(store, view),
        store.runs.is_paused(run),
        store.rounds.list_openings(run, ROUNDS_TIMED),
        store.rounds.find_last(run),
    )


def group_plans(tasks: Iterable[TaskHistory]) -> list[PlanGroup]:
    """Group a round's tasks by their plans, the most frequent first."""
    plans: dict[tuple[str, Budget], PlanGroup] = {}
    for task in tasks:
        if task.expected is not None:
            key = (_describe_changes(task.expected), task.expected.budget)
            plans.setdefault(key, PlanGroup(*key, [])).tasks.append(task)
    return sorted(plans.values(), key=lambda plan: -len(plan.tasks))


def _describe_changes(expected: Expected) -> str:
    return ", ".join(f"{name} = {value}" for name, value in expected.changes.items()) or "as configured"


# --- charts ---------------------------------------------------------------------------------------------


def _accuracy(run: RunView) -> charts.Options | None:
    if all(entry.accuracy_mean is None for entry in run.rounds):
        return None
    return charts.band(
        _numbers(run),
        [entry.accuracy_mean for entry in run.rounds],
        [entry.accuracy_lowest for entry in run.rounds],
        [entry.accuracy_highest for entry in run.rounds],
        x_name="round",
        y_name="accuracy",
    )


def _loss(run: RunView) -> charts.Options | None:
    return _draw_lines(run, {"training loss": [entry.train_loss for entry in run.rounds]}, "loss")


def _spread(run: RunView) -> charts.Options | None:
    accuracies = [device.accuracy for device in run.devices if device.accuracy is not None]
    return charts.histogram(accuracies, x_name="accuracy", y_name="devices") if len(accuracies) > 1 else None


def _times(run: RunView) -> charts.Options | None:
    waiting = [
        max(0.0, entry.devices_s - (entry.train_s or 0.0)) if entry.devices_s is not None else None
        for entry in run.rounds
    ]
    parts = {
        "training": [entry.train_s for entry in run.rounds],
        "transfers and waiting": waiting,
        "server": [entry.server_s for entry in run.rounds],
    }
    unit_s, unit = charts.choose_time_unit(value for values in parts.values() for value in values)
    return _stack(run, {name: [charts.scale(value, unit_s) for value in parts[name]] for name in parts}, unit)


def _volume(run: RunView) -> charts.Options | None:
    parts = {
        "down": [entry.bytes_down / 1e6 or None for entry in run.rounds],
        "up": [entry.bytes_up / 1e6 or None for entry in run.rounds],
    }
    return _stack(run, parts, "MB")


def _energy(run: RunView) -> charts.Options | None:
    return _draw_lines(run, {"energy": [entry.energy_j for entry in run.rounds]}, "J")


def _draw_lines(run: RunView, named: Mapping[str, charts.Values], unit: str) -> charts.Options | None:
    if not charts.has_values(named):
        return None
    return charts.lines(_numbers(run), named, x_name="round", y_name=unit)


def _stack(run: RunView, named: Mapping[str, charts.Values], unit: str) -> charts.Options | None:
    if not charts.has_values(named):
        return None
    return charts.stack_bars(_numbers(run), named, x_name="round", y_name=unit)


def _numbers(run: RunView) -> list[float]:
    return [float(entry.round) for entry in run.rounds]


FIGURES = {
    "Accuracy: mean and range over devices": _accuracy,
    "Training loss": _loss,
    "Devices by accuracy": _spread,
    "Time of a round": _times,
    "Data sent in a round": _volume,
    "Energy of a round": _energy,
}
"""Charts by their titles; one without data is left out."""


# --- tables ---------------------------------------------------------------------------------------------


def _compare_figure(
    name: str, heading: str, predict: Callable[[Expected], float | None], measured: str | None = None
) -> tuple[Column, Column]:
    """Make two columns of a plan: medians over its tasks of the forecast, and of the devices' own figure."""

    def read_measured(task: TaskHistory) -> float | None:
        return getattr(task.use, measured or name) if task.use else None

    return (
        Column(name, f"{heading} predicted", lambda plan: plan.find_median(lambda task: predict(task.expected))),
        Column(name, "measured", lambda plan: plan.find_median(read_measured)),
    )


_PLAN_COLUMNS = [
    Column("changes", "options"),
    Column("devices", "devices", lambda plan: len(plan.tasks)),
    Column("memory_bytes", "memory budget", lambda plan: plan.budget.memory_bytes or "none"),
    *_compare_figure("peak_rss_bytes", "memory", lambda expected: expected.prediction.peak_rss_bytes),
    *_compare_figure("train_s", "training", lambda expected: expected.prediction.usual_train_s),
    *_compare_figure("bytes_up", "upload", lambda expected: expected.bytes_up, "upload_bytes"),
]
_AWAITED_COLUMNS = [
    Column("device", "device"),
    Column("state", "state", lambda one: f"{one.kind}, {one.state}"),
    Column("step", "step", lambda one: f"{one.done_steps} of {one.total_steps}"),
    Column("at", "since", lambda one: one.since),
    Column("at", "until", lambda one: one.until),
]
_REFUSAL_COLUMNS = [
    *columns({"times": "times", "devices": "devices"}),
    Column("kind", "of", describe_kind),
    *columns({"reason": "reason"}),
    Column("at", "newest", lambda entry: entry.newest),
]


def _round_sheet(run: RunView) -> Sheet:
    figures = {
        "accuracy_mean": "accuracy",
        "accuracy_std": "spread",
        "accuracy_lowest": "lowest",
        "accuracy_highest": "highest",
        "train_loss": "loss",
        "bytes_down": "down",
        "bytes_up": "up",
        "energy_j": "energy",
        "devices_s": "devices",
        "server_s": "server",
    }
    return Sheet(
        run.rounds[: -NEWEST_ROUNDS - 1 : -1],
        [
            Column("round", "round", lambda e: anchor("/round", f"round {e.round}", run=run.run, number=e.round)),
            Column("results", "results", lambda entry: f"{entry.accepted} of {entry.cohort}"),
            *columns(figures),
        ],
    )


def _lowest_sheet(run: RunView) -> Sheet:
    tested = [device for device in run.devices if device.accuracy is not None]
    name = Column("device", "device", lambda one: anchor("/device", one.device, run=run.run, device=one.device))
    figures = {"accuracy": "accuracy", "train_samples": "training images", "rounds": "rounds"}
    return Sheet(sorted(tested, key=lambda device: device.accuracy or 0.0)[:LOWEST], [name, *columns(figures)])


def _board_sheet(boards: Iterable[BoardForecast]) -> Sheet:
    """Make the table of boards; one that is refused has its reason in place of options."""

    def option(board: BoardForecast) -> str:
        if board.expected is None:
            return f"Refused. {board.refused}"
        return _describe_changes(board.expected)

    def read_plan(name: str, heading: str) -> Column:
        return Column(name, heading, lambda board: board.expected and getattr(board.expected, name))

    def read_prediction(name: str, heading: str) -> Column:
        return Column(name, heading, lambda board: board.expected and getattr(board.expected.prediction, name))

    return Sheet(
        boards,
        [
            Column("board", "board"),
            Column("what", "options", option),
            read_prediction("peak_rss_bytes", "memory"),
            Column("memory_bytes", "budget", lambda board: board.budget.memory_bytes or "none"),
            read_prediction("step_s", "step"),
            read_prediction("train_s", "training of a round"),
            read_prediction("usual_train_s", "of a later round"),
            read_plan("flops", "work of a round"),
            read_plan("bytes_down", "down"),
            read_plan("bytes_up", "up"),
            read_prediction("energy_j", "energy"),
            Column("quality", "quality", lambda board: board.expected and f"{100 * board.expected.quality:.0f} %"),
        ],
    )


async def show(site: Site, run: str) -> None:
    """Show the page."""
    with page(run, "/runs"):
        head = Part("run.html", "head")
        buttons = actions.RunButtons(site, run) if site.may("pause") or site.may("cancel") else None
        now = Part("run.html", "now")
        figures = Figures(FIGURES)
        body = Part("run.html", "body")

        async def refresh() -> None:
            seen = await site.reader(read_details, run)
            view, status = seen.run, find_status(site, run)
            live = view.status in ("running", "waiting") and status is not None and not status.is_stale()
            awaited = status.waiting_for if status and live else []
            forecast = None if view.rounds else read_forecast(site.folder / run)
            left_s = seen.estimate_left_s() if live and not seen.is_paused else None
            head.show(run=view, paused=seen.is_paused, status=status if live else None, left_s=left_s)
            if buttons:
                buttons.show(site, view.status, is_paused=seen.is_paused)
            now.show(
                run=view,
                states=Counter(task.state for task in awaited),
                awaited=Sheet(awaited[:MOST_AWAITED], _AWAITED_COLUMNS),
                forecast=forecast,
                boards=_board_sheet(forecast.boards if forecast else ()),
            )
            figures.show(view)
            body.show(
                run=view,
                rounds=_round_sheet(view),
                lowest=_lowest_sheet(view),
                classes=class_sheet(sorted(seen.classes, key=lambda entry: entry.accuracy)),
                confusion=make_confusion(seen.classes),
                refusals=Sheet(seen.refusals, _REFUSAL_COLUMNS),
                plans=Sheet(seen.plans, _PLAN_COLUMNS),
                sums=sum_words(view),
            )

        await follow(refresh)
