"""`coordinator restore`: writes a backup's runs and deployment to new folders."""

from pathlib import Path

import click

from coordinator.commands.flags import record_flag
from coordinator.operations.backing_up import describe, restore_backup
from coordinator.serving.backup import BackupFolder
from fedvit.command_line import Command, json_flag, print_json
from fedvit.files import private_files
from fedvit.hints import command

PATH = click.Path(path_type=Path)


@click.command(
    cls=Command,
    examples=["coordinator restore /mnt/backups --runs runs --deployment deployment"],
)
@click.argument("folder", type=PATH, metavar="DIR")
@click.option("--runs", type=PATH, help="Folder of all runs, which is new.")
@click.option("--deployment", type=PATH, help="New folder for the deployment.")
@click.option("--at", "name", metavar="BACKUP", help="One of `coordinator backup DIR --list`; by default the newest.")
@click.option(
    "--keep-mirrors",
    is_flag=True,
    help="Runs with an object store as mirror go on writing it: only if their original is gone for good.",
)
@record_flag
@json_flag
@private_files()
def restore(
    folder: Path,
    runs: Path | None,
    deployment: Path | None,
    name: str | None,
    keep_mirrors: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Restore a backup in DIR to new folders.

    The original must not be served any more: its devices would find two coordinators. Every file is verified.
    """
    if not (runs or deployment):
        raise click.UsageError("name where to restore to: --runs, --deployment, or both")
    backups = BackupFolder(folder)
    backup = restore_backup(backups, name, runs, deployment, url=url, keep_mirrors=keep_mirrors)
    if as_json:
        print_json(describe(backup))
        return
    click.echo(f"backup {backup.name} of {backup.made_at} is restored")
    if runs and backup.mirrors and not keep_mirrors:
        click.echo(f"without their mirrors, which the original may still write: {', '.join(backup.mirrors)}")
    if runs:
        resume = command("coordinator", "start", "--resume", "RUN", runs=runs)
        click.echo(f"next: {command('coordinator', 'runs', runs=runs)}; resume one with {resume}")
    if deployment:
        click.echo(f"devices find the new server by the name that they know: {', '.join(_read_hosts(deployment))}")


def _read_hosts(deployment: Path) -> tuple[str, ...]:
    from coordinator.security.folder import Deployment  # late: cryptography

    return Deployment.open(deployment).settings.hosts[:1]
