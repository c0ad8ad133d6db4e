"""`coordinator serve`, `submit` and `cancel`: runs one after the other, or side by side, on devices that stay."""

import os
import secrets
import signal
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import click
import msgspec

from coordinator.commands.config_flags import GroupedCommand, merge_flags, run_flags, service_flags
from coordinator.commands.flags import existing_store
from coordinator.commands.start import check_metrics, check_new, check_start_from, opened_store, usual_name
from coordinator.config import RunConfig, check_names, make_config, make_service_config, read_toml, why_not_asked
from fedvit.errors import ConfigError
from fedvit.files import private_files

if TYPE_CHECKING:
    from coordinator.compute.messages import Compute
    from coordinator.record.store import Store

_OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command(cls=GroupedCommand)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags win over it.")
@_OUT
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@service_flags
@private_files()
def serve(file: Path | None, out: Path, quiet: bool, **flags: Any) -> None:
    """Keep a broker and its devices, and serve the runs that are submitted, until it is stopped."""
    from coordinator.record.retention import lock_service
    from coordinator.run.display import Display, LineDisplay
    from coordinator.service.broker import federation_of, meeting_point
    from coordinator.service.service import RunService
    from fedvit.logs import configure_logging
    from fedvit.transport.mqtt import MqttTransport

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    config, broker = make_service_config(federation_of(values), where)
    with ExitStack() as stack:
        store = opened_store(out, stack)
        stack.callback(os.close, lock_service(out))
        display = Display() if quiet else LineDisplay()
        point = stack.enter_context(meeting_point(broker, config.federation, out / "broker", display.line))
        configure_logging(file=out / "service.log", stderr=False)
        service = RunService(
            out=out,
            config=config,
            store=store,
            link=MqttTransport(SimpleQueue(), point.address, client_id=f"coordinator-{secrets.token_hex(4)}"),
            point=point,
            display=display,
            compute_of=_worker_of,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        display.line(f"serving the runs of {out}, {config.side_by_side} at a time; `coordinator submit` adds one")
        service.serve()
        display.line(f"stopped; go on with: coordinator serve --out {out}")
    raise KeyboardInterrupt


def _worker_of(run: str, config: RunConfig, folder: Path) -> "Compute":
    from coordinator.compute.process import Worker

    worker = Worker()
    worker.begin(run=run, config=config, folder=folder, log_file=folder / "coordinator.log")
    return worker


@click.command(cls=GroupedCommand)
@click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[CONFIG]")
@click.option("--run", "name", metavar="NAME", default=None, help="Name of the run; by default date, time and method.")
@_OUT
@_JSON
@run_flags
@private_files()
def submit(file: Path | None, name: str | None, out: Path, as_json: bool, **flags: Any) -> None:
    """Put a run into the queue of a service: the TOML file CONFIG, and flags that win over it."""
    from coordinator.compute.messages import Check
    from coordinator.compute.process import Worker
    from fedvit.wire.topics import check_name

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    if "broker" in values:
        raise ConfigError(f"{where}: [broker] is for `coordinator start` and `serve`; this run has its service's")
    config = make_config(values, where).run
    check_names(config, where)
    check_metrics(config, where)
    run = check_name(name or usual_name(config), "--run")
    with ExitStack() as stack:
        known = opened_store(out, stack) if (out / "fedvit.db").exists() else None
        check_new(known, run)
        now = _as_far_as_known_now(config, known)
        warning = _warning(config, out)
        worker = Worker()
        stack.callback(worker.close)
        notes = worker.ask(Check(config=now, where=where, runs=str(out))).notes
        recorded = msgspec.to_builtins(config)
        if "federation" not in values:  # it is the service's
            del recorded["federation"]
        opened_store(out, stack).submit_run(run, recorded)
    for note in (*notes, *([warning] if warning else [])):
        click.echo(f"warning: {note}", err=True)
    click.echo(msgspec.json.encode({"run": run, "status": "queued", "warning": warning}).decode() if as_json else run)


def _as_far_as_known_now(config: RunConfig, store: "Store | None") -> RunConfig:
    """What can be checked of a run: the one that it starts from may be in the queue before it.

    Raises ConfigError when there is no such run.
    """
    if config.start_from is None:
        return config
    from coordinator.record.tables import ENDED

    earlier = config.start_from
    if store is not None and store.run(earlier).status not in ENDED and store.newest_closed(earlier) is None:
        return msgspec.structs.replace(config, start_from=None)
    check_start_from(store, config)
    return config


def _warning(config: RunConfig, out: Path) -> str | None:
    """What the operator should know of a run that may wait for long."""
    from coordinator.service.status import labels_seen, read_service_status

    status = read_service_status(out)
    fits = status and any(why_not_asked(config.devices_where, member.labels) is None for member in status.members)
    if status is None or not config.devices_where or fits:
        return None
    seen = ", ".join(labels_seen(status)) or "none"
    return (
        f"devices_where = {config.devices_where!r}: no device that the service has seen has these labels; labels that "
        f"there are: {seen}. The run waits for such devices"
    )


@click.command()
@click.argument("run")
@_OUT
@_JSON
@private_files()
def cancel(run: str, out: Path, as_json: bool) -> None:
    """End RUN for good: one that is queued at once, one that is being served within seconds."""
    from coordinator.record.retention import is_served

    store = existing_store(out, writes=True)
    try:
        record = store.run(run)
        if record.status in ("finished", "failed", "cancelled"):
            raise ConfigError(f"run {run!r} is {record.status} already")
        store.cancel_run(run)
        served = is_served(out / run)
        if not served and store.run(run).status != "cancelled":  # its process was killed
            store.update_run(run, status="cancelled")
        status = store.run(run).status
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.encode({"run": run, "status": status}).decode())
    else:
        click.echo(f"run {run}: " + ("cancelled" if status == "cancelled" else "its coordinator ends it now"))
