"""`coordinator metrics`: what the record holds of a run, for other tools."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import flags_of
from coordinator.commands.flags import existing_store
from coordinator.config import MetricsConfig, make_config
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import private_files
from fedvit.quantities import counted


@click.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@flags_of(MetricsConfig)
@private_files()
def metrics(run: str, out: Path, **flags: Any) -> None:
    """Write the rounds of RUN that a writer lacks: to those of its configuration, or to others that flags name."""
    from coordinator.metrics.following import write_all
    from coordinator.metrics.writers import check_writers, make_writers
    from coordinator.record.retention import lock_run

    store = existing_store(out, writes=True)
    try:
        config = make_config(store.run(run).config, f"run {run}").run
        given = {key: value for key, value in flags.items() if value not in (None, ())}
        values = {"metrics": {**msgspec.to_builtins(config.metrics), **given}}
        config = msgspec.structs.replace(config, metrics=make_config(values, "flags").run.metrics)
        if not config.metrics.writers:
            raise ConfigError(f"run {run!r} has no writers of its own: name one, as in --writer tensorboard")
        check_writers(config.metrics, "flags")
        lock = lock_run(out / run, run)  # else it has a process that writes them
        for writer in make_writers(run, config, out / run):
            try:
                rounds = write_all(writer, run, config, store)
            except Exception as error:
                raise StorageFailed(f"cannot write to {writer.where}: {error}. {writer.remedy}") from error
            click.echo(f"{counted(rounds, 'round')} written to {writer.where}")
        os.close(lock)
    finally:
        store.close()
