"""`coordinator start`: one run, from its configuration to its end."""

import os
import secrets
import shutil
import signal
import typing
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import config_flags, merge_flags
from coordinator.commands.flags import has_record, record_flag, runs_flag
from coordinator.commands.prometheus import show_prometheus
from coordinator.compute.messages import Check, Checked
from coordinator.compute.process import Worker
from coordinator.config import (
    FREE_TABLES,
    BrokerConfig,
    RunConfig,
    StartConfig,
    check_blobs,
    check_kind,
    check_settings,
    make_config,
    read_toml,
    resume_config,
    with_listen_port,
)
from coordinator.record.database import ADDRESS_FILE, use_database
from coordinator.record.record import Record, open_record
from coordinator.record.retention import lock_run
from coordinator.record.tables import (
    ENDED,
    RunRecord,
)
from coordinator.rounds.alerts import webhook_of
from coordinator.rounds.coordinator import Cancelled, Coordinator
from coordinator.rounds.display import Display, choose_display
from coordinator.rounds.inbox import TICK_S, Interrupted
from coordinator.rounds.leading import Lead, Owner, OwnLead
from coordinator.rounds.lease import FederationTaken
from coordinator.rounds.parts import RunParts
from coordinator.rounds.service.broker import REVOKED, BrokerEndpoint, broker_endpoint, check_broker, federation_of
from coordinator.rounds.service.cancelling import Cancellation
from coordinator.run_view import run_settings
from coordinator.views.report.words import settings_words
from coordinator.views.trackers.following import check_writers, following
from fedvit import monitoring
from fedvit.command_line import Command, log_format_flag
from fedvit.errors import ConfigError, FedvitError, LinkDown
from fedvit.files import make_private, private_files
from fedvit.hints import command
from fedvit.logs import configure_logging
from fedvit.quantities import format_count
from fedvit.systemd import Notifier
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.topics import check_name

if typing.TYPE_CHECKING:
    from coordinator.views.prometheus import Observed


@click.command(
    cls=Command,
    examples=[
        "coordinator start --method fedavg --rounds 50 --devices 3",
        "coordinator start --config run.toml --privacy.noise-multiplier 0.5 --privacy.clip 1",
        "coordinator start --resume",
    ],
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option(
    "--resume",
    is_flag=False,
    flag_value="newest",
    default=None,
    metavar="[RUN]",
    help="Resume an interrupted run, at the broker that its devices know; without a name the newest.",
)
@click.option(
    "--run", "name", metavar="NAME", default=None, help="Name of the new run; by default date, time and method."
)
@click.option(
    "--resume-or-new",
    is_flag=True,
    help="Resume the run of --run, or begin it if it does not exist; a finished run is left as it is.",
)
@click.option(
    "--check",
    "only_check",
    is_flag=True,
    help="Only check the configuration: the model is built, its weights and the run of --start-from are read, the "
    "broker of --broker answers; no device is waited for.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--prometheus", "metrics_address", **monitoring.OPTION)
@click.option("--prometheus-password-file", **monitoring.PASSWORD_OPTION)
@log_format_flag
@config_flags
@private_files()
def start(
    file: Path | None,
    folder: Path,
    url: str | None,
    resume: str | None,
    name: str | None,
    resume_or_new: bool,
    only_check: bool,
    quiet: bool,
    metrics_address: monitoring.ListenAddress | None,
    **flags: Any,
) -> None:
    """Start a broker unless one is given, wait for devices, and train."""
    run_to_end(
        file=file,
        folder=folder,
        url=url,
        resume=resume,
        name=name,
        resume_or_new=resume_or_new,
        only_check=only_check,
        quiet=quiet,
        metrics_address=metrics_address,
        flags=flags,
    )


def run_to_end(
    *,
    file: Path | None,
    folder: Path,
    url: str | None,
    resume: str | None,
    name: str | None,
    resume_or_new: bool,
    only_check: bool,
    quiet: bool,
    metrics_address: monitoring.ListenAddress | None,
    flags: dict[str, Any],
    lead: Callable[[RunParts], Lead] | None = None,
) -> None:
    """Serve one run until it is finished, with the options of `coordinator start`.

    `lead` leads the run of a region; None: the run is not that of a region. Raises FedvitError if the run cannot
    begin or continue, click.Abort if it is interrupted.
    """
    notifier = Notifier.from_environment()
    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    if resume_or_new and (name is None or resume is not None):
        raise ConfigError(
            "FV1614", "--resume-or-new needs the name of the run by --run NAME, and cannot be combined with --resume"
        )
    given = make_config(values, where)  # reports errors before anything is opened
    check_settings(given.run, where)
    with ExitStack() as stack:
        if url is not None and not only_check:
            stack.callback(_remove_unused, folder)
            use_database(folder, url)
        if resume is None:
            run = check_name(name or usual_name(given.run), "--run")
        store = open_private_record(folder, stack) if has_record(folder) else None
        record = _to_resume(store, resume, name if resume_or_new else None) if store or resume else None
        display = choose_display(quiet)
        monitor = stack.enter_context(monitoring.serve_metrics(metrics_address))
        if record is None:
            check_trackers(given.run, where)
            webhook_of(given.run.alerts)  # before a run begins
            check_blobs(given.run.blobs, where)
            check_new(store, run)
            check_start_from(store, given.run)
            stack.enter_context(display)
            display.line(f"run {run}: checking its configuration")
            if not only_check:
                _warn_of_dead_broker(given.broker, display)
            worker, config, checked = _check(values, where, folder, stack, is_region=lead is not None)
            server = checked.accelerator
            for note in checked.notes:
                display.line(f"warning: {note}")
            if only_check:
                check_broker(given.broker)
                click.echo("\n".join(_would_run(run, config, checked)))
                return
        else:
            run = record.id
            check_kind(folder / run, is_region=lead is not None)
            config = _resume_config(record, values, where)
            if record.status in ENDED and (record.status == "cancelled" or _has_no_more_rounds(config.run, record)):
                if not resume_or_new:
                    raise ConfigError("FV1612", f"run {run!r} is {record.status}; there is nothing to resume")
                display.line(f"run {run} is {record.status}: there is nothing to do")
                return
            if not only_check:
                _warn_of_dead_broker(config.broker, display)
        if only_check:
            check_broker(config.broker)
            click.echo(f"would resume run {run}: {_describe(config.run)}")
            return
        made = stack.enter_context(ExitStack())  # undone unless the run is added to the record
        if not (folder / run).exists():
            made.callback(_remove, folder, run)
        _lock(folder / run, run, stack)
        if record is not None:
            stack.enter_context(display)
            worker, server = _worker(stack), config.run.accelerator
        display.line(f"run {run}: {_describe(config.run)}, server on {server}")

        broker_folder = folder / run / "broker"
        endpoint = stack.enter_context(
            broker_endpoint(config.broker, config.run.federation, broker_folder, display.line)
        )
        transport = make_link(endpoint, endpoint.recorded)
        store = store or open_private_record(folder, stack)
        if record is None:
            store.runs.create(run, msgspec.to_builtins(config.run), endpoint.as_record())
        else:
            status = "interrupted" if record.status == "finished" else record.status
            store.runs.update(run, config=msgspec.to_builtins(config.run), broker=endpoint.as_record(), status=status)
        made.pop_all()
        _serve(store, folder, run, config.run, endpoint, transport, display, worker, monitor, notifier, lead)


def _warn_of_dead_broker(settings: BrokerConfig, display: Display) -> None:
    """Say at once that the broker of another program does not answer; the run tries again later."""
    try:
        check_broker(settings)
    except LinkDown as error:
        display.line(f"warning: {error}; trying again")


def _check(
    values: dict[str, Any], where: str, folder: Path, stack: ExitStack, *, is_region: bool
) -> tuple[Worker, StartConfig, Checked]:
    """Check the configuration of a new run; returns the worker process, the configuration, and the outcome.

    Raises ConfigError if the run cannot begin.
    """
    config, worker = make_config(federation_of(values), where), _worker(stack)
    return worker, config, worker.ask(Check(config=config.run, where=where, runs=str(folder), is_region=is_region))


def _would_run(run: str, config: StartConfig, checked: Checked) -> list[str]:
    """The output of `--check` for a run that can begin."""
    of_run, broker = config.run, config.broker
    address = f"{broker.broker}, on {broker.listen}:{broker.port}" if "://" not in broker.broker else broker.broker
    if broker.deployment:
        address = f"of deployment {broker.deployment}"
    options = [word for name, value in of_run.options.items() for word in ("-o", f"{name}={value}")]
    options += [word for name, value in of_run.model_options.items() for word in ("--model-option", f"{name}={value}")]
    plan = command(
        "coordinator", "plan", "--method", of_run.method, "--model", of_run.model, *options, "--device", "ID"
    )
    return [
        f"run {run} can begin: {_describe(of_run)}, server on {checked.accelerator}",
        f"  model of {checked.parameters:,} parameters; classes: {', '.join(of_run.classes) or 'those of the devices'}",
        f"  {settings_words(run_settings(of_run))}",
        f"  waits for {format_count(of_run.devices, 'device')} in federation {of_run.federation}; broker: {address}",
        f"what it costs on a board: {plan}",
    ]


def _lock(folder: Path, run: str, stack: ExitStack) -> None:
    """Lock the run. Raises ConfigError if another process serves it."""
    stack.callback(os.close, lock_run(folder, run))


def _worker(stack: ExitStack) -> Worker:
    """The worker process."""
    worker = Worker()
    stack.callback(worker.close)
    return worker


def open_private_record(folder: Path, stack: ExitStack) -> Record:
    """Open the record of all runs, and make their files private."""
    store = open_record(folder, check=False)  # verified while the run waits for devices
    stack.callback(store.close)
    make_private([*folder.glob("fedvit.db*"), *(folder / record.id for record in store.runs.read_all())])
    return store


def _remove_unused(folder: Path) -> None:
    """Remove a folder that holds nothing but the address of its record: its first run was refused."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [ADDRESS_FILE]:
        shutil.rmtree(folder)


def _remove(folder: Path, run: str) -> None:
    """Remove the folder of a run that never began, and the folder of all runs if it is empty then."""
    shutil.rmtree(folder / run, ignore_errors=True)
    with suppress(OSError):  # it is not empty
        folder.rmdir()


def _describe(config: RunConfig) -> str:
    return f"{config.method} on {config.model}, {config.rounds} rounds"


def usual_name(config: RunConfig) -> str:
    return f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{config.method}-{secrets.token_hex(2)}"


def check_new(store: Record | None, run: str) -> None:
    """Raises ConfigError if the run exists."""
    if store and run in {record.id for record in store.runs.read_all()}:
        raise ConfigError(
            "FV1613", f"run {run!r} exists already; resume it with --resume {run}, or choose another --run"
        )


def check_trackers(config: RunConfig, where: str) -> None:
    """Raises ConfigError if the library of a metrics writer is missing."""
    if config.trackers.writers:
        check_writers(config.trackers, where)


def check_start_from(store: Record | None, config: RunConfig) -> None:
    """Raises ConfigError if the run of `start_from` does not exist, or has closed no round."""
    if config.start_from is None:
        return
    if store is None:
        raise ConfigError("FV1115", f"start_from = {config.start_from!r}: there is no run yet")
    newest = store.rounds.read_newest_closed(config.start_from)
    if newest is None:
        store.runs.read(config.start_from)  # raises if there is no such run
        raise ConfigError("FV1115", f"start_from = {config.start_from!r}: that run closed no round")


# --- an earlier run -------------------------------------------------------------------------------------


def _to_resume(store: Record | None, resume: str | None, named: str | None) -> RunRecord | None:
    """The run to resume: that of `resume`, or that of `named` if it exists; None for a new run.

    Raises ConfigError if there is none to resume.
    """
    records = store.runs.read_all() if store else []
    if resume is None:
        return next((record for record in records if record.id == named), None)
    if resume != "newest":
        if store is None:
            raise ConfigError("FV1601", f"no run {resume!r}: there is no run yet")
        return store.runs.read(resume)
    unfinished = [record for record in records if record.status not in (*ENDED, "queued")]
    if not unfinished:
        raise ConfigError("FV1612", "no run to resume: every run here is finished, or there is none")
    return unfinished[0]


def _config_of(record: RunRecord) -> RunConfig:
    return make_config(record.config, f"run {record.id}").run


def _has_no_more_rounds(config: RunConfig, finished: RunRecord) -> bool:
    """Return whether a finished run has the same configuration, but for tables without influence on training."""
    same = {table: getattr(config, table) for table in FREE_TABLES}
    return config == msgspec.structs.replace(_config_of(finished), **same)


def _resume_config(record: RunRecord, values: dict[str, Any], where: str) -> StartConfig:
    """The configuration of a resumed run: its recorded configuration and broker, with the given changes.

    Raises ConfigError for changes that are not allowed.
    """
    if record.status == "queued":
        raise ConfigError("FV1615", f"run {record.id!r} is queued: `coordinator serve` begins it")
    broker = dict(record.broker)
    if os.environ.get("FEDVIT_BROKER_PASSWORD"):  # it may have been changed
        broker.pop("password", None)
    broker |= with_listen_port(values.get("broker", {}), where)
    config = resume_config(record.id, record.config, values, where)
    check_blobs(config.blobs, where)
    return StartConfig(config, make_config({"broker": broker}, where).broker)


# --- the run --------------------------------------------------------------------------------------------


def make_link(endpoint: BrokerEndpoint, broker: BrokerConfig) -> Transport:
    """Connect to a broker. Raises ConfigError if a certificate or key file of its address cannot be used."""
    client_id = f"coordinator-{secrets.token_hex(4)}"
    return MqttTransport(SimpleQueue(), endpoint.address, client_id, limits=broker.broker_limits())


def _serve(
    store: Record,
    folder: Path,
    run: str,
    config: RunConfig,
    endpoint: BrokerEndpoint,
    transport: Transport,
    display: Display,
    worker: Worker,
    monitor: monitoring.Monitor,
    notifier: Notifier,
    lead: Callable[[RunParts], Lead] | None,
) -> None:
    """Serve the run to its end. Raises click.Abort if it is interrupted."""
    home = folder / run
    log_file = home / "coordinator.log"
    configure_logging(file=log_file, stderr=False, fields={"run": run})
    worker.begin(run=run, config=config, folder=home, log_file=log_file)
    cancellation = Cancellation(store, run)
    loop = LoopWatch(TICK_S, notifier.alive)

    revoked = endpoint.all_revoked()  # while no coordinator served the run

    def watch() -> None:
        loop.turn()
        endpoint.watch()
        endpoint.note_seen(coordinator.state.presence.seen_since)
        for device in (*revoked, *endpoint.revoked()):
            coordinator.expel(device, REVOKED)
        revoked.clear()
        if cancellation.is_asked_for():
            coordinator.cancel("cancelled by the operator")

    coordinator = Coordinator(
        run=run,
        config=config,
        transport=transport,
        store=store,
        folder=home,
        display=display,
        compute=worker,
        owner=Owner(watch, endpoint.revoke, lead or OwnLead),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: coordinator.stop())

    def observed() -> "Observed":
        from coordinator.views.prometheus import Observed, Served

        served = [Served(coordinator, loop)]
        return Observed(transport, lambda: coordinator.inbox.connected, store, folder, lambda: served, {})

    show_prometheus(monitor, display, observed)
    notifier.ready()
    try:
        with following(run, config, store, home, display.line):
            coordinator.serve()
    except FederationTaken:
        if not store.rounds.find_last(run):  # it never began
            store.runs.remove(run)
            _remove(folder, run)
        raise
    except Cancelled:
        display.line(f"run {run} is cancelled")
        return
    except Interrupted:
        if lead is None:
            resume = command("coordinator", "start", "--resume", run, runs=folder)
            display.line(f"interrupted; resume with: {resume}")
        else:
            display.line("interrupted; the same command resumes it")
        raise click.Abort from None  # for KeyboardInterrupt, click prints an empty line
    finally:
        notifier.stopping()
        endpoint.note_seen(coordinator.state.presence.seen_since, at_once=True)
    display.line(f"finished; tensors: {home / 'model.safetensors'}, log: {log_file}")
    from coordinator.views.trained import export_hint  # late: it imports onnxruntime

    report = command("coordinator", "report", run, "--out", "report.html", runs=folder)
    with suppress(FedvitError):  # the run is finished, whatever can be read of it now
        display.line(f"next: {report}; {export_hint(store, folder, run)}")
