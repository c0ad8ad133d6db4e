"""The service: takes runs from the queue of the record, and serves them over one link until it is stopped."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from coordinator.compute.messages import Check, Compute
from coordinator.config import RunConfig, ServiceConfig, make_config
from coordinator.record.leadership import Leadership
from coordinator.record.record import Record
from coordinator.record.retention import lock_run
from coordinator.record.tables import RunRecord
from coordinator.rounds.coordinator import Cancelled, Coordinator
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import TICK_S as RUN_TICK_S
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.leading import Owner
from coordinator.rounds.models.drift import DriftWatcher
from coordinator.rounds.parts import RunSetup
from coordinator.rounds.service.broker import REVOKED, BrokerEndpoint
from coordinator.rounds.service.regular import CleanUps, RegularWork
from coordinator.rounds.service.router import Router, RunTransport
from coordinator.rounds.service.status import MemberStatus, ServiceStatus, write_service_status
from coordinator.security.signing import GraphSigner
from fedvit.errors import ConfigError, FedvitError, LeadershipLost, NoRoom, StorageFailed
from fedvit.logs import thread_log
from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport

log = logging.getLogger(__name__)

TICK_S = 0.1
LOOK_EVERY_S = 1.0
"""Interval of reading the record for new and cancelled runs."""

ComputeOf = Callable[[str, RunConfig, Path], Compute]
"""Starts the compute side of a run, given its name, configuration and folder."""
Follow = Callable[[str, RunConfig, Record, Path, Callable[[str], None]], AbstractContextManager[None]]
"""Lets the configured trackers follow a run while the block lasts."""


class RunHost(NamedTuple):
    """The parts of a service that every run needs."""

    out: Path  # folder of all runs
    store: Record
    display: Display
    compute_of: ComputeOf
    follow: Follow
    leadership: Leadership | None = None  # None: the service need not lead
    signer: GraphSigner | None = None
    regular: tuple[RegularWork, ...] = ()  # beside clean-ups
    drift: DriftWatcher | None = None

    @property
    def term(self) -> int:
        """The term in which the service leads; 0: it need not lead."""
        return self.leadership.term if self.leadership else 0


class ServedRun:
    """One run in its own thread.

    Raises ConfigError if another process serves it, unless that was an earlier leader.
    """

    def __init__(self, record: RunRecord, config: RunConfig, transport: RunTransport, host: RunHost) -> None:
        self.name = record.id
        self.loop = LoopWatch(RUN_TICK_S)
        self.coordinator: Coordinator | None = None  # once it has begun
        self._compute: Compute | None = None  # once it has begun
        self._config = config
        self._transport = transport
        self._host = host
        self._store = host.store
        self._folder = host.out / record.id
        self._display = host.display
        self._expelled: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._stack = ExitStack()
        self._stack.callback(os.close, lock_run(self._folder, record.id, host.term))
        self._thread = threading.Thread(target=self._serve, name=f"run-{record.id}", daemon=True)

    def begin(self) -> None:
        try:
            compute = self._compute = self._host.compute_of(self.name, self._config, self._folder)
            self._stack.callback(compute.close)
            self.coordinator = Coordinator(
                RunSetup(
                    run=self.name,
                    config=self._config,
                    transport=self._transport,
                    store=self._store,
                    folder=self._folder,
                    display=RunDisplay(self.name, self._display),
                    compute=compute,
                    signer=self._host.signer,
                ),
                Owner(self._watch),
            )
            operator_log = RunDisplay(self.name, self._display).line
            self._stack.enter_context(
                self._host.follow(self.name, self._config, self._store, self._folder, operator_log)
            )
        except BaseException:
            self._stack.close()
            raise
        self._thread.start()

    def release(self) -> None:
        """Release the run without beginning it."""
        self._stack.close()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        if self.coordinator:
            self.coordinator.cancel("cancelled by the operator")

    def interrupt(self) -> None:
        if self.coordinator:
            self.coordinator.stop()

    def expel(self, device: str, reason: str) -> None:
        """Exclude a device from the run; nothing changes if it never took part."""
        self._expelled.put((device, reason))

    def _watch(self) -> None:
        self.loop.turn()
        with suppress(Empty):
            while self.coordinator:
                self.coordinator.expel(*self._expelled.get_nowait())

    def _serve(self) -> None:
        assert self.coordinator is not None
        line = self._display.line
        try:
            with thread_log(self._folder / "coordinator.log", {"run": self.name}):
                if not self._store.rounds.find_last(self.name):
                    self._check()
                self.coordinator.serve()
            line(f"run {self.name} is finished")
        except Cancelled:
            line(f"run {self.name} is cancelled")
        except Interrupted:
            line(f"run {self.name} is interrupted")
        except LeadershipLost:  # the service ends, too, and says so
            log.warning("run left to the service that leads", extra={"run": self.name})
        except (FedvitError, OSError) as error:
            line(f"run {self.name} failed: {error}")
        except Exception as error:
            log.exception("run failed", extra={"run": self.name})
            with suppress(StorageFailed):
                self._store.runs.update(self.name, status="failed", reason=f"{type(error).__name__}: {error}"[:1000])
            line(f"run {self.name} failed unexpectedly: {error}; service.log has the traceback")
        finally:
            self._stack.close()

    def _check(self) -> None:
        """Check with torch that the run can begin, which `coordinator submit` leaves to the service; print warnings.

        Raises FedvitError or OSError if it cannot, and marks it as failed.
        """
        assert self._compute is not None
        try:
            where = f"run {self.name}"
            checked = self._compute.ask(Check(config=self._config, where=where, runs=str(self._folder.parent)))
        except (FedvitError, OSError) as error:
            self._store.runs.update(self.name, status="failed", reason=str(error))
            raise
        for note in checked.notes:
            self._display.line(f"run {self.name}: warning: {note}")


class RunDisplay(Display):
    """Prints the lines of one run, with its name."""

    def __init__(self, run: str, display: Display) -> None:
        super().__init__()
        self._run = run
        self._display = display

    def line(self, text: str) -> None:
        self._display.line(f"{self._run}: {text}")


class RunService:
    """Serves the runs that were submitted to the record. `serve` returns when `stop` is set."""

    def __init__(
        self,
        host: RunHost,
        config: ServiceConfig,
        *,
        link: Transport,
        endpoint: BrokerEndpoint,
        stop: threading.Event,
        on_turn: Callable[[], None],
    ) -> None:
        self.loop = LoopWatch(TICK_S, on_turn)
        self._host = host
        self._config = config
        self._store = store = host.store
        self._endpoint = endpoint
        self._display = display = host.display
        self._router = Router(
            link,
            config.federation,
            has_ended=store.runs.has_ended,
            operator_log=display.line,
            leadership=host.leadership,
            store=store,
        )
        if host.drift and self._router.models:
            self._router.models.on_drift = host.drift.on_drift
        self.clean_ups = CleanUps(store, host.out, display.line)
        self._regular = (RegularWork("gc", config.gc_every_h, self.clean_ups.clean, display.line), *host.regular)
        self._running: dict[str, ServedRun] = {}
        self._stop = stop
        self._looked_at = -LOOK_EVERY_S
        self.trouble: NoRoom | None = None  # why no run begins now; may be read from any thread

    def is_connected(self) -> bool:
        """Return whether the broker is connected."""
        return self._router.connected

    def served(self) -> list[ServedRun]:
        """Runs that are being served. May be called from any thread."""
        return list(self._running.values())

    def serve(self) -> None:
        """Serve until stopped; the runs are then interrupted, and the next service resumes them. Raises LeadershipLost
        if another service leads now."""
        self._router.open()
        try:
            while not self._stop.is_set():
                self._router.pump(TICK_S)
                self.loop.turn()
                self._watch()
                if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
                    self._looked_at = time.monotonic()
                    self._look()
        finally:
            for run in self._running.values():
                run.interrupt()
            while not all(run.is_over() for run in self._running.values()):
                self._router.pump(TICK_S)
                self.loop.turn()
            self._endpoint.note_seen(self._router.seen_since, at_once=True)
            for work in self._regular:
                work.close()
            if self._host.drift:
                self._host.drift.close()
            self._router.close()

    def _watch(self) -> None:
        self._endpoint.watch()
        self._endpoint.note_seen(self._router.seen_since)
        for device in self._endpoint.revoked():
            self._expel(device, REVOKED)
        for device, reason, is_last in self._router.limits.take_floods():
            log.warning("flood", extra={"device": device, "reason": reason})
            if not is_last:
                self._display.line(f"{device}: {reason}")
            elif self._endpoint.revoke(device, reason):
                self._display.line(f"{device}: {reason}; its certificate is revoked")
            else:
                self._router.limits.ban(device)
                self._display.line(f"{device}: {reason}; it is banned until this process ends")
                self._expel(device, reason)

    def _expel(self, device: str, reason: str) -> None:
        self._router.expel(device)
        for run in self._running.values():
            run.expel(device, reason)

    def _look(self) -> None:
        """Handle submitted, cancelled and ended runs. On a full disk, or with too many open files, try again later."""
        try:
            self._router.set_labels(self._store.devices.read_labels())
            for name, run in list(self._running.items()):
                if run.is_over():
                    del self._running[name]
                elif self._store.runs.is_cancelled(name):
                    run.cancel()
            for record in self._store.runs.read_submitted():
                if len(self._running) >= self._config.side_by_side:
                    break
                if record.id not in self._running and record.is_due():
                    self._begin(record)
            if self._router.models and self._router.connected:
                self._router.models.look()
            if self._host.drift:
                self._host.drift.look()
            for work in self._regular:  # after it has locked its runs
                work.watch()
            self.trouble = None
        except NoRoom as error:
            if str(error) != str(self.trouble):
                self._display.line(f"paused: {error}")
            self.trouble = error
        self._write_status()

    def _write_status(self) -> None:
        config = self._config
        status = ServiceStatus(
            federation=config.federation,
            broker=str(self._endpoint.address),
            running=sorted(self._running),
            members=[MemberStatus(**member._asdict()) for member in self._router.members()],
            term=self._host.term,
            connected=self._router.connected,
            backup=str(Path(config.backup).resolve()) if config.backup else None,
        )
        write_service_status(self._host.out, status)

    def _begin(self, record: RunRecord) -> None:
        """Serve a run, unless another process does; mark it as failed if it cannot begin."""
        try:
            config = self._config_of(record)
        except ConfigError as error:
            self._failed(record, error)
            return
        transport = RunTransport(self._router, record.id, config.devices_where)
        try:
            run = ServedRun(record, config, transport, self._host)
        except ConfigError as error:
            if error.code != "FV1617":  # else `coordinator start --resume` serves it
                self._failed(record, error)
            return
        if not self._recorded(record, config):
            run.release()
            return
        what = "begins" if record.status == "queued" else "is resumed"
        self._display.line(f"run {record.id} {what}: {config.method} on {config.model}, {config.rounds} rounds")
        for device in self._endpoint.all_revoked():
            run.expel(device, REVOKED)
        try:
            run.begin()
        except NoRoom:
            raise
        except (FedvitError, OSError) as error:
            self._failed(record, error)
        else:
            self._running[record.id] = run

    def _config_of(self, record: RunRecord) -> RunConfig:
        """Raises ConfigError if the run is for another federation, or its configuration is no longer valid."""
        federation = self._config.federation
        values: dict[str, Any] = {"federation": federation, **record.config}
        config = make_config(values, f"run {record.id}").run
        if config.federation != federation:
            raise ConfigError("FV1023", f"federation = {config.federation!r}: this service serves {federation!r}")
        return config

    def _recorded(self, record: RunRecord, config: RunConfig) -> bool:
        """Record the broker; False if the run is no longer queued."""
        broker = self._endpoint.as_record()
        if record.status == "queued":
            return self._store.runs.take_from_queue(record.id, msgspec.to_builtins(config), broker)
        self._store.runs.update(record.id, broker=broker)
        return True

    def _failed(self, record: RunRecord, error: Exception) -> None:
        self._store.runs.update(record.id, status="failed", reason=str(error))
        self._display.line(f"run {record.id} failed: {error}")
