"""`coordinator serve`: a service for submitted runs."""

import os
import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.config_flags import merge_flags, service_flags
from coordinator.commands.flags import record_flag, runs_flag
from coordinator.commands.prometheus import show_prometheus
from coordinator.commands.start import make_link, open_private_record
from coordinator.compute.messages import Compute
from coordinator.compute.process import Worker
from coordinator.config import AlertsConfig, BrokerConfig, RunConfig, ServiceConfig, make_service_config, read_toml
from coordinator.record.database import address_in, use_database
from coordinator.record.leadership import Leadership
from coordinator.record.record import Record
from coordinator.record.retention import lock_service
from coordinator.rounds.alerts import webhook_of
from coordinator.rounds.display import line_display
from coordinator.rounds.service.broker import OWN, broker_endpoint, federation_of
from coordinator.rounds.service.service import RunHost, RunService
from coordinator.views.trackers.following import following
from fedvit import monitoring
from fedvit.command_line import Command, log_format_flag
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.hints import command
from fedvit.logs import configure_logging
from fedvit.systemd import Notifier
from fedvit.transport.base import Transport

if TYPE_CHECKING:
    from coordinator.views.prometheus import Observed


@click.command(
    cls=Command,
    examples=[
        "coordinator serve --broker.deployment deployment --side-by-side 2",
        "coordinator serve --standby --broker mqtts://broker.example.com",
    ],
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option(
    "--standby",
    is_flag=True,
    help="If another service leads, wait, and take over when it has ended or hangs. Needs a record in PostgreSQL, and "
    "the address of a broker.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--prometheus", "metrics_address", **monitoring.OPTION)
@click.option("--prometheus-password-file", **monitoring.PASSWORD_OPTION)
@log_format_flag
@service_flags
@private_files()
def serve(
    file: Path | None,
    folder: Path,
    url: str | None,
    standby: bool,
    quiet: bool,
    metrics_address: monitoring.ListenAddress | None,
    **flags: Any,
) -> None:
    """Keep a broker and its devices connected, and serve submitted runs until stopped."""

    config, broker = _read_settings(file, flags, standby=standby)
    notifier = Notifier.from_environment()
    if url is not None:
        use_database(folder, url)
    webhook_of(AlertsConfig())  # of the environment, before runs begin
    stop = _stop_on_signals()
    with ExitStack() as stack:
        monitor = stack.enter_context(monitoring.serve_metrics(metrics_address))
        display = line_display(quiet)
        workers = _Workers()
        stack.callback(workers.close)
        leadership = _leadership(folder, standby=standby, stack=stack)
        if leadership and not leadership.try_to_lead():
            if not standby:
                raise ConfigError(
                    "FV1605",
                    f"the runs of {folder} are being served by another `coordinator serve`, at the same database; "
                    "--standby waits, and takes over when it ends",
                )
            display.line(f"standing by for the runs of {folder}: another service leads")
            notifier.ready()
            workers.prepare()
            if not leadership.wait(stop, display.line, notifier.alive):
                raise click.Abort
            display.line("the other service no longer leads: this one takes over")
        store = open_private_record(folder, stack)
        if leadership:
            store.database.lead_in(leadership.term)
        endpoint = stack.enter_context(broker_endpoint(broker, config.federation, folder / "broker", display.line))
        configure_logging(file=folder / "service.log", stderr=False)
        link = make_link(endpoint, broker)
        service = RunService(
            RunHost(folder, store, display, workers.worker_of, following),
            config,
            link=link,
            endpoint=endpoint,
            stop=stop,
            on_turn=notifier.alive,
            leadership=leadership,
        )
        submit = command("coordinator", "submit", "CONFIG", runs=folder)
        display.line(f"serving the runs of {folder}, {config.side_by_side} at a time; `{submit}` adds one")

        show_prometheus(monitor, display, partial(_observe, service, link, store, folder))
        notifier.ready()
        try:
            service.serve()
        finally:
            notifier.stopping()
        display.line("stopped; the same command resumes the runs")
    raise click.Abort  # for KeyboardInterrupt, click prints an empty line


def _read_settings(file: Path | None, flags: dict[str, Any], *, standby: bool) -> tuple[ServiceConfig, BrokerConfig]:
    """Read the configuration of a service. Raises ConfigError."""
    values = merge_flags(read_toml(file) if file else {}, flags)
    config, broker = make_service_config(federation_of(values), str(file) if file else "flags")
    if standby and broker.broker in OWN:
        raise ConfigError(
            "FV1604",
            f"broker = {broker.broker!r} would end with this coordinator: --standby needs the address of a broker that "
            "both services use, by --broker mqtts://HOST",
        )
    return config, broker


def _stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _observe(service: RunService, link: Transport, store: Record, folder: Path) -> "Observed":
    """Collect what the page of metrics shows."""
    from coordinator.views.prometheus import Observed, Served  # imports prometheus_client, which is optional

    def list_served() -> list[Served]:
        return [Served(run.coordinator, run.loop) for run in service.served() if run.coordinator]

    return Observed(link, service.is_connected, store, folder, list_served, {"service": service.loop})


def _leadership(folder: Path, *, standby: bool, stack: ExitStack) -> Leadership | None:
    """Make the leadership of a record in PostgreSQL; with a record in a file, lock the folder instead.

    Raises ConfigError if it is locked, or has no standby."""

    if (url := address_in(folder)) is not None:
        leadership = Leadership(url)
        stack.callback(leadership.close)
        return leadership
    if standby:
        raise ConfigError(
            "FV1604",
            f"--standby: the record of {folder} is not in PostgreSQL, which decides which service leads; begin a new "
            "folder of runs with --record postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    stack.callback(os.close, lock_service(folder))
    return None


class _Workers:
    """Starts the worker process of each run."""

    def __init__(self) -> None:
        self._prepared: Worker | None = None

    def prepare(self) -> None:
        """Start a process for the first run, which loads torch in the meantime."""

        self._prepared = Worker()
        self._prepared.start()

    def worker_of(self, run: str, config: RunConfig, folder: Path) -> Compute:

        worker, self._prepared = self._prepared or Worker(), None
        worker.begin(run=run, config=config, folder=folder, log_file=folder / "coordinator.log")
        return worker

    def close(self) -> None:
        if self._prepared:
            self._prepared.close()
