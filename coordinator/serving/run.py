"""The process of one run of `coordinator start`: its broker, its compute process, and its rounds."""

import os
import secrets
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import import_module
from queue import SimpleQueue

import click
import msgspec

from coordinator.compute.messages import Check, Checked
from coordinator.compute.process import Worker
from coordinator.config import BrokerConfig, RunConfig, StartConfig, make_config
from coordinator.record.opening import open_private_record
from coordinator.record.record import Record
from coordinator.record.retention import lock_run
from coordinator.rounds.coordinator import Cancelled, Coordinator
from coordinator.rounds.display import choose_display
from coordinator.rounds.inbox import TICK_S, Interrupted
from coordinator.rounds.leading import Lead, Owner, OwnLead
from coordinator.rounds.lease import FederationTaken
from coordinator.rounds.parts import RunParts, RunSetup
from coordinator.rounds.service.broker import REVOKED, BrokerEndpoint, broker_endpoint, check_broker, federation_of
from coordinator.rounds.service.cancelling import Cancellation
from coordinator.run_view import run_settings
from coordinator.serving.metrics_page import show_prometheus
from coordinator.serving.request import StartRequest
from coordinator.serving.start import RunToStart
from coordinator.views.observed import Observed, Served
from coordinator.views.report.words import settings_words
from coordinator.views.trackers.following import following
from fedvit import monitoring
from fedvit.errors import FedvitError, LinkDown
from fedvit.hints import command
from fedvit.logs import configure_logging
from fedvit.quantities import format_count
from fedvit.systemd import Notifier
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport
from fedvit.transport.mqtt import MqttTransport


class RunProcess:
    """Serves one run; `stack` closes what it opens."""

    def __init__(
        self, request: StartRequest, run: RunToStart, lead: Callable[[RunParts], Lead] | None, stack: ExitStack
    ) -> None:
        self._request, self._run, self._lead, self._stack = request, run, lead, stack
        self._name, self._home = run.name, request.folder / run.name
        self._notifier = Notifier.from_environment()
        self._monitor = stack.enter_context(monitoring.serve_metrics(request.metrics_address))
        self._display = choose_display(request.quiet)
        self._worker = Worker()
        stack.callback(self._worker.close)

    def run(self) -> None:
        """Check the run with its compute process and its broker, and serve it to its end, unless --check was given.

        Raises FedvitError if it cannot begin, click.Abort if it is interrupted.
        """
        self._stack.enter_context(self._display)
        if self._run.record is None:
            self._display.line(f"run {self._name}: checking its configuration")
        if self._request.only_check:
            self._only_check()
            return
        try:
            check_broker(self._run.config.broker)
        except LinkDown as error:  # said at once; the run tries again later
            self._display.line(f"warning: {error}; trying again")
        if self._run.record is None:
            config, checked = self._check()
            self._begin(config, checked.accelerator)
        else:
            self._begin(self._run.config, self._run.config.run.accelerator)

    # --- before the run -----------------------------------------------------------------------------

    def _check(self) -> tuple[StartConfig, Checked]:
        """Let the worker process check a new run; return its configuration and the outcome. Raises ConfigError."""
        request = self._request
        config = make_config(federation_of(request.values), request.where)
        is_region = self._lead is not None
        checked = self._worker.ask(
            Check(config=config.run, where=request.where, runs=str(request.folder), is_region=is_region)
        )
        for note in checked.notes:
            self._display.line(f"warning: {note}")
        return config, checked

    def _only_check(self) -> None:
        """Print what would begin or resume. Raises ConfigError if it cannot."""
        if self._run.record is None:
            lines = describe_new_run(self._name, *self._check())
        else:
            lines = [f"would resume run {self._name}: {_describe(self._run.config.run)}"]
        check_broker(self._run.config.broker)
        click.echo("\n".join(lines))

    def _begin(self, config: StartConfig, server: str) -> None:
        """Lock the run, provide its broker, write it into the record, and serve it."""
        begun = self._stack.enter_context(ExitStack())  # undone unless the run is added to the record
        if not self._home.exists():
            begun.callback(self._remove)
        self._stack.callback(os.close, lock_run(self._home, self._name))
        self._display.line(f"run {self._name}: {_describe(config.run)}, server on {server}")
        endpoint = self._stack.enter_context(
            broker_endpoint(config.broker, config.run.federation, self._home / "broker", self._display.line)
        )
        transport = make_link(endpoint, endpoint.recorded)
        store = self._run.store or open_private_record(self._request.folder, self._stack)
        values, broker = msgspec.to_builtins(config.run), endpoint.as_record()
        if (record := self._run.record) is None:
            store.runs.create(self._name, values, broker)
        else:
            status = "interrupted" if record.status == "finished" else record.status
            store.runs.update(self._name, config=values, broker=broker, status=status)
        begun.pop_all()
        self._serve(store, config.run, endpoint, transport)

    def _remove(self) -> None:
        """Remove the folder of a run that never began, and the folder of all runs if it is empty then."""
        shutil.rmtree(self._home, ignore_errors=True)
        with suppress(OSError):  # it is not empty
            self._request.folder.rmdir()

    # --- the run ------------------------------------------------------------------------------------

    def _serve(self, store: Record, config: RunConfig, endpoint: BrokerEndpoint, transport: Transport) -> None:
        """Serve the run to its end. Raises click.Abort if it is interrupted."""
        log_file, display = self._home / "coordinator.log", self._display
        configure_logging(file=log_file, stderr=False, fields={"run": self._name})
        self._worker.begin(run=self._name, config=config, folder=self._home, log_file=log_file)
        loop = LoopWatch(TICK_S, self._notifier.alive)
        cancellation = Cancellation(store, self._name)
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
            RunSetup(
                run=self._name,
                config=config,
                transport=transport,
                store=store,
                folder=self._home,
                display=display,
                compute=self._worker,
                signer=endpoint.signer,
            ),
            Owner(watch, endpoint.revoke, self._lead or OwnLead),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: coordinator.stop())
        observed = Observed(
            transport,
            lambda: coordinator.inbox.connected,
            store,
            self._request.folder,
            lambda: [Served(coordinator, loop)],
            {},
            certificates=endpoint.read_certificate_ends,
        )
        show_prometheus(self._monitor, display, observed)
        self._notifier.ready()
        try:
            self._run_rounds(coordinator, config, store)
        except Cancelled:
            display.line(f"run {self._name} is cancelled")
            return
        finally:
            self._notifier.stopping()
            endpoint.note_seen(coordinator.state.presence.seen_since, at_once=True)
        display.line(f"finished; tensors: {self._home / 'model.safetensors'}, log: {log_file}")
        self._show_next_steps(store)

    def _run_rounds(self, coordinator: Coordinator, config: RunConfig, store: Record) -> None:
        """Serve until the run is finished. Raises click.Abort if it is interrupted, Cancelled."""
        try:
            with following(self._name, config, store, self._home, self._display.line):
                coordinator.serve()
        except FederationTaken:
            if not store.rounds.find_last(self._name):  # it never began
                store.runs.remove(self._name)
                self._remove()
            raise
        except Cancelled:
            raise
        except Interrupted:
            again = "the same command resumes it"
            if self._lead is None:
                start = command("coordinator", "start", "--resume", self._name, runs=self._request.folder)
                again = f"resume with: {start}"
            self._display.line(f"interrupted; {again}")
            raise click.Abort from None  # for KeyboardInterrupt, click prints an empty line

    def _show_next_steps(self, store: Record) -> None:
        """Name the commands that report and export the run."""
        folder, trained = self._request.folder, import_module("coordinator.views.trained")  # late: onnxruntime
        report = command("coordinator", "report", self._name, "--out", "report.html", runs=folder)
        with suppress(FedvitError):  # the run is finished, whatever can be read of it now
            self._display.line(f"next: {report}; {trained.export_hint(store, folder, self._name)}")


def make_link(endpoint: BrokerEndpoint, broker: BrokerConfig) -> Transport:
    """Connect to a broker. Raises ConfigError if a certificate or key file of its address cannot be used."""
    client_id = f"coordinator-{secrets.token_hex(4)}"
    transport = MqttTransport(SimpleQueue(), endpoint.address, client_id)
    transport.use_limits(broker.broker_limits())
    return transport


def describe_new_run(run: str, config: StartConfig, checked: Checked) -> list[str]:
    """Return the output of `--check` for a run that can begin."""
    asked, broker = config.run, config.broker
    address = f"{broker.broker}, on {broker.listen}:{broker.port}" if "://" not in broker.broker else broker.broker
    if broker.deployment:
        address = f"of deployment {broker.deployment}"
    options = [word for name, value in asked.options.items() for word in ("-o", f"{name}={value}")]
    options += [word for name, value in asked.model_options.items() for word in ("--model-option", f"{name}={value}")]
    plan = command("coordinator", "plan", "--method", asked.method, "--model", asked.model, *options, "--device", "ID")
    return [
        f"run {run} can begin: {_describe(asked)}, server on {checked.accelerator}",
        f"  model of {checked.parameters:,} parameters; classes: {', '.join(asked.classes) or 'those of the devices'}",
        f"  {settings_words(run_settings(asked))}",
        f"  waits for {format_count(asked.devices, 'device')} in federation {asked.federation}; broker: {address}",
        f"what it costs on a board: {plan}",
    ]


def _describe(config: RunConfig) -> str:
    return f"{config.method} on {config.model}, {config.rounds} rounds"
