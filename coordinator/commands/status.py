"""`coordinator status`: shows what a run or a service waits for."""

import json
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.liveness import current_status
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.record.record import Record
from coordinator.record.tables import ENDED, RunRecord
from coordinator.rounds.service.status import read_service_status
from coordinator.rounds.status import lines, read_status
from coordinator.run_view import read_head
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.hints import command


@click.command(cls=Command, examples=["coordinator status", "coordinator status RUN --json"])
@click.argument("run", required=False)
@runs_flag
@json_flag
def status(run: str | None, folder: Path, as_json: bool) -> None:
    """Show what RUN is waiting for, since when and until when; by default the service, or the newest run."""
    store = open_existing_record(folder)
    if run is None and _service_status(store, folder, as_json=as_json):
        return
    record = store.runs.read(run or newest_run(store, folder))
    serve = command("coordinator", "serve", runs=folder)
    if record.status == "queued":
        waits = {"run": record.id, "status": record.status}
        click.echo(json.dumps(waits, indent=2) if as_json else f"run {record.id}: queued; `{serve}` begins it")
        return
    found = read_status(folder / record.id)
    if as_json:
        head = msgspec.structs.asdict(read_head(store, record))
        shown = msgspec.to_builtins(found)
        if record.status in ENDED:  # its last activity is over
            shown |= {"doing": record.status, "waiting_for": [], "resting": [], "online": 0}
        click.echo(json.dumps({**head, **shown, "stale": found.is_stale()}, indent=2))
        return
    resume = serve if record.submitted_at else command("coordinator", "start", "--resume", record.id, runs=folder)
    click.echo("\n".join(lines(record.id, current_status(store, record), found, resume)))


def _service_status(store: Record, folder: Path, *, as_json: bool) -> bool:
    """Print the status of a folder's service; False if there is no service and no submitted run."""
    status, submitted = read_service_status(folder), store.runs.read_submitted()
    alive = status is not None and not status.is_stale()
    hosts = store.database.services()
    if not submitted and not alive and not hosts:
        return False
    queued = [record.id for record in submitted if record.status == "queued"]
    begun = [record for record in submitted if record.status != "queued"]
    if as_json:
        seen = msgspec.to_builtins(status) if status else {}
        seen |= {
            "alive": alive,
            "queued": queued,
            "begun": [record.id for record in begun],
            "hosts": [host._asdict() for host in hosts],
        }
        click.echo(json.dumps({"service": seen}, indent=2))
        return True
    if status and alive:
        click.echo(f"service: federation {status.federation} at {status.broker}")
    else:
        serve = command("coordinator", "serve", runs=folder)
        click.echo(f"service: not running; `{serve}`, with the flags of before, resumes the runs below")
    for host in hosts:
        click.echo(f"  {'leader' if host.leads else 'standby'}: {host.host}")
    for record in begun:
        click.echo(f"  run {record.id}: {_doing(store, record, folder)}")
    click.echo(f"  queue: {', '.join(queued) or 'empty'}")
    for member in status.members if status and alive else ():
        labels = "".join(f" {name}={value}" for name, value in member.labels.items())
        where = f"in run {member.run}" if member.run else "no run has work for it now"
        click.echo(f"  {member.device}{labels}: {where if member.online else 'offline'}")
    return True


def _doing(store: Record, record: RunRecord, folder: Path) -> str:
    try:
        doing = read_status(folder / record.id).doing
    except ConfigError:
        return "begins"
    return "interrupted" if current_status(store, record) == "interrupted" else doing
