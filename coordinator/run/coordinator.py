"""The run: waits for devices, asks them round by round, and turns their results into the next state.

Whatever a device is told is in the store first: after `kill -9` the same round goes on with the devices that
come back.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from coordinator.compute.messages import (
    Compute,
    FindOutliers,
    Finish,
    LearningRates,
    Prepare,
    Request,
    Step,
    Stepped,
)
from coordinator.config import RunConfig
from coordinator.record.backups import Backups
from coordinator.record.integrity import DamagedBlob, SoundBlobs, beyond_repair, essential, what_it_held
from coordinator.record.retention import oldest_kept
from coordinator.record.store import Store
from coordinator.record.summary import round_line
from coordinator.record.tables import ResultRecord, RoundRecord
from coordinator.run.collector import ResultCollector
from coordinator.run.device_profiles import Targets
from coordinator.run.display import Display, View
from coordinator.run.inbox import Inbox, Interrupted
from coordinator.run.membership import Membership
from coordinator.run.modes import MODES
from coordinator.run.open_round import OpenRound
from coordinator.run.presence import Presence
from coordinator.run.quarantine import Quarantine
from coordinator.run.scheduler import TaskScheduler
from coordinator.run.selector import CohortSelector
from coordinator.run.state import RunState
from coordinator.run.status import Reporter
from coordinator.run.tasks import Assignments, Work
from coordinator.run.validation import ROOM_BYTES, listed
from fedvit.descriptors import USED_UP
from fedvit.errors import BadPayload, ConfigError, EmptyCohort, FedvitError, NoRoom, StorageFailed
from fedvit.files import atomic_write, storage_failed
from fedvit.resources import Budget, BudgetKind, ResourceUse
from fedvit.transport.base import Transport, Will
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import (
    AnyMessage,
    CoordinatorState,
    Declined,
    DeviceState,
    Done,
    Failed,
    FromCoordinator,
    Hello,
    Progress,
    Result,
    RunEnded,
    Want,
    encode,
)
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

DAMAGED_HERE = "is damaged on the coordinator's disk"
ROOM_EVERY_S = 2.0
"""How often a paused run tries whether the disk takes a file of ROOM_BYTES."""
PARTIAL_KEPT_S = 24 * 3600.0
"""How long half an upload is kept for a device that may go on with it."""
ATTEMPTS = 3
"""Times that a round which brought no usable result is tried before the run gives up."""
DAMAGES = 3
"""Times that the same file is made anew, and that a round is asked again for damaged results: then the disk is at fault
and the run gives up."""


class Cancelled(Interrupted):
    """The operator asked for the end of the run; it cannot be resumed."""


class Coordinator:
    """One run of one federation. `serve` returns when the run is finished; raises Interrupted when stopped."""

    def __init__(
        self,
        *,
        run: str,
        config: RunConfig,
        transport: Transport,
        store: Store,
        folder: Path,
        display: Display,
        compute: Compute,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = run
        self.config = config
        self.transport = transport
        self.store = store
        self.folder = folder
        self.blobs = SoundBlobs(folder / "blobs")
        self.display = display
        self.compute = compute
        self.topics = Topics(config.federation)
        self.presence = Presence()
        self.assignments = Assignments()
        self.course = RunState(run, config, store, self.blobs, self._say, config.classes)
        compute.progress = self.course.set_doing
        self.inbox = Inbox(
            transport,
            self.topics,
            on_message=self._on_message,
            on_chunk=lambda topic, payload: self.exchange.heard(topic, payload),
            on_link=self._on_link,
            refuse=lambda device, kind, reason: self.results.refuse(device, kind, reason),
            each_tick=self._tick,
            say=self._say,
        )
        self.exchange = BlobExchange(
            transport,
            self.blobs,
            tell=self.inbox.tell,
            topic_for=self.topics.broadcast,
            may_read=self.assignments.may_read,
            receivers=self._asked_and_here,
            lane_for=self.topics.lane,
        )
        protection = config.protection
        self.quarantine = Quarantine(
            run,
            store,
            limit=protection.strikes,
            rounds=protection.quarantine_rounds,
            began=lambda device: self.reception.put_away(device),
        )
        self.backups = Backups(store, run, folder, config.backup_every)
        self.results = ResultCollector(
            run=run,
            config=config,
            store=store,
            blobs=self.blobs,
            exchange=self.exchange,
            topics=self.topics,
            presence=self.presence,
            assignments=self.assignments,
            answer=self.inbox.tell,
            released=lambda device: self.dispatch.give_open(device),
            say=self._say,
            strike=self.quarantine.strike,
            note=self.backups.note,
        )
        self.dispatch = TaskScheduler(
            course=self.course,
            presence=self.presence,
            assignments=self.assignments,
            results=self.results,
            exchange=self.exchange,
            tell=self.inbox.tell,
            epoch=lambda: self.inbox.epoch,
        )
        self.reception = Membership(
            course=self.course,
            presence=self.presence,
            quarantine=self.quarantine,
            results=self.results,
            dispatch=self.dispatch,
            exchange=self.exchange,
            tell=self.inbox.tell,
            epoch=lambda: self.inbox.epoch,
        )
        self.targets = Targets(run, store, self.presence, config.budget.limits())
        self.asking = CohortSelector(
            course=self.course,
            compute=compute,
            inbox=self.inbox,
            presence=self.presence,
            quarantine=self.quarantine,
            targets=self.targets,
            assignments=self.assignments,
            results=self.results,
            dispatch=self.dispatch,
            reception=self.reception,
        )
        self.mode = MODES[config.mode](self.asking)
        self._watch = watch
        self._reporter = Reporter(folder)
        self._made_good: Counter[str] = Counter()  # digests of blobs that were damaged, and how often
        self._excused: set[tuple[str, str]] = set()  # (device, digest): it got a damaged blob from here
        self._restoring = False
        self._cancelled: str | None = None  # why the run is to end

    # --- the course of a run --------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask `serve` to end; safe from a signal handler."""
        self.inbox.stop()

    def cancel(self, reason: str) -> None:
        """Ask `serve` to end the run for good; safe from any thread."""
        self._cancelled = reason
        self.inbox.stop()

    def expel(self, device: str, reason: str) -> None:
        """The device may not take part any more: nothing is awaited from it. Call it in the thread of `serve`."""
        self.reception.expel(device, reason)

    def serve(self) -> None:
        """Run, or go on with, all rounds. Raises Interrupted when it was stopped, Cancelled when it was cancelled, and
        FedvitError when the run cannot go on."""
        self.course.classes = self.store.run(self.run).classes or self.config.classes
        self.targets.load()
        for topic in self.topics.from_all_devices:
            self.transport.subscribe(topic, 1)
        farewell = encode(CoordinatorState(0, alive=False))
        self.transport.open(Will(self.topics.coordinator_state, farewell))
        try:
            self._say("connecting to the broker")
            self._with_room(partial(self.inbox.pump, lambda: self.inbox.connected))
            self.backups.check_record()
            self._with_room(partial(self.backups.put_back, self._say))
            self._with_room(self._gather)
            self._with_room(self._course)
        except Interrupted:
            if self._cancelled is not None:
                self.store.update_run(self.run, status="cancelled", reason=self._cancelled)
                self._tell_all(RunEnded(self.run, "cancelled"))
                log.info("run cancelled", extra={"run": self.run, "reason": self._cancelled})
                raise Cancelled from None
            with suppress(StorageFailed):  # a run that is not finished can be resumed, whatever its status is
                self.store.update_run(self.run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(StorageFailed):
                self.store.update_run(self.run, status="failed", reason=str(error))
            self._tell_all(RunEnded(self.run, f"failed: {error}"[:400]))
            raise
        finally:
            if self.inbox.connected:
                self.transport.publish(self.topics.coordinator_state, farewell, qos=1)
            self.transport.close()
            self.inbox.close()

    def _course(self) -> None:
        """Everything that is not done yet, going by the store: after a pause it begins as after a restart."""
        self._prepare()
        self._take_up()
        self._go_on()
        self._finish()

    def _with_room(self, work: Callable[[], object]) -> None:
        """Do work that is safe to begin anew; whenever the disk is full, or no file can be opened any more, pause until
        there is room, and begin anew."""
        while True:
            try:
                work()
                return
            except NoRoom as error:
                self._wait_for_room(error)
            except OSError as error:
                if error.errno not in USED_UP:
                    raise
                self._wait_for_room(storage_failed("cannot open a file or connection", error))
            except DamagedBlob as error:
                self._begin_restoring(error)

    def _begin_restoring(self, error: DamagedBlob) -> None:
        """A file of this run is damaged: nobody is served with it any more, and what is done next makes it anew.

        Devices stay at their tasks, as in a pause. Raises Damaged where that did not help.
        """
        self._made_good[error.digest] += 1
        if self._made_good[error.digest] > DAMAGES:
            held = what_it_held(error.digest, self.run, self.store, self.blobs)
            raise beyond_repair(self.run, error.path, held, f"it was damaged {DAMAGES} times", self._copies())
        self._restoring = True
        self.results.pause()
        self._tell_of_damage()
        self.exchange.stop_sending(error.digest)

    def _tell_of_damage(self) -> None:
        """Name every file that was found to be damaged; devices that are being sent it ask again."""
        for digest in self.compute.damaged():
            self.blobs.report(digest)
        for digest in self.blobs.found():
            self._made_good.setdefault(digest, 0)
            self.exchange.stop_sending(digest)
            held = what_it_held(digest, self.run, self.store, self.blobs)
            path = self.blobs.path(digest)
            self._say(f"run {self.run}: {path} {DAMAGED_HERE}: it held {held}")
            log.error("damaged file", extra={"path": str(path), "held": held})

    def _copies(self) -> str:
        """Older records of the run, for the operator."""
        files = [str(self.backups.file(number)) for number in self.backups.rounds()]
        return f", or put back an older record ({', '.join(files)}; docs/survival.md says how)" if files else ""

    def _wait_for_room(self, error: StorageFailed) -> None:
        """Nothing is lost: devices keep their results, and answer to hellos is given meanwhile."""
        self.results.pause()
        self._restoring = True  # all of it is looked at before the run goes on
        self.course.doing = f"paused, waiting for room: {error}"
        self._say(f"paused: {error}; goes on by itself when there is room again")
        log.error("paused", extra={"reason": str(error)})
        probe = self.folder / "room"
        while True:
            try:
                self.inbox.pump(lambda: False, deadline=time.monotonic() + ROOM_EVERY_S)
                atomic_write(probe, bytes(ROOM_BYTES))
                probe.unlink()
                break
            except NoRoom:  # of the probe, or of what a device made us write
                continue
            except OSError as again:
                if again.errno not in USED_UP:
                    raise
        self._say("there is room again: the run goes on")
        log.info("goes on")

    def _gather(self) -> None:
        """Wait for the first devices; their classes are the run's, unless it has some already."""
        wanted = self.config.devices

        def enough() -> bool:
            online = self.presence.count_online()
            self.course.doing = f"waiting for devices: {online} of {wanted} are here"
            return online >= wanted

        self._say(f"waiting for {wanted} device{'s' if wanted > 1 else ''}")
        self.inbox.pump(enough)
        if not self.course.classes:
            brought = {name: self.presence[name].hello.classes for name in self.presence.online()}
            self.course.classes = tuple(sorted({name for classes in brought.values() for name in classes}))
            self._say(
                f"the run has the {len(self.course.classes)} classes {listed(self.course.classes)}, "
                f"as brought by {listed(list(brought))}; `classes` in the configuration decides them beforehand"
            )
            for device, classes in brought.items():
                log.info("classes taken", extra={"device": device, "classes": len(classes)})
        if len(self.course.classes) < 2:
            raise ConfigError(f"a run needs at least two classes, the devices have {list(self.course.classes)}")
        self.store.update_run(self.run, classes=list(self.course.classes), status="running")

    def _prepare(self) -> None:
        """Make the Program; take up the newest saved state, if there is one."""
        prepared = self._ask(
            Prepare(
                classes=self.course.classes,
                budgets=any(self.presence[name].hello.profile.budget != Budget() for name in self.presence.online()),
                copies=self._copies(),
            )
        )
        self.store.update_run(self.run, program=prepared.program, protocol=prepared.protocol)
        self.course.saved = prepared.saved
        for number in prepared.remade:
            self._say(f"round {number}: its state was made anew, with the same numbers")
        self._restoring = False
        log.info(
            "program ready",
            extra={"program": prepared.program, "groups": prepared.groups, "accelerator": prepared.accelerator},
        )

    def _ask(self, request: Request[Answer]) -> Answer:
        """Devices are served meanwhile; Ctrl-C does not wait for the answer."""
        return self.inbox.in_background(lambda: self.compute.ask(request))

    def _take_up(self) -> None:
        """Tasks of an earlier process whose results still count: their devices are at work, or are asked again.

        Which of them go on, the mode knows.
        """
        newest = self.store.newest_closed(self.run)
        open_round = newest.round + 1 if newest else 1
        self.results.count_in(open_round)  # before anybody can bring a late result
        if not self.config.uses_late_results():
            return
        tasks = [
            task
            for task in self.store.unanswered(self.run)
            if self.mode.goes_on(task.round, open_round)
            and all(map(self.blobs.has, (task.program, *task.groups.values())))
        ]
        asked = LearningRates(tasks=[(task.device, task.round) for task in tasks])
        scales = self._ask(asked) if tasks else []
        for task, scale in zip(tasks, scales, strict=True):
            program = self.course.program(task.program)
            work = Work(task.program, program, task.groups, expected=None, lr_scale=scale)
            self.dispatch.give(task.device, task.round, "train", work)

    def _go_on(self) -> None:
        """All rounds that are not done yet, from wherever an earlier process got to."""
        first_open = min((record.round for record in self.store.open_rounds(self.run)), default=None)
        done = first_open - 1 if first_open else self.store.last_round(self.run)
        for number in range(max(1, done), self.config.rounds + 1):  # the last that is closed may lack its evaluation
            record = self.store.round(self.run, number)
            self.course.number = number
            if record is None or record.closed_at is None:
                self._train(number, record)
                record = None
            due = number % self.config.evaluate_every == 0 or number == self.config.rounds
            if due and not (record and record.evaluated):
                self.asking.evaluate(leave=self.mode.busy())
                self.store.round_evaluated(self.run, number)
            if record is None:
                self._report(number)

    def _finish(self) -> None:
        self._ask(Finish(saved=self.course.newest()))
        self.store.update_run(self.run, status="finished")
        self._tell_all(RunEnded(self.run, "finished"))
        log.info("run finished", extra={"run": self.run})

    # --- one round ------------------------------------------------------------------------------------

    def _train(self, number: int, record: RoundRecord | None) -> None:
        """Ask devices to train, and move the state. Raises EmptyCohort after ATTEMPTS fruitless tries."""
        course = self.course
        fruitless, damaged = 0, 0
        while fruitless < ATTEMPTS:
            began = time.monotonic()
            opened = self.mode.train(record)
            record = None
            results = self.store.used_in(self.run, number)
            if gone := opened.accepted - {result.device for result in results}:
                raise self.store.damaged(f"the result of {min(gone)} for round {number} is not in it any more")
            if lost := self.inbox.in_background(partial(self._damaged_of, results)):
                damaged += 1
                self._ask_again_for(lost, give_up=damaged > DAMAGES)
                record = self.store.round(self.run, number)
                continue
            trained_s = time.monotonic() - began
            try:
                stepped = self._step(opened, results)
            except EmptyCohort as error:
                if opened.failed and opened.failed.keys() <= opened.declined:  # nobody is to blame: they are waited for
                    continue
                fruitless += 1
                self._say(f"round {number}: {error}; asking again ({fruitless} of {ATTEMPTS})")
                log.warning("empty round", extra={"round": number, "reason": str(error)})
                continue
            figures = stepped.figures | {
                "cohort": float(len(opened.cohort)), "accepted": float(len(results)), "devices_s": trained_s,
                "server_s": time.monotonic() - began - trained_s, "declined": float(len(opened.declined)),
                "late": float(sum(result.round < number for result in results)),
            }  # fmt: skip
            course.saved = stepped.saved
            self.store.close_round(self.run, number, course.saved, figures)
            self.inbox.in_background(partial(self.backups.after_round, number))
            oldest = oldest_kept(number, self.config.keep_rounds, self.backups.since(number))
            if oldest is not None:
                self.store.thin(self.run, oldest)
            if number == self.config.rounds:
                self.dispatch.dismiss(self.assignments, "the last round is closed")
            freed = self.blobs.prune(stepped.needed | self._still_needed(number), PARTIAL_KEPT_S)
            log.info("round closed", extra={"round": number, "freed_bytes": freed, **figures})
            return
        raise EmptyCohort(f"round {number}: no usable result in {ATTEMPTS} attempts; see `coordinator show {self.run}`")

    def _step(self, opened: OpenRound, results: list[ResultRecord]) -> Stepped:
        """The next state; devices stay served meanwhile. Raises EmptyCohort when there is nothing to make it of."""
        course, number = self.course, opened.number
        if not results:
            raise EmptyCohort(f"none of the devices that were asked brought a result for round {number}")
        course.doing = f"round {number}/{self.config.rounds}: server step"
        # the quarantines that follow hold in this step already
        for device, reason in self._ask(FindOutliers(round=number)) if self.config.protection.reject_scale else ():
            self.results.refuse(device, "train", f"left out: {reason}", number)
            self._say(f"round {number}: {device} is left out: {reason}")
            self.quarantine.strike(device, number, reason)
        stepped = self._ask(Step(round=number, saved=course.newest(), drawn=opened.drawn))
        for device, digest in stepped.damaged.items():
            reason = f"its upload of an earlier round {DAMAGED_HERE}"
            self.results.refuse(device, "train", f"left out: {reason}: {self.blobs.path(digest)}", number)
            self._say(f"{device}: {reason}, and is used no more")
        return stepped

    def _damaged_of(self, results: list[ResultRecord]) -> list[ResultRecord]:
        return [result for result in results if result.upload and not self.blobs.is_sound(result.upload)]

    def _ask_again_for(self, lost: list[ResultRecord], *, give_up: bool) -> None:
        """Results whose uploads were damaged since they came: they count no more, and their devices are asked again.

        No device is to blame. Raises Damaged when it was of no use before.
        """
        self._tell_of_damage()
        for result in lost:
            path = self.blobs.path(result.upload or "")
            if give_up:
                held = f"the upload of {result.device} for round {result.round}"
                why = f"devices were asked again {DAMAGES} times, and what they brought was damaged each time"
                raise beyond_repair(self.run, path, held, why, self._copies())
            self.store.drop_result(self.run, result.round, result.kind, result.device)
            reason = f"its upload {DAMAGED_HERE}: {path}; it is asked again"
            self.results.refuse(result.device, result.kind, reason, result.round)
            self._say(f"round {self.course.number}: {result.device}: {reason}")

    def _still_needed(self, number: int) -> set[str]:
        """Blobs of devices that are at work, results that wait for the next server step, and all that it takes to go on
        from the oldest copy of the record: a damaged state is made anew from it, too."""
        since, copies = self.backups.since(number), self.backups.rounds()
        later = self.store.uploads_since(self.run, since + 1)
        for copied in copies if since < number else ():
            if (record := self.store.round(self.run, copied)) and record.state:
                later |= essential(record.state) | set(record.state.uploads.values())
        return later.union(*(assignment.work.offered() for assignment in self.assignments))

    # --- what arrives ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        for line in self.compute.keep():
            self._say(line)
        self._tell_of_damage()
        self.exchange.tick()
        self.results.keep()
        self.dispatch.keep_time()
        self._watch()
        if self.display.due():
            self.display.show(self._view())
        self._reporter.tick(self.course.doing, self.assignments, self.results, self.presence)

    def _on_link(self, up: bool) -> None:
        if up:
            self.exchange.reconnected()
        else:
            self.presence.all_offline()

    def _on_message(self, device: str, message: AnyMessage) -> None:
        match message:
            case Hello():
                self.reception.on_hello(device, message)
            case DeviceState():
                self.reception.on_state(device, message)
            case Result():
                self._learn(device, message, message.use.broke, message.use)
                self.results.on_result(device, message)
            case Failed() if self._is_excused(device, message):
                self.dispatch.give_again(device, anew=False)
            case Failed():
                self._learn(device, message, (message.broke,) if message.broke else (), message.use)
                self.results.on_failed(device, message)
            case Declined():
                self.results.on_declined(device, message)
            case Progress():
                self.dispatch.progressed(device, message)
            case Want():
                if not self._can_serve(device, message.digest):
                    return
                try:
                    self.exchange.on_want(device, message)
                except BadPayload as error:
                    self.results.refuse(device, "blob", str(error))
                else:
                    self.dispatch.wanted(device, message)
            case Done():
                self.exchange.on_done(device, message)
            case _:
                self.results.refuse(device, "message", f"a {type(message).__name__} is not for the coordinator")

    def _can_serve(self, device: str, digest: str) -> bool:
        """Whether a blob is as it was written. Raises DamagedBlob when it is not, once: then it is being restored."""
        if not self.assignments.may_read(device, digest) or self.blobs.is_sound(digest):
            return True
        if not self._restoring:
            self.blobs.check(digest)
        return False  # the device asks again

    def _is_excused(self, device: str, message: Failed) -> bool:
        """Whether a task failed since a blob that it names was damaged here. Raises DamagedBlob when it still is."""
        named = [digest for digest in self.assignments.offered(device) if digest in message.reason]
        for digest in named:
            if not self._restoring:
                self.blobs.check(digest, anew=True)
        ours = {(device, digest) for digest in named if digest in self._made_good} - self._excused
        self._excused |= ours
        return bool(ours)

    def _learn(
        self, device: str, message: Result | Failed, broke: tuple[BudgetKind, ...], use: ResourceUse | None
    ) -> None:
        if assignment := self.assignments.meant(device, message):
            self.targets.learn(device, assignment.work.expected, broke, use)

    def _asked_and_here(self, digest: str) -> int:
        """Devices that have got a task with this blob and not answered it: those that will ask for it."""
        return sum(map(self.presence.is_online, self.assignments.takers(digest)))

    # --- talking --------------------------------------------------------------------------------------

    def _tell_all(self, message: FromCoordinator) -> None:
        for device in self.presence.online():
            self.inbox.tell(device, message)

    def _say(self, text: str) -> None:
        # what a device sends may be quoted in it, and must not steer the terminal
        self.display.line("".join(character if character.isprintable() else "?" for character in text))

    def _report(self, number: int) -> None:
        self._say(round_line(self.store, self.run, number, self.config.rounds))

    def _view(self) -> View:
        opened = self.results.opened
        if opened is None:
            return View(self.course.doing)
        now = time.monotonic()
        missing = opened.waiting_for()
        known = [assignment for device in missing if (assignment := self.assignments.of(device))]
        until_s = max((assignment.deadline.at - opened.opened_at for assignment in known), default=0.0)
        tail = f", waiting for {len(missing)} since {now - opened.opened_at:.0f} s (until {until_s:.0f} s)"
        tail = tail if missing else ""
        return View(
            f"{self.course.doing}{tail}", opened.lines(self.presence, self.assignments, self.results.uploading())
        )
