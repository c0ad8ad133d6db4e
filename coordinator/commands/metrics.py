"""`coordinator metrics`: writes the figures of a run to other tools."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import flags_of, merge_flags
from coordinator.commands.flags import existing_store, runs_flag
from coordinator.config import MetricsConfig, make_config
from coordinator.record.retention import lock_run
from coordinator.views.trackers.following import write_all
from coordinator.views.trackers.writers import check_writers, make_writers
from fedvit.command_line import Command
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import private_files
from fedvit.quantities import counted


@click.command(cls=Command, examples=["coordinator metrics RUN --metrics.writer tensorboard"])
@click.argument("run")
@runs_flag
@flags_of(("metrics", MetricsConfig))
@private_files()
def metrics(run: str, folder: Path, **flags: Any) -> None:
    """Write the rounds of RUN that a writer lacks; flags override the writers of its configuration."""

    store = existing_store(folder, writes=True)
    try:
        config = make_config(store.runs.read(run).config, f"run {run}").run
        values = merge_flags({"metrics": msgspec.to_builtins(config.metrics)}, flags)
        config = msgspec.structs.replace(config, metrics=make_config(values, "flags").run.metrics)
        if not config.metrics.writers:
            raise ConfigError(f"run {run!r} has no writers of its own: name one, as in --metrics.writer tensorboard")
        check_writers(config.metrics, "flags")
        lock = lock_run(folder / run, run)  # otherwise the run's own process writes them
        for writer in make_writers(run, config, folder / run):
            try:
                rounds = write_all(writer, run, config, store)
            except Exception as error:
                raise StorageFailed(f"cannot write to {writer.where}: {error}. {writer.remedy}") from error
            click.echo(f"{counted(rounds, 'round')} written to {writer.where}")
        os.close(lock)
    finally:
        store.close()
