"""The service of `coordinator serve`: its broker, its leadership, and the runs that it serves."""

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.compute.messages import Compute
from coordinator.compute.process import Worker
from coordinator.config import (
    AlertsConfig,
    BrokerConfig,
    RunConfig,
    ServiceConfig,
    check_settings,
    make_config,
    make_service_config,
    merge_flags,
    read_toml,
)
from coordinator.record.database import address_in, use_database
from coordinator.record.leadership import LOOK_S, Leadership
from coordinator.record.opening import open_private_record
from coordinator.record.record import Record
from coordinator.record.retention import lock_service
from coordinator.rounds.alerts import webhook_of
from coordinator.rounds.display import line_display
from coordinator.rounds.models.drift import DriftRule, DriftWatcher
from coordinator.rounds.service.broker import OWN, broker_endpoint, federation_of
from coordinator.rounds.service.regular import RegularWork
from coordinator.rounds.service.service import RunHost, RunService
from coordinator.serving.backup import BackupFolder
from coordinator.serving.metrics_page import show_prometheus, show_standby
from coordinator.serving.run import make_link
from coordinator.views.observed import Observed, ObservedService, Served
from coordinator.views.trackers.following import following
from fedvit import monitoring
from fedvit.errors import ConfigError
from fedvit.hints import command
from fedvit.logs import configure_logging
from fedvit.monitoring import Monitor
from fedvit.quantities import format_bytes
from fedvit.signals import stop_on_signals
from fedvit.systemd import Notifier
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport


class ServiceProcess:
    """Serves submitted runs, with the options of the command and the keys of its configuration."""

    def __init__(self, options: dict[str, Any]) -> None:
        own = ("file", "folder", "url", "standby", "quiet", "metrics_address")
        file, self._folder, url, self._standby, quiet, self._metrics_address = (options.pop(name) for name in own)
        self._config, self._broker = _read_settings(file, options, standby=self._standby)
        self._drift_rule = read_drift_rule(self._config)
        self._backups = BackupFolder(Path(self._config.backup)) if self._config.backup else None
        self._notifier = Notifier.from_environment()
        if url is not None:
            use_database(self._folder, url)
        webhook_of(AlertsConfig())  # of the environment, before runs begin
        self._stop = stop_on_signals()
        self._display = line_display(quiet)
        self._workers = _Workers()

    def run(self) -> None:
        """Serve until stopped, which raises click.Abort."""
        folder, display = self._folder, self._display
        with ExitStack() as stack:
            monitor = stack.enter_context(monitoring.serve_metrics(self._metrics_address))
            stack.callback(self._workers.close)
            leadership = self._lead(stack, monitor)
            store = open_private_record(folder, stack)
            if leadership:
                store.database.lead_in(leadership.term)
            endpoint = stack.enter_context(
                broker_endpoint(self._broker, self._config.federation, folder / "broker", display.line)
            )
            configure_logging(file=folder / "service.log", stderr=False)
            link = make_link(endpoint, self._broker)
            service = RunService(
                RunHost(
                    folder,
                    store,
                    display,
                    self._workers.worker_of,
                    following,
                    leadership,
                    endpoint.signer,
                    self._plan_backups(),
                    DriftWatcher(store, self._drift_rule, display.line),
                ),
                self._config,
                link=link,
                endpoint=endpoint,
                stop=self._stop,
                on_turn=self._notifier.alive,
            )
            submit = command("coordinator", "submit", "CONFIG", runs=folder)
            display.line(f"serving the runs of {folder}, {self._config.side_by_side} at a time; `{submit}` adds one")
            observed = self._observe(service, link, store, leadership)
            show_prometheus(monitor, display, observed._replace(certificates=endpoint.read_certificate_ends))
            self._notifier.ready()
            try:
                service.serve()
            finally:
                self._notifier.stopping()
            display.line("stopped; the same command resumes the runs")
        raise click.Abort  # for KeyboardInterrupt, click prints an empty line

    def _plan_backups(self) -> tuple[RegularWork, ...]:
        """Return the regular backups of the configuration. Raises ConfigError if they would contain themselves."""
        config, backups = self._config, self._backups
        if backups is None:
            return ()
        deployment = Path(self._broker.deployment) if self._broker.deployment else None
        backups.check_place(self._folder, deployment)

        def make(_stop: threading.Event) -> str:
            made = backups.make(self._folder, deployment, self._display.line)
            backups.keep_newest(config.keep_backups)
            return f"{made.name} in {backups.folder}, {format_bytes(made.new_bytes)} new"

        return (RegularWork("backup", config.backup_every_h, make, self._display.line),)

    def _observe(self, service: RunService, link: Transport, store: Record, leadership: Leadership | None) -> Observed:
        """Collect what the page of metrics shows."""

        def list_served() -> list[Served]:
            return [Served(run.coordinator, run.loop) for run in service.served() if run.coordinator]

        config = self._config
        clean_ups = service.clean_ups if config.gc_every_h else None
        observed = ObservedService(config.federation, leadership, clean_ups, lambda: service.trouble)
        age_s = self._backups.age_s if self._backups else None
        loops = {"service": service.loop}
        return Observed(link, service.is_connected, store, self._folder, list_served, loops, age_s, observed)

    def _lead(self, stack: ExitStack, monitor: Monitor) -> Leadership | None:
        """Become the leader, after a wait with --standby; a record in a file has no leader, and is locked instead.

        Raises ConfigError if another service leads, click.Abort if this one is stopped before it leads.
        """
        leadership = _leadership(self._folder, standby=self._standby, stack=stack)
        if leadership is None or leadership.try_to_lead():
            return leadership
        if not self._standby:
            raise ConfigError(
                "FV1605",
                f"the runs of {self._folder} are being served by another `coordinator serve`, at the same database; "
                "--standby waits, and takes over when it ends",
            )
        self._display.line(f"standing by for the runs of {self._folder}: another service leads")
        loop = LoopWatch(LOOK_S, self._notifier.alive)
        show_standby(monitor, self._config.federation, leadership, loop)
        self._notifier.ready()
        self._workers.prepare()
        if not leadership.wait(self._stop, self._display.line, loop.turn):
            raise click.Abort
        self._display.line("the other service no longer leads: this one takes over")
        return leadership


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


def read_drift_rule(config: ServiceConfig) -> DriftRule | None:
    """Return the rule that starts a run on drift; None if there is none. Raises ConfigError if its run is invalid."""
    if config.drift_run is None:
        return None
    where = f"drift_run {config.drift_run}"
    values = read_toml(Path(config.drift_run))
    if "broker" in values:
        raise ConfigError("FV1023", f"{where}: [broker] is for the service; its runs use the service's broker")
    run = make_config(values, where).run
    check_settings(run, where)
    recorded = msgspec.to_builtins(run)
    if "federation" not in values:  # the service's federation is used
        del recorded["federation"]
    return DriftRule(recorded, config.drift_devices, config.drift_every_h)


def _leadership(folder: Path, *, standby: bool, stack: ExitStack) -> Leadership | None:
    """Make the leadership of a record in PostgreSQL; with a record in a file, lock the folder instead.

    Raises ConfigError if it is locked, or has no standby.
    """
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
