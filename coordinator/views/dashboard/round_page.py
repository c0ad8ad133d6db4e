"""The page of one round: its tasks on one scale of time, and what was refused."""

from datetime import datetime
from typing import NamedTuple

from markupsafe import Markup
from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.tables import RefusalRecord, RoundRecord
from coordinator.record.tasks import TaskHistory
from coordinator.run_view import natural_order
from coordinator.views.dashboard.frame import Part, Site, anchor, find_status, follow, page, refusal_sheet
from fedvit.errors import ConfigError
from profiles.report.tables import Column, Sheet, columns

MOST_TASKS = 1000
"""Tasks of one page, the slowest first."""
MOST_REFUSALS = 200


class RoundDetails(Struct, frozen=True):
    """Tasks and refusals of a round."""

    record: RoundRecord
    tasks: list[TaskHistory]
    refusals: list[RefusalRecord]  # the newest last
    newest: int  # round of the run


class Piece(NamedTuple):
    """A part of a bar, in percent of the scale; `colour` is a class of the style sheet."""

    colour: str
    left: float
    width: float


class TaskBar(NamedTuple):
    """A task on the scale of its round."""

    task: TaskHistory
    state: str  # its end; of a task under way, what its device does
    pieces: list[Piece]
    fetching_s: float | None  # from the question to each of these; None: not recorded
    arrived_s: float | None
    took_s: float | None  # to its end


COLOURS = {"waiting": "c7", "fetching": "c4", "training": "c0", "upload": "c1", "offline": "c5"}
"""Colours of the pieces of a bar: the first four in their order, and the device's absence in place of them."""


def read_details(store: Record, run: str, number: int) -> RoundDetails:
    """Raises ConfigError if there is no such run or round."""
    store.runs.read(run)
    record = store.rounds.read(run, number) if 0 < number < 2**31 else None
    if record is None:
        raise ConfigError("FV1806", f"run {run!r} has no round {number}")
    return RoundDetails(
        record,
        store.tasks.read_histories(run, [number]),
        store.devices.read_refusals(run, MOST_REFUSALS, round_number=number),
        store.rounds.find_last(run),
    )


def bars(record: RoundRecord, tasks: list[TaskHistory], states: dict[str, str]) -> tuple[float, list[TaskBar]]:
    """Return the length of the scale in seconds, and the tasks on it: those under way first, then the slowest."""
    begin = min(_seconds(record.opened_at), *(_seconds(task.asked_at) for task in tasks)) if tasks else 0.0
    times = [at for task in tasks for at in (task.asked_at, task.received_at, task.times.ended_at) if at]
    ends = [_seconds(at) for at in (*times, *([record.closed_at] if record.closed_at else []))]
    scale = max([end - begin for end in ends], default=0.0) or 1.0
    drawn = [_bar(task, states, begin, scale) for task in tasks]
    drawn.sort(key=lambda bar: (bar.took_s is not None, -(bar.took_s or 0.0), natural_order(bar.task.device)))
    return scale, drawn


def _bar(task: TaskHistory, states: dict[str, str], begin: float, scale: float) -> TaskBar:
    """Return the bar of a task. The training ends when the result arrives, and has the length that the device
    measured; nothing is drawn below the time in which the device was offline."""

    def after_s(at: str | None) -> float | None:
        return None if at is None else max(0.0, _seconds(at) - asked)

    asked, times = _seconds(task.asked_at), task.times
    took_s = after_s(task.received_at or times.ended_at)
    end = max(0.0, scale - (asked - begin)) if took_s is None else took_s
    fetching_s, working_s, arrived_s = map(after_s, (times.fetching_at, times.working_at, times.arrived_at))
    arrived = end if arrived_s is None else min(end, arrived_s)
    if task.use and task.use.train_s is not None:
        training = max(0.0, arrived - task.use.train_s)
    else:
        training = arrived if working_s is None else min(arrived, working_s)
    fetching = training if fetching_s is None else min(training, fetching_s)
    left = end if times.left_at is None else min(end, max(0.0, _seconds(times.left_at) - asked))
    back = end if times.returned_at is None else min(end, max(left, _seconds(times.returned_at) - asked))
    places = (0.0, fetching, training, arrived, end)
    spans = [
        span
        for colour, start, stop in zip(COLOURS.values(), places, places[1:], strict=False)
        for span in ((colour, start, min(stop, left)), (colour, max(start, back), stop))
    ]
    pieces = [
        Piece(colour, 100 * (asked - begin + start) / scale, 100 * (stop - start) / scale)
        for colour, start, stop in (*spans, (COLOURS["offline"], left, back))
        if stop > start
    ]
    late = task.used_in is not None and task.used_in != task.round
    state = f"late, used in round {task.used_in}" if late else task.outcome or states.get(task.device, "under way")
    return TaskBar(task, state, pieces, fetching_s, arrived_s, took_s)


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _draw_pieces(bar: TaskBar) -> Markup:
    piece = Markup('<i class="{}{}" style="left: {:.2f}%; width: {:.2f}%"></i>')
    hatched = " hatched" if bar.took_s is None else ""
    pieces = Markup("").join(piece.format(colour, hatched, left, width) for colour, left, width in bar.pieces)
    return Markup('<div class="timeline" aria-hidden="true">{}</div>').format(pieces)


def _bar_sheet(bars: list[TaskBar], run: str) -> Sheet:
    return Sheet(
        bars,
        [
            Column("device", "device", lambda bar: anchor("/device", bar.task.device, run=run, device=bar.task.device)),
            Column("state", "state"),
            Column("pieces", "from the round's begin", _draw_pieces),
            Column("asked_at", "asked, UTC", lambda bar: bar.task.asked_at),
            Column("fetching_s", "fetching after"),
            Column("train_s", "trained", lambda bar: bar.task.use.train_s if bar.task.use else None),
            *columns({"arrived_s": "result after", "took_s": "ended after"}),
        ],
    )


async def show(site: Site, run: str, number: int) -> None:
    """Show the page."""
    with page(f"{run}, round {number}", "/runs"):
        part = Part("round.html", "body")

        async def refresh() -> None:
            seen, status = await site.reader(read_details, run, number), find_status(site, run)
            awaited = status.waiting_for if status and not status.is_stale() else []
            states = {one.device: one.state for one in awaited if one.round == number}
            scale, drawn = bars(seen.record, seen.tasks, states)
            part.show(
                run=run,
                number=number,
                seen=seen,
                scale=scale,
                bars=_bar_sheet(drawn[:MOST_TASKS], run),
                all=len(drawn),
                colours=COLOURS,
                refusals=refusal_sheet(seen.refusals, run),
            )

        await follow(refresh)
