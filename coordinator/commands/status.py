"""`coordinator status`: shows what a run or a service waits for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.record.store import Store


@click.command(cls=Command, examples=["coordinator status", "coordinator status RUN --json"])
@click.argument("run", required=False)
@runs_flag
@json_flag
def status(run: str | None, folder: Path, as_json: bool) -> None:
    """Show what RUN is waiting for, since when and until when; by default the service, or the newest run."""
    from coordinator.record.summary import run_head
    from coordinator.record.tables import ENDED
    from coordinator.run.status import lines, read_status

    store = existing_store(folder)
    if run is None and _service_status(store, folder, as_json=as_json):
        return
    runs = store.runs()
    if run is None and not runs:
        raise ConfigError(f"there is no run in {folder}")
    record = store.run(run) if run else runs[0]
    if record.status == "queued":
        waits = {"run": record.id, "status": record.status}
        click.echo(
            json.dumps(waits, indent=2) if as_json else f"run {record.id}: queued; `coordinator serve` begins it"
        )
        return
    found = read_status(folder / record.id)
    if as_json:
        head = msgspec.structs.asdict(run_head(record))
        shown = msgspec.to_builtins(found)
        if record.status in ENDED:  # its last activity is over
            shown |= {"doing": record.status, "waiting_for": [], "resting": [], "online": 0}
        click.echo(json.dumps({**head, **shown, "stale": found.is_stale()}, indent=2))
        return
    click.echo("\n".join(lines(record.id, record.status, found)))


def _service_status(store: "Store", folder: Path, *, as_json: bool) -> bool:
    """Print the status of a folder's service; False if there is no service and no submitted run."""
    from coordinator.service.status import read_service_status

    status, submitted = read_service_status(folder), store.submitted()
    alive = status is not None and not status.is_stale()
    hosts = store.services()
    if not submitted and not alive and not hosts:
        return False
    queued = [record.id for record in submitted if record.status == "queued"]
    begun = [record.id for record in submitted if record.status != "queued"]
    if as_json:
        seen = msgspec.to_builtins(status) if status else {}
        seen |= {"alive": alive, "queued": queued, "begun": begun, "hosts": [host._asdict() for host in hosts]}
        click.echo(json.dumps({"service": seen}, indent=2))
        return True
    if status and alive:
        click.echo(f"service: federation {status.federation} at {status.broker}")
    else:
        click.echo(f"service: not running; `coordinator serve --runs {folder}` resumes the runs below")
    for host in hosts:
        click.echo(f"  {'leader' if host.leads else 'standby'}: {host.host}")
    for name in begun:
        click.echo(f"  run {name}: {_doing(folder / name)}")
    click.echo(f"  queue: {', '.join(queued) or 'empty'}")
    for member in status.members if status and alive else ():
        labels = "".join(f" {name}={value}" for name, value in member.labels.items())
        where = f"in run {member.run}" if member.run else "no run has work for it now"
        click.echo(f"  {member.device}{labels}: {where if member.online else 'offline'}")
    return True


def _doing(folder: Path) -> str:
    from coordinator.run.status import read_status

    try:
        status = read_status(folder)
    except ConfigError:
        return "begins"
    return "interrupted" if status.is_stale() else status.doing
