"""The page of one round: its tasks on one scale of time, and what was refused."""

from datetime import datetime
from typing import NamedTuple

from msgspec import Struct

from coordinator.dashboard.frame import Part, Site, follow, page
from coordinator.dashboard.run_page import status_of
from coordinator.record.store import Store, TaskHistory
from coordinator.record.tables import RefusalRecord, RoundRecord
from fedvit.errors import ConfigError

MOST_TASKS = 1000
"""Tasks of one page, the slowest first."""
MOST_REFUSALS = 200


class RoundView(Struct, frozen=True):
    """What the page needs of the record."""

    record: RoundRecord
    tasks: list[TaskHistory]
    refusals: list[RefusalRecord]  # the newest last
    newest: int  # round of the run


class Bar(NamedTuple):
    """A task on the scale of its round; places are percent of the scale."""

    task: TaskHistory
    state: str  # its end; of a task under way, what its device does
    left: float
    transfers: float  # width; transfers, and waiting for its turn
    training: float  # width
    took_s: float | None  # until its result was accepted


def view(store: Store, run: str, number: int) -> RoundView:
    """Raises ConfigError if there is no such run or round."""
    store.run(run)
    record = store.round(run, number)
    if record is None:
        raise ConfigError(f"run {run!r} has no round {number}")
    return RoundView(
        record,
        store.task_histories(run, [number]),
        store.refusals(run, MOST_REFUSALS, round_number=number),
        store.last_round(run),
    )


def bars(record: RoundRecord, tasks: list[TaskHistory], states: dict[str, str]) -> tuple[float, list[Bar]]:
    """The length of the scale in seconds, and the tasks on it: those under way first, then the slowest.

    The training lies at the end of a bar, since the record has its length, and not its beginning.
    """
    begin = min(_seconds(record.opened_at), *(_seconds(task.asked_at) for task in tasks)) if tasks else 0.0
    ends = [_seconds(at) for task in tasks if (at := task.received_at)]
    ends += [_seconds(task.asked_at) for task in tasks]
    if record.closed_at:
        ends.append(_seconds(record.closed_at))
    scale = max([end - begin for end in ends], default=0.0) or 1.0
    made = []
    for task in tasks:
        asked = _seconds(task.asked_at)
        took_s = max(0.0, _seconds(task.received_at) - asked) if task.received_at else None
        until = took_s if took_s is not None else max(0.0, scale - (asked - begin))
        training = min(until, (task.use.train_s or 0.0) if task.use else 0.0)
        late = task.used_in is not None and task.used_in != task.round
        state = f"late, used in round {task.used_in}" if late else task.outcome or states.get(task.device, "under way")
        made.append(
            Bar(
                task,
                state,
                100 * (asked - begin) / scale,
                100 * (until - training) / scale,
                100 * training / scale,
                took_s,
            )
        )
    made.sort(key=lambda bar: (bar.took_s is not None, -(bar.took_s or 0.0), bar.task.device))
    return scale, made


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


async def show(site: Site, run: str, number: int) -> None:
    with page(f"{run}, round {number}", "/"):
        part = Part("round.html")

        async def refresh() -> None:
            seen, status = await site.reader(view, run, number), status_of(site, run)
            states = {one.device: one.state for one in status.waiting_for if one.round == number} if status else {}
            scale, made = bars(seen.record, seen.tasks, states)
            part.show(run=run, number=number, seen=seen, scale=scale, bars=made[:MOST_TASKS], all=len(made))

        await follow(refresh)
