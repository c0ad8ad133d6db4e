"""The run: waits for devices, asks them round by round, and turns their results into the next state.

Whatever a device is told is in the store first: after `kill -9` the same round goes on with the devices that
come back.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from coordinator.admission import LABELS, ROOM_BYTES, check_hello
from coordinator.checkpoint import load_state, needed_blobs, save_state
from coordinator.cohort import cohort_size, select_fair, select_uniform
from coordinator.config import RunConfig
from coordinator.deadlines import Deadline
from coordinator.display import Display, View
from coordinator.downlink import snapshot
from coordinator.inbox import Inbox, Interrupted
from coordinator.open_round import OpenRound
from coordinator.planner import Plan, Variant, common_groups, make_plan
from coordinator.presence import Presence
from coordinator.privacy import aggregator_of, cohort_seed, round_figures
from coordinator.quarantine import Quarantine
from coordinator.results import Results
from coordinator.screening import Screen
from coordinator.status import Reporter
from coordinator.store import ResultRecord, RoundRecord, SavedState, Store, TaskRecord
from coordinator.summary import round_line
from coordinator.targets import Targets
from coordinator.work import Assignment, Assignments, Work, predicted_s
from fedvit.blobs import BlobStore
from fedvit.errors import (
    BadPayload,
    ConfigError,
    DiskFull,
    EmptyCohort,
    FedvitError,
    LinkDown,
    OverBudget,
    PeerRefused,
)
from fedvit.files import atomic_write
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.program import Role, decode_program
from fedvit.resources import Budget, BudgetKind, ResourceUse
from fedvit.tensors import Array, mapped, pack
from fedvit.transport.base import Transport, Will
from fedvit.transport.exchange import BlobExchange
from fedvit.updates import Decoded
from fedvit.wire.messages import (
    AnyMessage,
    Cancel,
    CoordinatorState,
    Declined,
    DeviceState,
    Done,
    Extended,
    Failed,
    FromCoordinator,
    Hello,
    Progress,
    Refused,
    Result,
    RunEnded,
    Task,
    TaskKind,
    Want,
    Welcome,
    encode,
    inline_room,
)
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

ROOM_EVERY_S = 2.0
"""How often a paused run tries whether the disk takes ROOM_BYTES."""
PARTIAL_KEPT_S = 24 * 3600.0
"""How long half an upload is kept for a device that may go on with it."""
KEEP_TIME_EVERY_S = 0.1
BACK_S = 5.0
"""Longer an evaluation does not wait for devices that have just gone."""
ATTEMPTS = 3
"""Times that a round which brought no usable result is tried before the run gives up."""


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
        accelerator: str,
        graph_cache: Path | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = run
        self.config = config
        self.transport = transport
        self.store = store
        self.folder = folder
        self.blobs = BlobStore(folder / "blobs")
        self.display = display
        self.topics = Topics(config.federation)
        self.presence = Presence()
        self.exchange = BlobExchange(
            transport,
            self.blobs,
            tell=self._tell,
            topic_for=self.topics.broadcast,
            may_read=self._may_read,
            receivers=self._asked_and_here,
            lane_for=self.topics.lane,
        )
        self.assignments = Assignments()
        protection = config.protection
        self.quarantine = Quarantine(
            run, store, limit=protection.strikes, rounds=protection.quarantine_rounds, began=self._put_away
        )
        self.results = Results(
            run=run,
            config=config,
            store=store,
            blobs=self.blobs,
            exchange=self.exchange,
            topics=self.topics,
            presence=self.presence,
            assignments=self.assignments,
            answer=self._tell,
            released=self._on_released,
            say=self._say,
            strike=self.quarantine.strike,
        )
        self.targets = Targets(run, store, self.presence, config.budget.limits())
        self.inbox = Inbox(
            transport,
            self.topics,
            on_message=self._on_message,
            on_chunk=self.exchange.heard,
            on_link=self._on_link,
            refuse=self.results.refuse,
            each_tick=self._tick,
            say=self._say,
        )
        self._accelerator = accelerator
        self._graph_cache = graph_cache
        self._watch = watch
        self._classes: tuple[str, ...] = config.classes
        self._plan: Plan | None = None
        self._saved: SavedState | None = None
        self._offered: dict[str, set[str]] = {}  # device -> digests that it may read
        self._headline = ""
        self._reporter = Reporter(folder)
        self._time_kept_at = -math.inf
        self._round = 1
        self._drawn: tuple[int, int] | None = None  # devices that were here and how many were drawn, if by this process

    # --- the course of a run --------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask `serve` to end; safe from a signal handler."""
        self.inbox.stop()

    def expel(self, device: str, reason: str) -> None:
        """The device may not take part any more: nothing is awaited from it. Call it in the thread of `serve`."""
        opened = self.results.opened
        self.results.refuse(device, "revoked", reason, opened.number if opened else None)
        if device in self.presence:
            self.presence.dismiss(device)
        if opened:
            opened.fail(device, reason)
        self.exchange.drop_peer(device)
        self.results.device_left(device)
        log.warning("device expelled", extra={"device": device, "reason": reason})

    def serve(self) -> None:
        """Run, or go on with, all rounds. Raises Interrupted, and FedvitError when the run cannot go on."""
        self._classes = self.store.run(self.run).classes or self.config.classes
        self.targets.load()
        for topic in self.topics.from_all_devices:
            self.transport.subscribe(topic, 1)
        farewell = encode(CoordinatorState(0, alive=False))
        self.transport.open(Will(self.topics.coordinator_state, farewell, retain=True))
        try:
            self._say("connecting to the broker")
            self.inbox.pump(lambda: self.inbox.connected)
            self._with_room(self._gather)
            self._with_room(self._course)
        except Interrupted:
            with suppress(DiskFull):  # a run that is not finished can be resumed, whatever its status is
                self.store.update_run(self.run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(DiskFull):
                self.store.update_run(self.run, status="failed", reason=str(error))
            self._tell_all(RunEnded(self.run, f"failed: {error}"[:400]))
            raise
        finally:
            if self.inbox.connected:
                self.transport.publish(self.topics.coordinator_state, farewell, qos=1, retain=True)
            self.transport.close()

    def _course(self) -> None:
        """Everything that is not done yet, going by the store: after a pause it begins as after a restart."""
        self._prepare()
        self._take_up()
        self._go_on()
        self._finish()

    def _with_room(self, work: Callable[[], None]) -> None:
        """Do work that is safe to begin anew; whenever the disk is full, pause until there is room, and begin anew."""
        while True:
            try:
                work()
                return
            except DiskFull as error:
                self._wait_for_room(error)

    def _wait_for_room(self, error: DiskFull) -> None:
        """Nothing is lost: devices keep their results, and answer to hellos is given meanwhile."""
        self.results.pause()
        self._headline = f"paused, waiting for room on the disk: {error}"
        self._say(f"paused: {error}; goes on by itself when there is room again")
        log.error("paused", extra={"reason": str(error)})
        probe = self.folder / "room"
        while True:
            try:
                self.inbox.pump(lambda: False, deadline=time.monotonic() + ROOM_EVERY_S)
                atomic_write(probe, bytes(ROOM_BYTES))
                probe.unlink()
                break
            except DiskFull:  # of the probe, or of what a device made us write
                continue
        self._say("there is room again: the run goes on")
        log.info("goes on")

    def _gather(self) -> None:
        """Wait for the first devices; their classes are the run's, unless it has some already."""
        wanted = self.config.devices

        def enough() -> bool:
            online = self.presence.count_online()
            self._headline = f"waiting for devices: {online} of {wanted} are here"
            return online >= wanted

        self._say(f"waiting for {wanted} device{'s' if wanted > 1 else ''}")
        self.inbox.pump(enough)
        if not self._classes:
            here = [self.presence[name].hello.classes for name in self.presence.online()]
            self._classes = tuple(sorted({name for classes in here for name in classes}))
        if len(self._classes) < 2:
            raise ConfigError(f"a run needs at least two classes, the devices have {list(self._classes)}")
        self.store.update_run(self.run, classes=list(self._classes), status="running")

    def _prepare(self) -> None:
        """Make the Program; take up the newest saved state, if there is one."""
        start = self._start_state()

        def prepare() -> tuple[Plan, str]:
            plan = make_plan(
                self.config,
                self._classes,
                self.blobs,
                start=start,
                budgets=any(self.presence[name].hello.profile.budget != Budget() for name in self.presence.online()),
                cache=self._graph_cache,
                progress=self._set_headline,
            )
            return plan, plan.first.digest

        plan, made = self.inbox.in_background(prepare)
        record = self.store.run(self.run)
        if record.program not in (None, made):
            raise ConfigError(
                f"run {self.run} began with program {record.program}, this software makes {made}: "
                "resume it with the versions it began with"
            )
        self._plan = plan
        self.store.update_run(self.run, program=made, protocol=plan.protocol)
        closed = [record.state for record in self.store.rounds(self.run) if record.state]
        self._saved = closed[-1] if closed else save_state(plan.state, plan.groups, self.blobs, self.config.updates)
        groups = {group: (role.value, len(names)) for group, (role, names) in plan.method.groups(plan.vit).items()}
        log.info("program ready", extra={"program": made, "groups": groups})

    def _start_state(self) -> ServerState | None:
        """What the run that this one starts from ended with. Raises ConfigError when there is no such end."""
        earlier = self.config.start_from
        if earlier is None:
            return None
        states = [record.state for record in self.store.rounds(earlier) if record.state]
        if not states:
            self.store.run(earlier)  # raises when there is none of that name
            raise ConfigError(f"start_from = {earlier!r}: that run closed no round")
        return load_state(states[-1], BlobStore(self.folder.parent / earlier / "blobs"))

    def _take_up(self) -> None:
        """Tasks of an earlier process whose results still count: their devices are at work, or are asked again.

        Those of a round that is open in mode rounds are made again with that round.
        """
        closed = [record.round for record in self.store.rounds(self.run) if record.closed_at is not None]
        open_round = 1 + max(closed, default=0)
        self.results.count_in(open_round)  # before anybody can bring a late result
        if not self.config.uses_late_results():
            return
        buffered = self.config.mode == "buffered"
        for task in self.store.unanswered(self.run):
            if not (buffered or task.round < open_round) or not self.blobs.has(task.program):
                continue
            program = decode_program(self.blobs.get(task.program))
            variant = Variant(task.program, program, self._ready().method_for(task.device, task.round))
            self._assign(task.device, task.round, "train", Work(variant, task.groups, None))
            self._send_task(task.device)

    def _go_on(self) -> None:
        """All rounds that are not done yet, from wherever an earlier process got to."""
        done = {record.round: record for record in self.store.rounds(self.run)}
        for number in range(1, self.config.rounds + 1):
            record = done.get(number)
            if record is None or record.closed_at is None:
                self._train(number, record)
                record = None
            due = number % self.config.evaluate_every == 0 or number == self.config.rounds
            if due and not (record and record.evaluated):
                self._evaluate(number)
            if record is None:
                self._report(number)

    def _finish(self) -> None:
        state = self._state()
        atomic_write(self.folder / "model.safetensors", pack(state.tensors))
        for device in sorted({result.device for result in self.store.results(self.run)}):
            if generated := self._ready().rule.generate(state, device, self.config.seed):
                atomic_write(self.folder / "generated" / f"{device}.safetensors", pack(generated))
        self.store.update_run(self.run, status="finished")
        self._tell_all(RunEnded(self.run, "finished"))
        log.info("run finished", extra={"run": self.run})

    # --- one round ------------------------------------------------------------------------------------

    def _train(self, number: int, record: RoundRecord | None) -> None:
        """Ask devices to train, and move the state. Raises EmptyCohort after ATTEMPTS fruitless tries."""
        plan = self._ready()
        self._round = number
        fruitless = 0
        while fruitless < ATTEMPTS:
            began = time.monotonic()
            buffered = self.config.mode == "buffered"
            opened = self._fill_buffer(number, record) if buffered else self._ask_cohort(number, record)
            record = None
            results = [result for result in self.store.results_from(self.run, number) if result.used_in == number]
            trained_s = time.monotonic() - began
            try:
                state, figures = self._server_step(plan, number, results)
            except EmptyCohort as error:
                if opened.failed and opened.failed.keys() <= opened.declined:  # nobody is to blame: they are waited for
                    continue
                fruitless += 1
                self._say(f"round {number}: {error}; asking again ({fruitless} of {ATTEMPTS})")
                log.warning("empty round", extra={"round": number, "reason": str(error)})
                continue
            figures |= {
                "cohort": float(len(opened.cohort)), "accepted": float(len(results)), "devices_s": trained_s,
                "server_s": time.monotonic() - began - trained_s, "declined": float(len(opened.declined)),
                "late": float(sum(result.round < number for result in results)),
            }  # fmt: skip
            self._saved = save_state(state, plan.groups, self.blobs, self.config.updates, self._saved)
            self.store.close_round(self.run, number, self._saved, figures)
            if number == self.config.rounds:
                self._dismiss(list(self.assignments), "the last round is closed")
            freed = self.blobs.prune(needed_blobs(plan, self._saved) | self._still_needed(number), PARTIAL_KEPT_S)
            log.info("round closed", extra={"round": number, "freed_bytes": freed, **figures})
            return
        raise EmptyCohort(f"round {number}: no usable result in {ATTEMPTS} attempts; see `coordinator show {self.run}`")

    def _still_needed(self, number: int) -> set[str]:
        """Blobs of devices that are at work, and results that wait for the next server step."""
        later = {result.upload for result in self.store.results_from(self.run, number + 1) if result.upload}
        return later.union(*(assignment.offered() for assignment in self.assignments))

    def _ask_cohort(self, number: int, record: RoundRecord | None) -> OpenRound:
        """A round of mode rounds; `record`: an earlier process asked its cohort already."""
        if record is None:
            self.results.count_in(number)
            self.inbox.pump(lambda: self._all_are_back() and bool(self._free() or self.results.counted))
            here = self.quarantine.admitted(self.presence.online(), number)
            free, wanted = self._free(), cohort_size(self.config.cohort, len(here))
            cohort = self._select(free, math.ceil((1 + self.config.over_select) * wanted - 1e-9), number)
            self._drawn = (len(free), len(cohort))
            needed = self._quorum(min(wanted, len(cohort)))
            self.store.open_round(self.run, number, cohort, needed)
        else:  # who is in quarantine since need not be waited for
            cohort = self.quarantine.admitted(record.cohort, number) or record.cohort
            needed = record.needed or self._quorum(len(record.cohort))
        work = self._work(number, cohort)
        if len(work) < len(cohort):
            cohort, needed = list(work), min(needed, self._quorum(len(work)))
            self.store.open_round(self.run, number, cohort, needed)
        self._record_tasks(number, work, work)
        return self._ask(OpenRound(self.run, number, "train", cohort, needed, work))

    def _quorum(self, cohort: int) -> int:
        return max(1, math.ceil(self.config.quorum * cohort - 1e-9))

    def _fill_buffer(self, number: int, record: RoundRecord | None) -> OpenRound:
        """A round of mode buffered: devices are asked as they become free, until there are `buffer` results.

        A device counts once in a round, and is asked once for it: its draws follow from the round, so that it would
        bring the same again.
        """
        asked = list(record.cohort) if record else []
        self.store.open_round(self.run, number, asked, self.config.buffer)
        at_work = {assignment.device for assignment in self.assignments}
        opened = OpenRound(self.run, number, "train", sorted(at_work), self.config.buffer)
        self.results.open(opened)
        opened.cohort = sorted(at_work | self.results.counted)
        opened.accepted |= self.results.counted
        self._headline = f"round {number}/{self.config.rounds}: train"
        while True:
            self.inbox.pump(lambda: self._is_full(opened) or self._vacancies(opened) > 0 or self._is_stuck(opened))
            if self._is_full(opened) or not (vacancies := self._vacancies(opened)):
                break
            chosen = self._select(self._candidates(opened), vacancies, number)
            work = self._work(number, chosen)
            asked += work
            self.store.open_round(self.run, number, asked, self.config.buffer)
            opened.work |= work
            self._record_tasks(number, work, opened.work)
            opened.cohort = sorted({*opened.cohort, *work})
            for device, part in work.items():
                self._assign(device, number, "train", part)
                self._send_task(device)
        self._say_who_is_missing(opened)
        self.results.close()
        return opened

    def _is_full(self, opened: OpenRound) -> bool:
        return len(opened.accepted) >= self.config.buffer

    def _candidates(self, opened: OpenRound) -> list[str]:
        return [device for device in self._free() if device not in opened.failed]

    def _vacancies(self, opened: OpenRound) -> int:
        """How many devices can be asked now; who is at work but offline takes no place."""
        candidates = len(self._candidates(opened))
        if self.config.concurrency is None:
            return candidates
        at_work = sum(self.presence.is_online(assignment.device) for assignment in self.assignments)
        return min(candidates, max(0, self.config.concurrency - at_work))

    def _is_stuck(self, opened: OpenRound) -> bool:
        """Whether nobody is left who could bring another result; those who may come back have the grace to do so."""
        if not (opened.accepted or opened.failed):
            return False
        at_work = list(self.assignments)
        nobody = not any(self.presence.is_online(assignment.device) for assignment in at_work)
        grace_s = self.config.rejoin_grace_s if at_work or self.presence.resting() else 0.0
        return opened.alone(nobody and not self._candidates(opened), grace_s)

    def _free(self) -> list[str]:
        """Who can be asked for the round that counts now."""
        return [
            device
            for device in self._admitted()
            if device not in self.assignments and device not in self.results.counted
        ]

    def _select(self, devices: list[str], wanted: int, number: int) -> list[str]:
        if self.config.selection == "fair":
            return select_fair(devices, wanted, self.config.seed, number, self.store.asked(self.run, number))
        return select_uniform(devices, wanted, cohort_seed(self.config), number)

    def _record_tasks(self, number: int, work: dict[str, Work], all_work: dict[str, Work]) -> None:
        """Before devices are told: what they are asked, and what the whole round is expected to cost."""
        tasks = [TaskRecord(number, device, part.variant.digest, part.groups) for device, part in work.items()]
        self.store.add_tasks(self.run, [task for task in tasks if task.device not in self.results.counted])
        self.store.set_expected(
            self.run, number, {device: part.expected for device, part in all_work.items() if part.expected}
        )

    def _evaluate(self, number: int) -> None:
        """Ask every device that is here how good its model is on its own test images.

        In mode rounds those that are late are left at their work; in mode buffered, where somebody always is at work,
        they are asked when they have answered, and nobody trains meanwhile.
        """
        self._round = number
        # after the broker was started again all were gone for a moment
        patience_s = min(BACK_S, self.config.rejoin_grace_s)
        self.inbox.pump(lambda: not self.presence.may_return(patience_s))
        late = self.assignments if self.config.mode == "rounds" else ()
        work = self._work(number, [device for device in self._admitted() if device not in late])
        if work:
            self._ask(OpenRound(self.run, number, "evaluate", list(work), len(work), work))
        self.store.round_evaluated(self.run, number)

    def _work(self, number: int, cohort: list[str]) -> dict[str, Work]:
        """Every device's Program for the round, and the digests of what the server sends it.

        Whom nothing fits is told so, and left out.
        """
        plan, saved = self._ready(), self._saved
        assert saved is not None  # _prepare ran
        too_small: dict[str, OverBudget] = {}

        def make() -> dict[str, Work]:
            work: dict[str, Work] = {}
            state: ServerState | None = None
            for device in cohort:
                try:
                    variant, expected = plan.given(device, number, self.targets.of(device))
                except OverBudget as error:
                    too_small[device] = error
                    continue
                groups = {
                    group: plan.sent(variant, group, saved.sent(group)) for group in common_groups(variant.program)
                }
                sent = [kept for group, kept in saved.references.items() if groups.get(group) == kept.digest]
                for group in variant.program.with_role(Role.GENERATED):
                    state = state or self._state()
                    made = plan.rule.generate(state, device, self.config.seed)
                    members = {name: made[name] for name in variant.program.names(group)}
                    sent.append(snapshot(members, self.config.updates, self.blobs))
                    groups[group] = sent[-1].digest
                recipes = [recipe for reference in sent for recipe in reference.recipes(self.blobs)]
                work[device] = Work(variant, groups, expected, tuple(recipes))
            return work

        work = self.inbox.in_background(make)
        for device, error in too_small.items():
            self.results.refuse(device, "plan", str(error), number)
            self._tell(device, Refused(self.presence[device].hello.instance, str(error), final=True))
            self.presence.dismiss(device)
            self._say(f"{device} is left out: {error}")
        return work

    def _ask(self, opened: OpenRound) -> OpenRound:
        """Send tasks, and wait until the round closes by quorum, deadlines or absence."""
        self.results.open(opened)
        self._headline = f"round {opened.number}/{self.config.rounds}: {opened.kind}"
        for device in opened.waiting_for():
            self._on_released(device)
        self.inbox.pump(lambda: opened.closes() or opened.given_up(self.presence, self.config.rejoin_grace_s))
        asked = [assignment for assignment in self.assignments if assignment.device in opened.waiting_for()]
        enough = opened.closes()
        for assignment in () if enough else asked:
            opened.fail(assignment.device, "offline")
        self._say_who_is_missing(opened)
        self.results.close()
        if not self._may_be_late(opened.kind):
            if enough:
                self._dismiss(asked, f"late: round {opened.number} has the results that it needs")
            else:
                for assignment in asked:
                    self._give_up(assignment, "offline")
        return opened

    def _on_released(self, device: str) -> None:
        """A device is free: it gets its part of the open round, if that waits for it."""
        opened = self.results.opened
        if opened and device in opened.work and opened.waits_for(device) and device not in self.assignments:
            self._assign(device, opened.number, opened.kind, opened.work[device])
            self._send_task(device)

    def _may_be_late(self, kind: TaskKind) -> bool:
        """Whether a device goes on with its task when its round is over."""
        return kind == "train" and self.config.mode == "rounds" and self.config.late != "refuse"

    def _assign(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        now, limit_s = time.monotonic(), self.config.deadline_limit_s
        if self.config.deadline_s == "auto":
            predicted = predicted_s(work, kind, self.results.links, device, self.blobs)
            deadline = Deadline.expected(now, limit_s, predicted)
        else:
            late_s = limit_s if self._may_be_late(kind) else 0.0
            deadline = Deadline.fixed(now, self.config.deadline_s, late_s)
        self.assignments.give(Assignment(device, number, kind, work, deadline))

    def _keep_time(self) -> None:
        """Whose deadline has passed is given up; who is on its way is told that it has longer."""
        now = time.monotonic()
        if now - self._time_kept_at < KEEP_TIME_EVERY_S:
            return
        self._time_kept_at = now
        for assignment in self.assignments:
            device, deadline = assignment.device, assignment.deadline
            if self.results.waits_for_its_turn(device):
                deadline.sign(now)
            elif (moved_at := self.exchange.moved_at(device)) is not None:
                deadline.sign(moved_at)
            late = self._may_be_late(assignment.kind)
            opened = self.results.opened
            asked = (opened.number, opened.kind) if opened else None
            if opened and now >= deadline.at and asked == (assignment.round, assignment.kind):
                opened.fail(device, "deadline")
            if now >= (deadline.latest if late else deadline.at):
                self._give_up(assignment, "deadline")
            elif not late and self.presence.is_online(device) and (more_s := deadline.extension(now)):
                deadline.told = deadline.at
                self._tell(device, Extended(self.run, assignment.round, assignment.kind, more_s))

    def _give_up(self, assignment: Assignment, reason: str) -> None:
        """Its device brought nothing in time."""
        number, kind = assignment.round, assignment.kind
        if self.results.opened and self.results.opened.kind == kind:
            self.results.opened.fail(assignment.device, reason)
        self.store.add_refusal(self.run, number, assignment.device, kind, f"no result: {reason}")
        self._dismiss([assignment], f"late: round {number} does not wait for it any more", "lost")

    def _dismiss(self, assignments: list[Assignment], reason: str, outcome: str = "cancelled") -> None:
        """Devices need not go on: nothing of their task is kept, here or there."""
        for assignment in assignments:
            self._tell(assignment.device, Cancel(self.run, assignment.round, assignment.kind, reason))
            self.results.cancel(assignment, reason, outcome)
            self._on_released(assignment.device)

    def _say_who_is_missing(self, opened: OpenRound) -> None:
        for reason in ("deadline", "offline"):
            if missing := sorted(device for device, why in opened.failed.items() if why == reason):
                self._say(f"round {opened.number}: {opened.kind} closed without {', '.join(missing)} ({reason})")

    def _send_task(self, device: str) -> None:
        """Give a device what it is assigned, if it is here."""
        assignment = self.assignments.of(device)
        if assignment is None or not self.presence.is_online(device):
            return
        work, digests = assignment.work, assignment.digests()
        self._offered[device] = assignment.offered()
        instance = self.presence[device].hello.instance
        deadline, now = assignment.deadline, time.monotonic()
        deadline.told = deadline.latest if self._may_be_late(assignment.kind) else deadline.at
        task = Task(
            instance=instance,
            epoch=self.inbox.epoch,
            run=self.run,
            round=assignment.round,
            kind=assignment.kind,
            seed=self.config.seed,
            program=work.variant.digest,
            groups=work.groups,
            blobs=tuple(self.blobs.manifest(digest) for digest in digests),
            deadline_s=max(1.0, deadline.told - now),
            lr_scale=work.variant.method.lr_scale(assignment.round, self.config.rounds),
            recipes=work.recipes,
        )
        inline = self.blobs.small(assignment.once(), inline_room(task))
        self._tell(device, msgspec.structs.replace(task, inline=inline))

    def _server_step(
        self, plan: Plan, number: int, results: list[ResultRecord]
    ) -> tuple[ServerState, dict[str, float]]:
        """The method's server half, while devices stay served."""
        if not results:
            raise EmptyCohort(f"none of the devices that were asked brought a result for round {number}")
        self._headline = f"round {number}/{self.config.rounds}: server step"

        shapes = {name: value.shape for name, value in plan.values.items()}

        def load(digest: str) -> Mapping[str, Array]:
            return Decoded(mapped(self.blobs.path(digest)), shapes)

        uploads = [
            Upload(
                result.device,
                result.samples,
                result.upload,
                partial(load, result.upload),
                self.config.discount(number - result.round),
            )
            for result in results
            if result.upload
        ]
        protection = self.config.protection
        screened = self.inbox.in_background(lambda: Screen.of(protection).apply(uploads))
        for device, reason in screened.outliers:
            self.results.refuse(device, "train", f"left out: {reason}", number)
            self._say(f"round {number}: {device} is left out: {reason}")
            self.quarantine.strike(device, number, reason)
        context = RoundContext(
            round=number,
            seed=self.config.seed,
            lr_scale=plan.method.lr_scale(number, self.config.rounds),
            vit=plan.vit,
            accelerator=self._accelerator,
            load=load,
            progress=self._set_headline,
            aggregator=aggregator_of(self.config, number),
        )
        state = self.quarantine.cleansed(self._state(), number)
        moved, figures = self.inbox.in_background(lambda: plan.rule.close(state, screened.uploads, context))
        rows = [len(upload.load()[LABELS]) for upload in uploads if self.config.privacy.feature_noise]
        # of a draw by an earlier process nothing is known: no amplification is claimed for it
        population, drawn = self._drawn or (len(results), len(results))
        private = round_figures(
            self.store, self.run, self.config, population=population, cohort=drawn, feature_rows=rows
        )
        self._drawn = None
        return moved, figures | screened.figures | private

    # --- what arrives ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.exchange.tick()
        self.results.keep()
        self._keep_time()
        self._watch()
        if self.display.due():
            self.display.show(self._view())
        self._reporter.tick(self._headline, self.assignments, self.results, self.presence)

    def _on_link(self, up: bool) -> None:
        if up:
            self.exchange.reconnected()
        else:
            self.presence.all_offline()

    def _on_message(self, device: str, message: AnyMessage) -> None:
        match message:
            case Hello():
                self._on_hello(device, message)
            case DeviceState():
                self._on_state(device, message)
            case Result():
                self._learn(device, message, message.use.broke, message.use)
                self.results.on_result(device, message)
            case Failed():
                self._learn(device, message, (message.broke,) if message.broke else (), message.use)
                self.results.on_failed(device, message)
            case Declined():
                self.results.on_declined(device, message)
            case Progress():
                if message.run == self.run and (assignment := self.assignments.meant(device, message)):
                    assignment.progress = message
                    assignment.deadline.progressed(time.monotonic(), message.done_steps, message.total_steps)
            case Want():
                if not message.stalled:  # something arrived there
                    self._sign_of_life(device)
                try:
                    self.exchange.on_want(device, message)
                except BadPayload as error:
                    self.results.refuse(device, "blob", str(error))
            case Done():
                self.exchange.on_done(device, message)
            case _:
                self.results.refuse(device, "message", f"a {type(message).__name__} is not for the coordinator")

    def _sign_of_life(self, device: str) -> None:
        if assignment := self.assignments.of(device):
            assignment.deadline.sign(time.monotonic())

    def _learn(
        self, device: str, message: Result | Failed, broke: tuple[BudgetKind, ...], use: ResourceUse | None
    ) -> None:
        if assignment := self.assignments.meant(device, message):
            self.targets.learn(device, assignment.work.expected, broke, use)

    def _on_hello(self, device: str, hello: Hello) -> None:
        if rival := self.presence.rival(device, hello):
            where = rival.hello.profile.host
            reason = f"a device with id {device!r} is online already (on {where}); choose another with --id"
            self.results.refuse(device, "hello", reason)
            self._tell(device, Refused(hello.instance, reason, final=False))
            return
        try:
            check_hello(hello, self._classes)
        except PeerRefused as error:
            self.results.refuse(device, "hello", str(error))
            self._tell(device, Refused(hello.instance, str(error), final=True))
            return
        if banned := self._banned(device):
            self.results.refuse(device, "hello", banned)
            self._tell(device, Refused(hello.instance, banned, final=True))
            return
        fresh = not self.presence.is_online(device)
        self.presence.arrived(device, hello)
        if fresh:
            log.info(
                "device joined", extra={"device": device, "train": hello.train_samples, "host": hello.profile.host}
            )
            self._say(f"{device} joined: {hello.train_samples} training and {hello.test_samples} test images")
        self._tell(device, Welcome(hello.instance, self.inbox.epoch, self._next_for(device)))
        assignment = self.assignments.of(device)
        if assignment and not self.results.is_uploading(device):
            if fresh:
                assignment.deadline.restart(time.monotonic())
            self._send_task(device)

    def _on_state(self, device: str, state: DeviceState) -> None:
        if self.presence.state_changed(device, state) and not state.online:
            log.info("device left", extra={"device": device})
            self._say(f"{device} left")
            self.exchange.drop_peer(device)
            self.results.device_left(device)

    # --- devices that are not asked -------------------------------------------------------------------

    def _admitted(self) -> list[str]:
        return self.quarantine.admitted(self.presence.available(), self._round)

    def _banned(self, device: str) -> str | None:
        """Why a device need not wait: nothing but the operator ends its quarantine."""
        record = self.quarantine.record_of(device, self._round)
        return None if record is None or record.until_round else self.quarantine.why_not(device, self._round)

    def _next_for(self, device: str) -> str:
        return self.quarantine.why_not(device, self._round) or self._headline

    def _put_away(self, device: str) -> None:
        """A quarantine began: who has to wait long is sent away."""
        self._say(f"{device}: {self.quarantine.why_not(device, self._round)}")
        if (banned := self._banned(device)) and self.presence.is_online(device):
            self._tell(device, Refused(self.presence[device].hello.instance, banned[:500], final=True))
            self.presence.dismiss(device)

    # --- state ----------------------------------------------------------------------------------------

    def _state(self) -> ServerState:
        assert self._saved is not None  # _prepare ran
        return load_state(self._saved, self.blobs, self._ready().values)

    def _ready(self) -> Plan:
        if self._plan is None:
            raise LinkDown("the run is not prepared yet")
        return self._plan

    def _all_are_back(self) -> bool:
        """Whether a round can be opened: not for the first who returns after all were gone for a moment."""
        return bool(self.presence.online()) and not self.presence.may_return(self.config.rejoin_grace_s)

    def _asked_and_here(self, digest: str) -> int:
        """Devices that have got a task with this blob and not answered it: those that will ask for it."""
        here = [assignment.device for assignment in self.assignments if self.presence.is_online(assignment.device)]
        return sum(self._may_read(device, digest) for device in here) if here else 1

    def _may_read(self, peer: str, digest: str) -> bool:
        return digest in self._offered.get(peer, ())

    # --- talking --------------------------------------------------------------------------------------

    def _tell(self, device: str, message: FromCoordinator) -> None:
        self.inbox.tell(device, message)

    def _tell_all(self, message: FromCoordinator) -> None:
        for device in self.presence.online():
            self._tell(device, message)

    def _say(self, text: str) -> None:
        # what a device sends may be quoted in it, and must not steer the terminal
        self.display.line("".join(character if character.isprintable() else "?" for character in text))

    def _set_headline(self, text: str) -> None:
        self._headline = text

    def _report(self, number: int) -> None:
        self._say(round_line(self.store, self.run, number, self.config.rounds))

    def _view(self) -> View:
        opened = self.results.opened
        if opened is None:
            return View(self._headline)
        now = time.monotonic()
        missing = opened.waiting_for()
        known = [assignment for device in missing if (assignment := self.assignments.of(device))]
        until_s = max((assignment.deadline.at - opened.opened_at for assignment in known), default=0.0)
        tail = f", waiting for {len(missing)} since {now - opened.opened_at:.0f} s (until {until_s:.0f} s)"
        tail = tail if missing else ""
        return View(f"{self._headline}{tail}", opened.lines(self.presence, self.assignments, self.results.uploading()))
