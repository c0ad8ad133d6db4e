"""`coordinator status`: shows what a run or a service waits for."""

import json
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.documents import RunActivity, ServiceOverview
from coordinator.operations.opening import open_runs
from coordinator.record.tables import ENDED
from coordinator.rounds.status import lines
from fedvit.command_line import Command, json_flag
from fedvit.hints import command


@click.command(cls=Command, examples=["coordinator status", "coordinator status RUN --json"])
@click.argument("run", required=False)
@runs_flag
@json_flag
def status(run: str | None, folder: Path, as_json: bool) -> None:
    """Show what RUN is waiting for, since when and until when; by default the service, or the newest run."""
    with open_runs(folder) as runs:
        if run is None and (service := runs.read_service()).exists():
            _print_service(service, folder, as_json)
            return
        activity = runs.read_activity(run)
    _print_run(activity, folder, as_json)


def _print_run(activity: RunActivity, folder: Path, as_json: bool) -> None:
    head, live = activity.head, activity.live
    serve = command("coordinator", "serve", runs=folder)
    if live is None:
        waits = {"run": head.run, "status": head.status}
        click.echo(json.dumps(waits, indent=2) if as_json else f"run {head.run}: queued; `{serve}` begins it")
        return
    if as_json:
        shown = msgspec.to_builtins(live)
        if head.status in ENDED:  # its last activity is over
            shown |= {"doing": head.status, "waiting_for": [], "resting": [], "online": 0}
        click.echo(json.dumps({**msgspec.structs.asdict(head), **shown, "stale": activity.stale}, indent=2))
        return
    resume = serve if activity.submitted else command("coordinator", "start", "--resume", head.run, runs=folder)
    now = f"{head.status}; {head.reason}" if head.status in ENDED and head.reason else head.status
    click.echo("\n".join(lines(head.run, now, live, resume)))


def _print_service(service: ServiceOverview, folder: Path, as_json: bool) -> None:
    status, alive = service.status, service.alive
    if as_json:
        seen = msgspec.to_builtins(status) if status else {}
        seen |= {
            "alive": alive,
            "queued": service.queued,
            "begun": [begun.run for begun in service.begun],
            "hosts": [host._asdict() for host in service.hosts],
        }
        click.echo(json.dumps({"service": seen}, indent=2))
        return
    if status and alive:
        click.echo(f"service: federation {status.federation} at {status.broker}")
    else:
        serve = command("coordinator", "serve", runs=folder)
        click.echo(f"service: not running; `{serve}`, with the flags of before, resumes the runs below")
    for host in service.hosts:
        click.echo(f"  {'leader' if host.leads else 'standby'}: {host.host}")
    for begun in service.begun:
        click.echo(f"  run {begun.run}: {begun.doing}")
    click.echo(f"  queue: {', '.join(service.queued) or 'empty'}")
    for member in status.members if status and alive else ():
        labels = "".join(f" {name}={value}" for name, value in member.labels.items())
        where = f"in run {member.run}" if member.run else "no run has work for it now"
        click.echo(f"  {member.device}{labels}: {where if member.online else 'offline'}")
