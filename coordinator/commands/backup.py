"""`coordinator backup`: keeps copies of the record, the runs and the deployment."""

from pathlib import Path

import click
import msgspec

from coordinator.operations.backing_up import make_backup
from coordinator.serving.backup import BackupFolder, describe_json
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files
from fedvit.hints import command
from fedvit.quantities import format_bytes, format_count

PATH = click.Path(path_type=Path)


@click.command(
    cls=Command,
    examples=[
        "coordinator backup /mnt/backups --runs runs --deployment deployment --keep 7",
        "coordinator backup /mnt/backups --list",
    ],
)
@click.argument("folder", type=PATH, metavar="DIR")
@click.option("--runs", type=PATH, help="Folder of all runs to back up: their record, tensors and settings.")
@click.option("--deployment", type=PATH, envvar="FEDVIT_DEPLOYMENT", help="Folder of a deployment, with all its keys.")
@click.option("--keep", type=click.IntRange(min=1), help="Remove older backups than the newest so many.")
@click.option("--list", "only_list", is_flag=True, help="Only list the backups in DIR.")
@json_flag
@private_files()
def backup(
    folder: Path, runs: Path | None, deployment: Path | None, keep: int | None, only_list: bool, as_json: bool
) -> None:
    """Add a backup of runs and of a deployment to DIR, also while they are served.

    Unchanged files take no further space. DIR holds private keys and personal data: protect it.
    """
    backups = BackupFolder(folder)
    if only_list:
        made = backups.list_all()
    else:
        if not (runs or deployment):
            raise click.UsageError("name what to back up: --runs, --deployment, or both")
        made = [make_backup(backups, runs, deployment, keep, lambda line: click.echo(line, err=True))]
    if as_json:
        shown = [msgspec.json.decode(describe_json(one)) for one in made]
        click.echo(msgspec.json.format(msgspec.json.encode(shown if only_list else shown[0])).decode())
        return
    for one in made:
        what = [format_count(len(one.runs), "run")] if any(path.startswith("runs/") for path in one.files) else []
        what += [f"deployment {one.deployment}"] if one.deployment else []
        size = f"{format_bytes(one.bytes)}, {format_bytes(one.new_bytes)} of them new"
        click.echo(f"{one.name}: {', '.join(what)}; {format_count(len(one.files), 'file')}, {size}")
    if not only_list:
        click.echo(f"next: {command('coordinator', 'restore', folder, '--runs', 'NEW-FOLDER')}")
