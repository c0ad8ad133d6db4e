"""`coordinator backup`: keeps copies of the record, the runs and the deployment."""

from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.operations.backing_up import BackupLine, describe, make_backup
from coordinator.operations.opening import find_service
from coordinator.serving.backup import BackupFolder
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.hints import command
from fedvit.quantities import format_bytes, format_count

if TYPE_CHECKING:
    from coordinator.operations.remote_admin import RemoteBackups

PATH = click.Path(path_type=Path)


@click.command(
    cls=Command,
    examples=[
        "coordinator backup /mnt/backups --runs runs --deployment deployment --keep 7",
        "coordinator backup /mnt/backups --list",
    ],
)
@click.argument("folder", type=PATH, required=False, metavar="DIR")
@click.option("--runs", type=PATH, help="Folder of all runs to back up: their record, tensors and settings.")
@click.option("--deployment", type=PATH, envvar="FEDVIT_DEPLOYMENT", help="Folder of a deployment, with all its keys.")
@click.option("--keep", type=click.IntRange(min=1), help="Remove older backups than the newest so many.")
@click.option("--list", "only_list", is_flag=True, help="Only list the backups in DIR.")
@json_flag
@private_files()
def backup(
    folder: Path | None, runs: Path | None, deployment: Path | None, keep: int | None, only_list: bool, as_json: bool
) -> None:
    """Add a backup of runs and of a deployment to DIR, also while they are served.

    Unchanged files take no further space. DIR holds private keys and personal data: protect it. With --server the
    server's own runs, deployment and folder of backups are meant.
    """
    if (service := find_service()) is not None:
        if folder or runs:
            raise ConfigError("FV1817", "the server has its own folders: leave out DIR and --runs, or --server")
        remote: RemoteBackups = import_module("coordinator.operations.remote_admin").RemoteBackups(service)
        made = remote.list_all() if only_list else [remote.make(keep)]
    else:
        made = _use_folder(folder, runs, deployment, keep, only_list=only_list)
    if as_json:
        print_json(made if only_list else made[0])
        return
    for one in made:
        what = [format_count(len(one.runs), "run")] if one.runs or not one.deployment else []
        what += [f"deployment {one.deployment}"] if one.deployment else []
        size = f"{format_bytes(one.bytes)}, {format_bytes(one.new_bytes)} of them new"
        click.echo(f"{one.name}: {', '.join(what)}; {format_count(one.files, 'file')}, {size}")
    if folder and not only_list:
        targets = [("--runs", "NEW-RUNS")] if runs else []
        targets += [("--deployment", "NEW-DEPLOYMENT")] if deployment else []
        click.echo(f"next: {command('coordinator', 'restore', folder, *chain.from_iterable(targets))}")


def _use_folder(
    folder: Path | None, runs: Path | None, deployment: Path | None, keep: int | None, *, only_list: bool
) -> list[BackupLine]:
    """Add a backup to a folder of this machine, or list those that it has."""
    if folder is None:
        raise click.UsageError("name the folder of backups: DIR")
    backups = BackupFolder(folder)
    if only_list:
        return [describe(one) for one in backups.list_all()]
    if not (runs or deployment):
        raise click.UsageError("name what to back up: --runs, --deployment, or both")
    return [describe(make_backup(backups, runs, deployment, keep, lambda line: click.echo(line, err=True)))]
