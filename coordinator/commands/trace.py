"""`coordinator trace`: shows the time line of a task, or of all tasks of a round."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_existing_record
from coordinator.views.trace import RoundTrace, TaskTrace, TraceStep, read_trace
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.task_names import KINDS
from fedvit.terminal import escape_line
from fedvit.wire.topics import is_name


@click.command(
    cls=Command,
    examples=[
        "coordinator trace RUN.3",
        "coordinator trace RUN.3.pi-1 --log pi-1.log",
        "coordinator trace RUN.3.pi-1.train.1 --json",
    ],
)
@click.argument("task", metavar="RUN.ROUND[.DEVICE[.KIND[.ATTEMPT]]]")
@runs_flag
@click.option(
    "--log",
    "logs",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Log of a device in JSON, whose lines are put among those of the coordinator. Repeatable.",
)
@json_flag
def trace(task: str, folder: Path, logs: tuple[Path, ...], as_json: bool) -> None:
    """Print what happened to a task, or to all tasks of a round, and how long each step took.

    Steps come from the record and from the coordinator's log, if that is in JSON (--log-format json).
    """
    run, number, device, kind, attempt = parse_selection(task)
    with open_existing_record(folder) as store:
        found = read_trace(store, folder / run, run, number, device=device, logs=logs)
    tasks = [one for one in found.tasks if kind in (None, one.kind) and attempt in (None, one.attempt)]
    found = msgspec.structs.replace(found, tasks=tasks)
    if as_json:
        print_json(found)
        return
    if device is not None and not tasks:
        raise ConfigError("FV1629", f"nothing is known of task {task!r}: {device} was not asked in round {number}")
    lines = draw_round(found) if device is None else [line for one in tasks for line in draw_task(one)]
    for line in lines:
        click.echo(escape_line(line))
    if not found.has_log:
        click.echo("from the record alone: with --log-format json the coordinator logs attempts and evaluations, too")


def parse_selection(text: str) -> tuple[str, int, str | None, str | None, int | None]:
    """Read run, round, device, kind and attempt of an argument. Raises ConfigError.

    >>> parse_selection("first.3.pi-1.train")
    ('first', 3, 'pi-1', 'train', None)
    """
    run, number, device, kind, attempt = (*text.split("."), *[""] * 5)[:5]
    valid = is_name(run) and _is_number(number) and (not device or is_name(device)) and kind in ("", *KINDS)
    if not valid or text.count(".") > 4 or (attempt and not _is_number(attempt)):
        raise ConfigError("FV1629", f"{text!r}: expected RUN.ROUND or RUN.ROUND.DEVICE.KIND.ATTEMPT, as in logs")
    return run, int(number), device or None, kind or None, int(attempt) if attempt else None


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def draw_round(found: RoundTrace) -> Iterator[str]:
    """Draw a table with a line for each task."""
    closed = f"closed at {_clock(found.closed_at)}" if found.closed_at else "open"
    yield f"run {found.run}, round {found.round}: opened at {_clock(found.opened_at)}, {closed}"
    heads = ("task", "outcome", "asked at", "fetch", "work", "accept", "all", "reason")
    rows = [heads, *(_make_row(task) for task in found.tasks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def _make_row(task: TaskTrace) -> tuple[str, ...]:
    name = f"{task.device} {task.kind} {task.attempt or ''}".rstrip()
    times = (_seconds(value) for value in (task.fetch_s, task.work_s, task.accept_s, task.total_s))
    asked = _clock(task.asked_at) if task.asked_at else ""
    return name, task.outcome or "under way", asked, *times, task.reason or ""


def draw_task(task: TaskTrace) -> Iterator[str]:
    """Draw a line for each step of a task, and what the device measured."""
    yield f"{task.task}: {task.outcome or 'under way'}{f' ({task.reason})' if task.reason else ''}"
    for step in task.steps:
        yield f"  {_draw_step(step)}"
    measured = {"fetched for": task.fetch_s, "worked for": task.work_s}
    if parts := [f"{what} {_seconds(value)}" for what, value in measured.items() if value is not None]:
        yield f"  on the device: {', '.join(parts)}"


def _draw_step(step: TraceStep) -> str:
    details = " ".join(f"{name}={value}" for name, value in step.details.items())
    after = "" if step.seconds is None else f"+{step.seconds:.3f} s"
    return f"{_clock(step.at)}  {after:>12}  {step.source:<11}  {step.event}  {details}".rstrip()


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _clock(at: str) -> str:
    """Return the time of day in the reader's time zone."""
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
