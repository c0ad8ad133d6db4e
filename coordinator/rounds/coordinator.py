"""The run: waits for devices, asks them round by round, and turns their results into the next state.

Everything is stored before it is sent to a device: after `kill -9` the same round continues with the devices that
return. This is the only module that connects the parts: each gets its dependencies here, and the consequences of its
actions for the other parts are handled in `_follow_up`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from coordinator.compute.integrity import DamagedBlob, VerifiedBlobs, essential
from coordinator.compute.messages import Compute, FindOutliers, Finish, Prepare, Request, Step, Stepped
from coordinator.config import BlobsConfig, RunConfig
from coordinator.config.writing import FILE as CONFIG_FILE
from coordinator.config.writing import as_toml
from coordinator.record.backups import Backups, Closed, Struck
from coordinator.record.record import Record
from coordinator.record.retention import oldest_kept
from coordinator.record.tables import ResultRecord, RoundRecord
from coordinator.rounds.alerts import Alerts
from coordinator.rounds.collector import ResultCollector
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import Inbox, Interrupted
from coordinator.rounds.isolation import ends_run
from coordinator.rounds.lease import FederationTaken, Lease
from coordinator.rounds.membership import Membership
from coordinator.rounds.modes import MODES
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.recovery import DAMAGED_HERE, Recovery
from coordinator.rounds.reporter import Reporter, view
from coordinator.rounds.round_line import round_line
from coordinator.rounds.round_runner import RoundRunner
from coordinator.rounds.scheduler import Overdue, TaskScheduler
from coordinator.rounds.selector import CohortSelector
from coordinator.rounds.sender_limits import Flood
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import TaskState
from coordinator.rounds.validation import MIN_FREE_BYTES, listed, same_but_for_case
from fedvit.descriptors import USED_UP
from fedvit.errors import ConfigError, EmptyCohort, FedvitError, LeadershipLost, NoRoom, StorageFailed
from fedvit.files import atomic_write, storage_failed
from fedvit.hints import command
from fedvit.quantities import format_count
from fedvit.resources import Budget
from fedvit.terminal import escape_line
from fedvit.transport.base import Transport
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.limits import LEAST_PAYLOAD_BYTES
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobPut,
    CoordinatorState,
    Declined,
    DeviceState,
    Failed,
    FromCoordinator,
    Hello,
    Progress,
    Result,
    RunEnded,
    TransferMessage,
)
from fedvit.wire.topics import TOPIC_BYTES, Topics
from fedvit.wire.transfer import CHUNK_HEAD_BYTES, chunk_bytes_within

if TYPE_CHECKING:
    from coordinator.rounds.object_store import ObjectStore

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FREE_SPACE_CHECK_S = 2.0
"""How often a paused run tries to write a file of MIN_FREE_BYTES."""
PAUSE_CHECK_S = 1.0
"""How often a run that the operator paused looks whether it may continue."""
PARTIAL_KEPT_S = 24 * 3600.0
"""How long a partial upload is kept for a device that may continue it."""
ATTEMPTS = 3
"""The run fails after this many attempts at a round without a usable result."""


class Cancelled(Interrupted):
    """The operator cancelled the run; it cannot be resumed."""


class Coordinator:
    """One run of one federation. `serve` returns when the run is finished."""

    def __init__(
        self,
        *,
        run: str,
        config: RunConfig,
        transport: Transport,
        store: Record,
        folder: Path,
        display: Display,
        compute: Compute,
        watch: Callable[[], None] = lambda: None,
        revoke: Callable[[str, str], bool] = lambda device, reason: False,
    ) -> None:
        """`revoke` withdraws the certificate of a device that floods the coordinator; False if it has none."""
        self.transport = transport
        self.display = display
        self.compute = compute
        blobs = VerifiedBlobs(folder / "blobs")
        blobs.chunk_bytes = chunk_bytes_within(transport.limits.max_payload_bytes)
        self.backups = Backups(store, run, folder, config.backup_every)
        self.inbox = Inbox(transport, Topics(config.federation), self)
        self.state = state = RunState(
            run,
            config,
            store,
            blobs,
            Topics(config.federation),
            operator_log=self._operator_log,
            send=self.inbox.send,
            classes=config.classes,
            unsent_bytes=transport.pending_bytes,
            limits=transport.limits,
        )
        self.alerts = Alerts(run, config.alerts)
        state.alert = self.alerts.send
        compute.progress = state.set_doing
        self.objects = _object_store(config.blobs, run, blobs)
        if self.objects and self.objects.is_mirror:
            state.mirror = self.objects.mirror
        self.lease = Lease(transport, state.topics, run, self._operator_log)
        self.exchange = BlobExchange(
            transport,
            state.blobs,
            send=self._send_transfer_message,
            topic_for=state.topics.broadcast,
            may_read=state.tasks.may_read,
            receivers=state.tasks.count_receivers,
            dedicated_topic_for=state.topics.chunks_for,
            places=self.objects,
        )
        self.quarantine = Quarantine(run, store, config.robust)
        self.profiles = DeviceProfiles(run, store, state.presence, config.budget.limits())
        self.membership = Membership(state, self.exchange, self.quarantine)
        self.scheduler = TaskScheduler(state, self.exchange)
        self.collector = ResultCollector(state, self.exchange, self.backups, self.profiles)
        self.recovery = Recovery(state, self.exchange, self.backups, compute)
        self.runner = RoundRunner(
            state,
            self.inbox,
            compute,
            selector=CohortSelector(state, self.quarantine),
            profiles=self.profiles,
            membership=self.membership,
            scheduler=self.scheduler,
            collector=self.collector,
        )
        self.mode = MODES[config.mode](self.runner)
        self._folder = folder
        self._watch = watch
        self._revoke = revoke
        self._reporter = Reporter(folder)
        self._cancelled: str | None = None  # reason, once the run is to be cancelled

    def _check_broker(self) -> None:
        """Raises ConfigError if the broker says that it takes less than a blob's chunk needs."""
        announced, chunk = self.transport.announced_packet_bytes, self.state.blobs.chunk_bytes
        needed = chunk + CHUNK_HEAD_BYTES + TOPIC_BYTES
        if announced is not None and announced < needed:
            remedy = f"set max_payload_bytes = {announced - TOPIC_BYTES} in [broker]"
            if announced < LEAST_PAYLOAD_BYTES + TOPIC_BYTES:
                remedy = f"raise its limit to {LEAST_PAYLOAD_BYTES + TOPIC_BYTES} at least"
            raise ConfigError(
                f"the broker takes packets of {announced} bytes, and those with chunks of blobs have {needed}: {remedy}"
            )

    # --- the whole run --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask `serve` to end; safe from a signal handler."""
        self.inbox.stop()

    def cancel(self, reason: str) -> None:
        """Ask `serve` to cancel the run; safe from any thread."""
        self._cancelled = reason
        self.inbox.stop()

    def expel(self, device: str, reason: str) -> None:
        """Exclude a device from the run, and end its tasks, whether this process or an earlier one assigned them. To be
        called in the thread of `serve`."""
        state = self.state
        state.revoked.add(device)
        asked = [task.round for task in state.store.tasks.read_unanswered(state.run) if task.device == device]
        task = state.tasks.of(device)
        if not (asked or task or device in state.presence):
            return  # it never took part
        self.membership.expel(device, reason)
        if task:
            self.collector.dismiss([task], reason, TaskState.REVOKED)
        state.store.tasks.end(state.run, [(number, device) for number in asked], TaskState.REVOKED)
        self._follow_up()

    def serve(self) -> None:
        """Run all remaining rounds. Raises Interrupted if stopped, Cancelled if cancelled, FedvitError if the run
        cannot continue."""
        state = self.state
        state.classes = state.store.runs.read(state.run).classes or state.config.classes
        self.profiles.load()
        for topic in (*state.topics.from_all_devices, state.topics.coordinator_state):
            self.transport.subscribe(topic, 1)
        with suppress(OSError):  # for the operator only; the record holds the configuration
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / CONFIG_FILE).write_text(as_toml(state.run, state.config))
        self.transport.open(self.lease.will)
        try:
            self._operator_log("connecting to the broker")
            self._with_resources(partial(self.inbox.pump, lambda: self.inbox.connected))
            self._check_broker()
            checked = self.inbox.begin(state.store.database.check)
            self.backups.check_record()
            self._with_resources(partial(self.backups.replay_notes, self._operator_log, self.quarantine.strike))
            self._with_resources(partial(self._wait_for_devices, checked))
            self._with_resources(self._all_rounds)
        except (FederationTaken, LeadershipLost) as error:  # the devices belong to the other coordinator
            with suppress(StorageFailed):
                state.store.runs.update(state.run, status="interrupted", reason=str(error))
            raise
        except Interrupted:
            if self._cancelled is not None:
                state.store.runs.update(state.run, status="cancelled", reason=self._cancelled)
                self._send_all(RunEnded(state.run, "cancelled"))
                log.info("run cancelled", extra={"run": state.run, "reason": self._cancelled})
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
            if self.inbox.connected and self.lease.is_held:
                self.lease.end()
            self._reporter.close(state)
            self.transport.close()
            self.inbox.close()
            with suppress(FedvitError):
                record = state.store.runs.read(state.run)
                why = f": {record.reason}" if record.reason else ""
                self.alerts.send("run_stopped", f"the run has stopped, {record.status}{why}")
            self.alerts.close()
            if self.objects:
                self.objects.close()

    def _all_rounds(self) -> None:
        """Do everything that the store lacks: a paused run continues in the same way as a restarted one."""
        self._prepare()
        self._resume_tasks()
        self._remaining_rounds()
        self._finish()

    def _with_resources(self, work: Callable[[], object]) -> None:
        """Do `work`, which can be repeated. If the disk is full or no file can be opened, pause until that has changed,
        and repeat it."""
        while True:
            try:
                work()
                return
            except NoRoom as error:
                self._wait_for_resources(error)
            except OSError as error:
                if error.errno not in USED_UP:
                    raise
                self._wait_for_resources(storage_failed("cannot open a file or connection", error))
            except DamagedBlob as error:  # devices keep their tasks, as in a pause
                self.recovery.begin(error)
                self.collector.pause()

    def _wait_for_resources(self, error: StorageFailed) -> None:
        """Pause the run. Nothing is lost: devices keep their results, and hellos are answered meanwhile."""
        self.collector.pause()
        self.recovery.restoring = True  # all blobs are verified again before the run continues
        self.state.doing = f"paused: {error}"
        self._operator_log(f"paused: {error}; it resumes automatically when that is over")
        log.error("paused", extra={"reason": str(error)})
        self.alerts.send("run_paused", f"the run is paused: {error}")
        probe = self._folder / "room"
        while True:
            try:
                self.inbox.pump(lambda: False, deadline=time.monotonic() + FREE_SPACE_CHECK_S)
                atomic_write(probe, bytes(MIN_FREE_BYTES))
                probe.unlink()
                self.state.store.database.check_reachable()
                break
            except NoRoom:  # in writing the probe, or while handling a device's message
                continue
            except OSError as again:
                if again.errno not in USED_UP:
                    raise
        self._operator_log("disk, open files and record are available again: run resumed")
        log.info("run resumed")

    def _wait_for_devices(self, checked: Future[None]) -> None:
        """Wait for the first devices, and until the whole record has been `checked`. If the configuration lists no
        classes, the run takes those of the devices. Devices of a resumed run that were revoked are not waited for."""
        state, number = self.state, self.state.config.devices
        asked = {device for record in state.store.rounds.read_open(state.run) for device in record.cohort}
        asked |= state.store.devices.read_asked(state.run).keys()

        def enough() -> bool:
            online = state.presence.count_online()
            wanted = max(1, number - len(asked & state.revoked))
            state.doing = f"waiting for devices: {online} of {wanted} are online"
            if checked.done():
                checked.result()
            elif online >= wanted:
                state.doing = "checking the whole record"
            return online >= wanted and checked.done()

        oldest = state.config.min_device_version
        requirement = f", each with fedvit {oldest} or newer" if oldest else ""
        self._operator_log(f"waiting for {number} device{'s' if number > 1 else ''}{requirement}")
        self.inbox.pump(enough)
        if not state.classes:
            brought = {name: state.presence[name].hello.classes for name in state.presence.online()}
            state.classes = tuple(sorted({name for classes in brought.values() for name in classes}))
            self._operator_log(
                f"the run has {format_count(len(state.classes), 'class')}: {listed(state.classes)}, "
                f"as announced by {listed(list(brought))}; set `classes` in the configuration to choose them"
            )
            if alike := same_but_for_case(state.classes):
                self._operator_log(
                    f"warning: {listed(alike)} differ only in upper and lower case, and are different classes"
                )
            empty = {name for device in brought for name in state.presence[device].hello.empty_folders}
            if left_out := sorted(empty - set(state.classes)):
                which = "class folder" if len(left_out) == 1 else "class folders"
                self._operator_log(f"{which} without an image on any device, not of this run: {listed(left_out)}")
            for device, classes in brought.items():
                log.info("classes taken", extra={"device": device, "classes": len(classes)})
        if len(state.classes) < 2:
            raise ConfigError(f"a run needs at least two classes, the devices have {list(state.classes)}")
        state.store.runs.update(state.run, classes=list(state.classes), status="running")

    def _prepare(self) -> None:
        """Make the Program and load the newest state."""
        state = self.state
        self._fetch_mirrored()
        hellos = [state.presence[name].hello for name in state.presence.online()]
        prepared = self._ask(
            Prepare(
                classes=state.classes,
                budgets=any(hello.profile.budget != Budget() for hello in hellos),
                copies=self.recovery.copies(),
            )
        )
        state.store.runs.update(state.run, program=prepared.program, protocol=prepared.protocol)
        self._mirror(essential(prepared.saved))  # it may have been recomputed
        state.saved = prepared.saved
        for number in prepared.remade:
            self._operator_log(f"round {number}: its state was recomputed, with the same numbers")
        self.recovery.restoring = False
        log.info(
            "program ready",
            extra={"program": prepared.program, "groups": prepared.groups, "accelerator": prepared.accelerator},
        )

    def _fetch_mirrored(self) -> None:
        """Fetch from mirrors what an earlier coordinator of the run, or of the one that it starts from, had on its own
        disk; and put there what only this disk has."""
        state = self.state
        if self.objects and self.objects.is_mirror:
            state.doing = "fetching files of the run from its mirror"
            self.inbox.in_background(self.objects.fetch)
            self.inbox.in_background(self.objects.mirror_all)
        if (earlier := state.config.start_from) is not None:
            config = BlobsConfig(**state.store.runs.read(earlier).config.get("blobs", {}))
            here = VerifiedBlobs(self._folder.parent / earlier / "blobs")
            if config.mirror and (other := _object_store(config, earlier, here)):
                with closing(other):
                    self.inbox.in_background(other.fetch)

    def _mirror(self, digests: set[str]) -> None:
        """Put blobs into the run's mirror, if it has one, before the record names them."""
        if mirror := self.state.mirror:
            self.inbox.in_background(lambda: mirror(digests))

    def _ask(self, request: Request[Answer]) -> Answer:
        """Ask the compute side. Devices are served meanwhile; Ctrl-C does not wait for the answer."""
        return self.inbox.in_background(lambda: self.compute.ask(request))

    def _resume_tasks(self) -> None:
        """Assign again the tasks of an earlier process that the mode continues; their results still count."""
        state = self.state
        newest = state.store.rounds.read_newest_closed(state.run)
        open_round = newest.round + 1 if newest else 1
        state.count_in(open_round)  # before any device can bring a late result
        if not state.config.uses_late_results():
            return
        unanswered = state.store.tasks.read_unanswered(state.run)
        for number in sorted({task.round for task in unanswered if self.mode.continues_task(task.round, open_round)}):
            work = self.runner.recorded(task for task in unanswered if task.round == number)
            for device, part in work.items():
                self.runner.assign(device, number, "train", part)

    def _remaining_rounds(self) -> None:
        """Run all rounds that an earlier process has not finished."""
        state, rounds = self.state, self.state.config.rounds
        first_open = min((record.round for record in state.store.rounds.read_open(state.run)), default=None)
        done = first_open - 1 if first_open else state.store.rounds.find_last(state.run)
        for number in range(max(1, done), rounds + 1):  # the last closed round may lack its evaluation
            record = state.store.rounds.read(state.run, number)
            state.number = number
            if record is None:
                self._wait_while_paused(number)
            if record is None or record.closed_at is None:
                self._train(number, record)
                record = None
            due = number % state.config.evaluate_every == 0 or number == rounds
            if due and not (record and record.evaluated):
                self.runner.evaluate(leave=self.mode.busy())
                state.store.rounds.close_evaluation(state.run, number, state.results(number, "evaluate"))
            if record is None:
                self._report(number)

    def _wait_while_paused(self, number: int) -> None:
        """Wait while the operator pauses the run. Devices stay connected, and late results are accepted."""
        run, store, look_at = self.state.run, self.state.store, time.monotonic() + PAUSE_CHECK_S
        if not store.runs.is_paused(run):
            return
        self.state.doing = f"paused by the operator before round {number}"
        unpause = command("coordinator", "unpause", run, runs=store.database.folder)
        self._operator_log(f"{self.state.doing}; {unpause}")
        self.alerts.send("run_paused", f"the run is {self.state.doing}")

        def is_over() -> bool:
            nonlocal look_at
            if time.monotonic() < look_at:
                return False
            look_at = time.monotonic() + PAUSE_CHECK_S
            return not store.runs.is_paused(run)

        self.inbox.pump(is_over)
        self._operator_log("the operator ended the pause")

    def _report(self, number: int) -> None:
        self._operator_log(round_line(self.state.store, self.state.run, number, self.state.config.rounds))

    def _finish(self) -> None:
        run = self.state.run
        self._ask(Finish(saved=self.state.newest()))
        if self.objects and self.objects.is_mirror:
            results = [str(file.relative_to(self._folder)) for file in self._folder.rglob("*.safetensors")]
            self.inbox.in_background(partial(self.objects.mirror_files, self._folder, results))
        self.state.store.runs.update(run, status="finished")
        self._send_all(RunEnded(run, "finished"))
        if self.objects and not self.objects.is_mirror:
            self.objects.prune(set())
        log.info("run finished", extra={"run": run})

    # --- one round ------------------------------------------------------------------------------------

    def _train(self, number: int, record: RoundRecord | None) -> None:
        """Train one round and update the state. Raises EmptyCohort after ATTEMPTS attempts without a result."""
        state, run = self.state, self.state.run
        failed_attempts, damaged = 0, 0
        before_s = self._reporter.devices_s(number) if record else 0.0  # of earlier processes
        while failed_attempts < ATTEMPTS:
            began = time.monotonic()
            opened = self.mode.train(record)
            record = None
            results = state.results(number, "train")
            if missing := opened.accepted - state.store.tasks.find_counted(run, number):
                raise state.store.database.make_damaged_error(
                    f"the result of {min(missing)} for round {number} is missing from it"
                )
            if lost := self.inbox.in_background(partial(self.recovery.damaged_of, results)):
                damaged += 1
                self.recovery.ask_again_for(lost, damaged)
                record = state.store.rounds.read(run, number)
                continue
            trained_s = before_s + time.monotonic() - began
            try:
                stepped = self._step(opened, results)
            except EmptyCohort as error:
                if (
                    opened.failed and opened.failed.keys() <= opened.declined()
                ):  # all declined: wait until some can be asked
                    continue
                failed_attempts += 1
                self._operator_log(f"round {number}: {error}; asking again ({failed_attempts} of {ATTEMPTS})")
                log.warning("empty round", extra={"round": number, "reason": str(error)})
                continue
            figures = stepped.figures | {
                "cohort": float(len(opened.cohort)), "accepted": float(len(results)), "devices_s": trained_s,
                "server_s": before_s + time.monotonic() - began - trained_s, "declined": float(len(opened.declined())),
                "late": float(sum(result.round < number for result in results)),
            }  # fmt: skip
            self._close(number, stepped, figures, results)
            return
        show = command("coordinator", "show", run, runs=state.store.database.folder)
        raise EmptyCohort(f"round {number}: no usable result in {ATTEMPTS} attempts; see `{show}`")

    def _close(self, number: int, stepped: Stepped, figures: dict[str, float], results: Sequence[ResultRecord]) -> None:
        """Store the round's state as the run's newest; remove blobs that are no longer needed."""
        state, saved = self.state, stepped.saved
        self._mirror(essential(saved).union(saved.uploads.values()))
        state.saved = saved
        asked = state.store.tasks.list_asked(state.run, number)
        self.backups.note(Closed(number, asked, stepped.saved, figures))
        with state.store.database.together():
            state.store.rounds.close(state.run, number, stepped.saved, figures, asked, results=results)
            state.store.devices.set_software(state.run, self.membership.take_versions())
        is_last = number == state.config.rounds
        self.inbox.in_background(partial(self.backups.after_round, number, last=is_last))
        oldest = oldest_kept(number, state.config.keep_rounds, self.backups.since(number))
        if oldest is not None:
            state.store.runs.thin(state.run, oldest)
        if is_last:
            self.collector.dismiss(state.tasks, "the last round is closed")
            self._follow_up()
        needed = stepped.needed | self.recovery.still_needed(number)
        unneeded = list(state.blobs.prunable(needed, PARTIAL_KEPT_S))  # now, before devices send new ones
        state.store.database.check_leads()  # none of them is of a later leader, whenever they are removed
        state.blobs.forget_all_but(needed)
        if self.objects:
            self.objects.prune(needed)
        freed = self.inbox.in_background(partial(state.blobs.delete, unneeded))
        log.info("round closed", extra={"round": number, "freed_bytes": freed, **figures})

    def _step(self, opened: OpenRound, results: list[ResultRecord]) -> Stepped:
        """Compute the next state; devices are served meanwhile. Raises EmptyCohort if there is no usable result."""
        state, number = self.state, opened.number
        if not results:
            raise EmptyCohort(f"none of the asked devices returned a result for round {number}")
        state.doing = f"round {number}/{state.config.rounds}: server step"
        self._strike_outliers(number)
        stepped = self._ask(Step(round=number, saved=state.newest(), drawn=opened.drawn))
        for device, digest in stepped.damaged.items():
            reason = f"its upload of an earlier round {DAMAGED_HERE}"
            state.refuse(device, "train", f"left out: {reason}: {state.blobs.path(digest)}", number)
            self._operator_log(f"{device}: {reason}, and is no longer used")
        return stepped

    def _strike_outliers(self, number: int) -> None:
        """Quarantines that follow from this hold in the server step of the round already."""
        for device, reason in self._ask(FindOutliers(round=number)) if self.state.config.robust.reject_scale else ():
            self.state.refuse(device, "train", f"left out: {reason}", number)
            self._operator_log(f"round {number}: {device} is left out: {reason}")
            self._strike(device, number, reason)

    # --- events ---------------------------------------------------------------------------------------

    def on_message(self, device: str, message: AnyMessage) -> None:
        """Handle a message. An error ends only this device's task, unless the record or the disk cannot be used."""
        try:
            self._handle(device, message)
            self._follow_up()
        except Exception as error:
            if ends_run(error):
                raise
            self._isolate(device, type(message).__name__, error)

    def on_chunk(self, device: str, topic: str, payload: bytes) -> None:
        try:
            self.exchange.heard(topic, payload)
        except Exception as error:
            if ends_run(error):
                raise
            self._isolate(device, "chunk", error)

    def on_unreadable(self, device: str, kind: str, reason: str) -> None:
        self.state.refuse(device, kind, reason)

    def on_coordinator(self, state: CoordinatorState) -> None:
        self.lease.on_coordinator(state)

    def on_link(self, *, up: bool, trouble: str) -> None:
        if trouble:
            self._operator_log(f"broker: {trouble}; trying again")
        if up:
            self.state.epoch = self.lease.renew(self.state.spread_s)
            self.exchange.on_reconnect()
        else:
            for task in self.state.tasks:
                task.note_left(self.state.config.rejoin_grace_s)
            self.state.presence.all_offline()

    def on_tick(self) -> None:
        for line in (*self.compute.take_warnings(), *(self.objects.take_lines() if self.objects else ())):
            self._operator_log(line)
        for flood in self.inbox.limits.take_floods():
            self._on_flood(flood)
        self.recovery.report_damage()
        self.exchange.tick()
        self.collector.commit()
        self.scheduler.send_queued()
        for overdue in self.scheduler.overdue(self.collector.uploads(), self.collector.waiting()):
            self._give_up(overdue)
        self._follow_up()
        self._watch()
        if self.display.due():
            self.display.show(view(self.state))
        self._reporter.tick(self.state)

    def _handle(self, device: str, message: AnyMessage) -> None:
        match message:
            case Hello():
                self.membership.on_hello(device, message)
                return
            case DeviceState(online=True):  # `edge-client doctor` asks whether a coordinator is online
                self.inbox.send(device, self.lease.state())
                return
            case DeviceState():
                if self.membership.on_state(device, message):
                    self.collector.device_left(device)
                return
            case Result():
                self.collector.on_result(device, message)
            case Failed():
                task = self.state.tasks.of(device)
                if task and self.recovery.is_excused(device, message):
                    self.scheduler.send_task(task)
                else:
                    self.collector.on_failed(device, message)
            case Declined():
                self.collector.on_declined(device, message)
            case Progress():
                self.scheduler.on_progress(device, message)
            case BlobNack():
                if self.recovery.can_serve(device, message.digest):
                    self.scheduler.on_nack(device, message)
            case BlobPut():
                self.exchange.on_put(device, message)
            case BlobAck():
                self.exchange.on_ack(device, message)
            case _:
                self.state.refuse(device, "message", f"a {type(message).__name__} is not for the coordinator")
        if self.state.presence.should_request_hello(device):
            # a new epoch makes the device send its hello
            self.inbox.send(device, CoordinatorState(self.state.epoch + 1, alive=True))

    def _follow_up(self) -> None:
        """Handle the consequences of the parts' actions for each other; nothing else connects the parts."""
        for arrival in self.membership.take_arrivals():
            if overdue := self.scheduler.on_arrival(arrival.device, was_away=arrival.was_away):
                self._give_up(overdue)
        for device, error in self.collector.take_errors():
            self._isolate(device, "Result", error)
        for task in self.collector.take_to_resend():
            self.scheduler.send_task(task)
        for strike in self.collector.take_strikes():
            self._strike(*strike)
        for device in self.collector.take_freed():
            self.scheduler.assign_open(device)

    def _strike(self, device: str, number: int, reason: str) -> None:
        self.backups.note(Struck(device, number, reason))
        if self.quarantine.strike(device, number, reason):
            self.membership.on_quarantined(device)

    def _on_flood(self, flood: Flood) -> None:
        """A device sends more than any honest one: a strike, and after the last one it is shut out."""
        device, reason, is_last = flood
        self.state.refuse(device, "flood", reason)
        self._strike(device, self.state.number, reason)
        if not is_last:
            self._operator_log(f"{device}: {reason}")
        elif self._revoke(device, reason):
            self._operator_log(f"{device}: {reason}; its certificate is revoked")
        else:
            self.inbox.limits.ban(device)
            self._operator_log(f"{device}: {reason}; it is banned until this process ends")
            self.expel(device, reason)

    def _give_up(self, overdue: Overdue) -> None:
        task, why, reason = overdue
        if why is Missing.CRASHED:
            backoff_s = self.state.presence.crashed(task.device, reason)
            self._operator_log(f"{task.device}: {reason}; it is asked again in {backoff_s:.0f} s at the earliest")
        self.collector.give_up(task, why, reason)

    def _isolate(self, device: str, what: str, error: Exception) -> None:
        """Log and count an unexpected error of this side in handling a device's message; it ends the device's task."""
        log.error("error in handling a message", extra={"device": device, "message_type": what}, exc_info=error)
        reason = f"an error in handling its {what}: {type(error).__name__}: {error}"[:500]
        self.state.refuse(device, "error", reason)
        self._operator_log(f"{device}: {reason}; its task ends, the run continues (the log has details)")
        if task := self.state.tasks.of(device):
            self.collector.fail(task, reason)

    def _send_transfer_message(self, device: str, message: TransferMessage) -> None:
        assert not isinstance(message, BlobPut)  # only devices send them
        self.inbox.send(device, message)

    # --- output ---------------------------------------------------------------------------------------

    def _send_all(self, message: FromCoordinator) -> None:
        for device in self.state.presence.online():
            self.inbox.send(device, message)

    def _operator_log(self, text: str) -> None:
        self.display.line(escape_line(text))  # the text may quote a device, which must not forge a line


def _object_store(config: BlobsConfig, run: str, blobs: VerifiedBlobs) -> "ObjectStore | None":
    if config.url is None:
        return None
    from coordinator.rounds.object_store import ObjectStore  # needs obstore, which other runs do not

    return ObjectStore(config, run, blobs)
