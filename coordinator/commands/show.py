"""`coordinator show`: shows one run, or writes its rounds to trackers."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from coordinator.commands.config_flags import flags_of
from coordinator.commands.flags import runs_flag
from coordinator.config import TrackersConfig, make_config, merge_flags
from coordinator.operations.opening import find_service, open_runs
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.record.record import Record
from coordinator.record.retention import lock_run
from coordinator.run_view import RunView, show_document
from coordinator.views.terminal import MOST_ROUNDS, draw_run
from coordinator.views.trackers.following import check_writers, make_writers, write_all
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import private_files
from fedvit.quantities import format_count
from profiles.report.console import Console


class WrittenRounds(Struct, frozen=True):
    """The rounds that a tracker lacked."""

    rounds: int
    where: str


@click.command(
    cls=Command,
    examples=[
        "coordinator show", "coordinator show RUN --json", "coordinator show RUN --track --trackers.writer tensorboard",
    ],
)  # fmt: skip
@click.argument("run", required=False)
@click.option(
    "--track",
    is_flag=True,
    help="Instead write the rounds that a tracker lacks; --trackers flags override the run's configuration.",
)
@flags_of(("trackers", TrackersConfig))
@runs_flag
@json_flag
def show(run: str | None, track: bool, folder: Path, as_json: bool, **flags: Any) -> None:
    """Print RUN, by default the newest: accuracy by round, devices, refusals."""
    track = track or any(value is not None for value in flags.values())
    if track:
        if find_service() is not None:
            raise ConfigError("FV1817", "--track works on this machine only: leave out --server")
        with open_existing_record(folder, writes=True) as store:
            written = write_missing(store, run or newest_run(store, folder), folder, flags, quiet=as_json)
        if as_json:
            print_json(written)
        return
    with open_runs(folder) as runs:
        view = runs.read(run, accuracy_of=None if as_json else MOST_ROUNDS)
    if as_json:
        print_json(show_document(view))
        return
    print_run(view)


def print_run(view: RunView) -> None:
    """Print the tables of one run."""
    console = Console()
    console.print(draw_run(view, console.width))


@private_files()
def write_missing(store: Record, run: str, folder: Path, flags: dict[str, Any], *, quiet: bool) -> list[WrittenRounds]:
    """Write the rounds that trackers lack, with a line for each tracker unless `quiet`."""
    config = make_config(store.runs.read(run).config, f"run {run}").run
    values = merge_flags({"trackers": msgspec.to_builtins(config.trackers)}, flags)
    config = msgspec.structs.replace(config, trackers=make_config(values, "flags").run.trackers)
    if not config.trackers.writers:
        raise ConfigError(
            "FV1016", f"run {run!r} has no writers of its own: name one, as in --trackers.writer tensorboard"
        )
    check_writers(config.trackers, "flags")
    written = list[WrittenRounds]()
    lock = lock_run(folder / run, run)  # otherwise the run's own process writes them
    for writer in make_writers(run, config, folder / run):
        try:
            rounds = write_all(writer, run, config, store)
        except Exception as error:
            raise StorageFailed("FV1016", f"cannot write to {writer.where}: {error}. {writer.remedy}") from error
        written.append(WrittenRounds(rounds, writer.where))
        if not quiet:
            click.echo(f"{format_count(rounds, 'round')} written to {writer.where}")
    os.close(lock)
    return written
