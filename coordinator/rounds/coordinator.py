"""The run: waits for devices, asks them round by round, and turns their results into the next state.

Everything is stored before it is sent to a device: after `kill -9` the same round continues with the devices that
return. `parts` connects the parts of a run, `engine` runs its rounds.
"""

import logging
from contextlib import suppress
from functools import partial

from coordinator.compute.messages import Finish
from coordinator.config.writing import FILE as CONFIG_FILE
from coordinator.config.writing import as_toml
from coordinator.rounds.comparisons import RecordComparisons
from coordinator.rounds.engine import RoundEngine
from coordinator.rounds.events import Events
from coordinator.rounds.history import RecordHistory
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.journal import RecordJournal
from coordinator.rounds.leading import Owner
from coordinator.rounds.lease import FederationTaken
from coordinator.rounds.parts import RunParts, RunSetup
from coordinator.rounds.pausing import repeat_with_resources
from coordinator.rounds.ports import Ports
from coordinator.rounds.preparation import check_broker, prepare, wait_for_devices
from coordinator.rounds.roster import DeviceRoster
from coordinator.rounds.trainer import DeviceTrainer
from fedvit.errors import FedvitError, LeadershipLost, StorageFailed
from fedvit.wire.messages import FromCoordinator, RunEnded

log = logging.getLogger(__name__)

UNOWNED = Owner()


class Cancelled(Interrupted):
    """The operator cancelled the run; it cannot be resumed."""


class Coordinator(RunParts):
    """One run of one federation. `serve` returns when the run is finished."""

    def __init__(self, setup: RunSetup, owner: Owner = UNOWNED) -> None:
        super().__init__(setup)
        self.lead = owner.lead(self)
        self.ports = Ports(
            DeviceRoster(self.state, self.quarantine),
            DeviceTrainer(self),
            RecordJournal(self),
            RecordHistory(setup.run, setup.store),
            RecordComparisons(self),
        )
        self.engine = RoundEngine(setup.run, setup.config, self.ports, step=self.lead.step, report=self.operator_log)
        self.inbox.handler = self._events = Events(self, owner, self.lead.on_tick)

    def expel(self, device: str, reason: str) -> None:
        """Exclude a device from the run, and end its tasks. To be called in the thread of `serve`."""
        self._events.expel(device, reason)

    def serve(self) -> None:
        """Run all remaining rounds. Raises Interrupted if stopped, Cancelled if cancelled, FedvitError if the run
        cannot continue."""
        try:
            self._open()
            self._serve()
        finally:
            self.lead.close()

    def _open(self) -> None:
        state = self.state
        state.classes = state.store.runs.read(state.run).classes or state.config.classes
        self.profiles.load()
        for topic in (*state.topics.from_all_devices, state.topics.coordinator_state):
            self.transport.subscribe(topic, 1)
        with suppress(OSError):  # for the operator only; the record holds the configuration
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CONFIG_FILE).write_text(as_toml(state.run, state.config))
        self.transport.open(self.lease.will)

    def _serve(self) -> None:
        """Do everything, and record how the run ended."""
        state = self.state
        try:
            self._do_everything()
        except (FederationTaken, LeadershipLost) as error:  # the devices belong to the other coordinator
            with suppress(StorageFailed):
                state.store.runs.update(state.run, status="interrupted", reason=str(error))
            raise
        except Interrupted:
            if self.cancelled is not None:
                state.store.runs.update(state.run, status="cancelled", reason=self.cancelled)
                self._send_all(RunEnded(state.run, "cancelled"))
                log.info("run cancelled", extra={"run": state.run, "reason": self.cancelled})
                raise Cancelled from None
            with suppress(StorageFailed):  # an unfinished run can be resumed with any status
                state.store.runs.update(state.run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(StorageFailed):
                state.store.runs.update(state.run, status="failed", reason=str(error))
            self._send_all(RunEnded(state.run, f"failed: {error}"[:400]))
            raise
        finally:
            self._close()

    def _do_everything(self) -> None:
        once_it_can = partial(repeat_with_resources, self)
        self.operator_log("connecting to the broker")
        once_it_can(lambda: self.inbox.pump(lambda: self.inbox.connected))
        check_broker(self)
        checked = self.inbox.begin(self.state.store.database.check)
        self.backups.check_record()
        once_it_can(lambda: self.backups.replay_notes(self.operator_log, self.quarantine.strike))
        once_it_can(lambda: wait_for_devices(self, checked))
        once_it_can(self._run_rounds)

    def _run_rounds(self) -> None:
        """Do everything that the store lacks: a paused run continues in the same way as a restarted one."""
        prepare(self)
        self.engine.resume_tasks()
        self.lead.run(self.engine)
        self._finish()

    def _finish(self) -> None:
        run, best, reason = self.state.run, self.state.best, self.engine.scores.reason
        kept = self.state.store.rounds.read(run, best) if best else None
        if self.state.config.rounds:
            self.ask(Finish(saved=self.state.newest(), best=kept.state if kept else None))
        if self.objects and self.objects.is_mirror:
            results = [str(file.relative_to(self.folder)) for file in self.folder.rglob("*.safetensors")]
            self.inbox.in_background(partial(self.objects.mirror.put_files, self.folder, results))
        self.state.store.runs.update(run, status="finished", reason=reason and f"stopped: {reason}")
        self._send_all(RunEnded(run, "finished", best))
        if self.objects and not self.objects.is_mirror:
            self.objects.prune(set())
        log.info("run finished", extra={"run": run})

    def _close(self) -> None:
        state = self.state
        if self.inbox.connected and self.lease.is_held:
            self.lease.end()
        self.reporter.close(state, self.objects.trouble if self.objects else "")
        self.exchange.cancel()
        self.transport.close()
        self.inbox.close()
        with suppress(FedvitError):
            record = state.store.runs.read(state.run)
            why = f": {record.reason}" if record.reason else ""
            self.alerts.send("run_stopped", f"the run has stopped, {record.status}{why}")
        self.alerts.close()
        if self.objects:
            self.objects.close()
        state.spans.close()

    def _send_all(self, message: FromCoordinator) -> None:
        for device in self.state.presence.online():
            self.inbox.send(device, message)
