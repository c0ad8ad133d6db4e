"""The run: waits for devices, asks them round by round, and turns their results into the next state.

Whatever a device is told is in the store first: after `kill -9` the same round goes on with the devices that
come back.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coordinator.admission import LABELS, check_hello
from coordinator.checkpoint import load_state, needed_blobs, save_state
from coordinator.cohort import select_cohort
from coordinator.config import RunConfig
from coordinator.display import Display, View
from coordinator.inbox import Inbox, Interrupted
from coordinator.open_round import OpenRound, Work
from coordinator.planner import Plan, common_groups, initial_blobs, make_plan
from coordinator.presence import Presence
from coordinator.privacy import aggregator_of, cohort_seed, round_figures
from coordinator.quarantine import Quarantine
from coordinator.results import Results
from coordinator.screening import Screen
from coordinator.store import ResultRecord, SavedState, Store
from coordinator.summary import round_line
from coordinator.targets import Targets
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, ConfigError, EmptyCohort, FedvitError, LinkDown, OverBudget, PeerRefused
from fedvit.files import atomic_write
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.program import Role
from fedvit.resources import Budget, BudgetKind, ResourceUse
from fedvit.tensors import Tensors, mapped, pack, unpack
from fedvit.transport.base import Transport, Will
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import (
    AnyMessage,
    CoordinatorState,
    DeviceState,
    Done,
    Failed,
    FromCoordinator,
    Hello,
    Progress,
    Refused,
    Result,
    RunEnded,
    Task,
    Want,
    Welcome,
    encode,
)
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

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
        )
        protection = config.protection
        self.quarantine = Quarantine(
            run, store, limit=protection.strikes, rounds=protection.quarantine_rounds, began=self._put_away
        )
        self.results = Results(
            run=run,
            store=store,
            blobs=self.blobs,
            exchange=self.exchange,
            topics=self.topics,
            presence=self.presence,
            answer=self._tell,
            say=self._say,
            strike=self.quarantine.strike,
        )
        self.targets = Targets(run, store, self.presence, config.budget.limits())
        self.inbox = Inbox(
            transport,
            self.topics,
            on_message=self._on_message,
            on_chunk=self.exchange.on_chunk,
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
        self._round = 1
        self._drawn: tuple[int, int] | None = None  # devices that were here and how many were drawn, if by this process

    # --- the course of a run --------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask `serve` to end; safe from a signal handler."""
        self.inbox.stop()

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
            self._gather()
            self._prepare()
            self._go_on()
            self._finish()
        except Interrupted:
            self.store.update_run(self.run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            self.store.update_run(self.run, status="failed", reason=str(error))
            self._tell_all(RunEnded(self.run, f"failed: {error}"[:400]))
            raise
        finally:
            if self.inbox.connected:
                self.transport.publish(self.topics.coordinator_state, farewell, qos=1, retain=True)
            self.transport.close()

    def _gather(self) -> None:
        """Wait for the first devices; their classes are the run's, unless it has some already."""
        wanted = self.config.devices

        def enough() -> bool:
            online = len(self.presence.online())
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
        self._saved = closed[-1] if closed else save_state(plan.state, plan.groups, self.blobs)
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

    def _go_on(self) -> None:
        """All rounds that are not done yet, from wherever an earlier process got to."""
        done = {record.round: record for record in self.store.rounds(self.run)}
        for number in range(1, self.config.rounds + 1):
            record = done.get(number)
            if record is None or record.closed_at is None:
                self._train(number, record.cohort if record else None)
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

    def _train(self, number: int, cohort: list[str] | None) -> None:
        """Ask a cohort to train, and move the state. Raises EmptyCohort after ATTEMPTS fruitless tries."""
        plan = self._ready()
        self._round = number
        if cohort:  # of an earlier process: who is in quarantine since need not be waited for
            cohort = self.quarantine.admitted(cohort, number) or cohort
        for attempt in range(ATTEMPTS):
            if cohort is None:
                self.inbox.pump(lambda: bool(self._admitted()))
                admitted = self._admitted()
                cohort = select_cohort(admitted, self.config.cohort, cohort_seed(self.config), number)
                self._drawn = (len(admitted), len(cohort))
                (self.store.open_round if attempt == 0 else self.store.reopen_round)(self.run, number, cohort)
            began = time.monotonic()
            work = self._work(number, cohort)
            if len(work) < len(cohort):
                cohort = list(work)
                self.store.reopen_round(self.run, number, cohort)
            self.store.set_expected(
                self.run, number, {device: part.expected for device, part in work.items() if part.expected}
            )
            needed = max(1, math.ceil(self.config.quorum * len(cohort) - 1e-9))
            opened = self._ask(OpenRound(self.run, number, "train", cohort, needed, work))
            results = [
                result for result in self.store.results(self.run, number, "train") if result.device in opened.accepted
            ]
            trained_s = time.monotonic() - began
            try:
                state, figures = self._server_step(plan, number, results)
            except EmptyCohort as error:
                self._say(f"round {number}: {error}; asking again ({attempt + 1} of {ATTEMPTS})")
                log.warning("empty round", extra={"round": number, "reason": str(error)})
                cohort = None
                continue
            figures |= {
                "cohort": float(len(cohort)), "accepted": float(len(results)), "devices_s": trained_s,
                "server_s": time.monotonic() - began - trained_s,
            }  # fmt: skip
            self._saved = save_state(state, plan.groups, self.blobs)
            self.store.close_round(self.run, number, self._saved, figures)
            freed = self.blobs.prune(needed_blobs(plan, self._saved))
            log.info("round closed", extra={"round": number, "freed_bytes": freed, **figures})
            return
        raise EmptyCohort(f"round {number}: no usable result in {ATTEMPTS} attempts; see `coordinator show {self.run}`")

    def _evaluate(self, number: int) -> None:
        """Ask every device that is here how good its model is on its own test images."""
        self._round = number
        work = self._work(number, self._admitted())
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
                    group: plan.sent(variant, group, saved.groups[group]) for group in common_groups(variant.program)
                }
                for group in variant.program.with_role(Role.GENERATED):
                    state = state or self._state()
                    made = plan.rule.generate(state, device, self.config.seed)
                    members = {name: made[name] for name in variant.program.names(group)}
                    groups[group] = self.blobs.put(pack(members)).digest
                work[device] = Work(variant, groups, expected)
            return work

        work = self.inbox.in_background(make)
        for device, error in too_small.items():
            self.results.refuse(device, "plan", str(error), number)
            self._tell(device, Refused(self.presence[device].hello.instance, str(error), final=True))
            self.presence.dismiss(device)
            self._say(f"{device} is left out: {error}")
        return work

    def _ask(self, opened: OpenRound) -> OpenRound:
        """Send tasks, and wait until the round closes by quorum, deadline or absence."""
        stored = self.store.results(self.run, opened.number, opened.kind)
        opened.accepted |= {result.device for result in stored if result.device in opened.cohort}
        self.results.opened = opened
        self._headline = f"round {opened.number}/{self.config.rounds}: {opened.kind}"
        for device in opened.waiting_for():
            self._send_task(device)
        in_time = self.inbox.pump(
            lambda: opened.closes() or opened.given_up(self.presence, self.config.rejoin_grace_s),
            deadline=opened.opened_at + self.config.deadline_s,
        )
        late = opened.waiting_for()
        if late and not opened.closes():
            reason = "deadline" if not in_time else "offline"
            for device in late:
                opened.failed[device] = reason
                self.store.add_refusal(self.run, opened.number, device, opened.kind, f"no result: {reason}")
            self._say(f"round {opened.number}: {opened.kind} closed without {', '.join(late)} ({reason})")
        self.results.close()
        return opened

    def _send_task(self, device: str) -> None:
        """Give a device its part of the open round, if it is here."""
        opened = self.results.opened
        if opened is None or not self.presence.is_online(device):
            return
        variant, groups, _ = opened.work[device]
        digests = [variant.digest, *initial_blobs(variant.program), *groups.values()]
        self._offered[device] = set(digests)
        instance = self.presence[device].hello.instance
        left_s = self.config.deadline_s - (time.monotonic() - opened.opened_at)
        self._tell(
            device,
            Task(
                instance=instance,
                epoch=self.inbox.epoch,
                run=self.run,
                round=opened.number,
                kind=opened.kind,
                seed=self.config.seed,
                program=variant.digest,
                groups=groups,
                blobs=tuple(self.blobs.manifest(digest) for digest in digests),
                deadline_s=max(1.0, left_s),
                lr_scale=variant.method.lr_scale(opened.number, self.config.rounds),
            ),
        )

    def _server_step(
        self, plan: Plan, number: int, results: list[ResultRecord]
    ) -> tuple[ServerState, dict[str, float]]:
        """The method's server half, while devices stay served."""
        if not results:
            raise EmptyCohort(f"none of the devices that were asked brought a result for round {number}")
        self._headline = f"round {number}/{self.config.rounds}: server step"

        def load(digest: str) -> Tensors:
            return unpack(self.blobs.get(digest))

        uploads = [
            Upload(result.device, result.samples, result.upload, partial(mapped, self.blobs.path(result.upload)))
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
        self._watch()
        self.display.show(self._view())

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
                self._learn(device, message.use.broke, message.use)
                self.results.on_result(device, message)
            case Failed():
                self._learn(device, (message.broke,) if message.broke else (), message.use)
                self.results.on_failed(device, message)
            case Progress():
                if self.results.opened and self.results.opened.asked(message):
                    self.results.opened.progress[device] = message
            case Want():
                try:
                    self.exchange.on_want(device, message)
                except BadPayload as error:
                    self.results.refuse(device, "blob", str(error))
            case Done():
                self.exchange.on_done(device, message)
            case _:
                self.results.refuse(device, "message", f"a {type(message).__name__} is not for the coordinator")

    def _learn(self, device: str, broke: tuple[BudgetKind, ...], use: ResourceUse | None) -> None:
        opened = self.results.opened
        if opened and device in opened.work:
            self.targets.learn(device, opened.work[device].expected, broke, use)

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
        opened = self.results.opened
        if opened and device in opened.waiting_for() and not opened.is_uploading(device):
            self._send_task(device)

    def _on_state(self, device: str, state: DeviceState) -> None:
        if self.presence.state_changed(device, state) and not state.online:
            log.info("device left", extra={"device": device})
            self._say(f"{device} left")
            self.exchange.drop_peer(device)
            self.results.device_left(device)

    # --- devices that are not asked -------------------------------------------------------------------

    def _admitted(self) -> list[str]:
        return self.quarantine.admitted(self.presence.online(), self._round)

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

    def _asked_and_here(self, digest: str) -> int:
        """Devices that have got a task with this blob and not answered it: those that will ask for it."""
        if not (opened := self.results.opened):
            return 1
        return sum(self.presence.is_online(name) and self._may_read(name, digest) for name in opened.waiting_for())

    def _may_read(self, peer: str, digest: str) -> bool:
        return digest in self._offered.get(peer, ())

    # --- talking --------------------------------------------------------------------------------------

    def _tell(self, device: str, message: FromCoordinator) -> None:
        self.inbox.tell(device, message)

    def _tell_all(self, message: FromCoordinator) -> None:
        for device in self.presence.online():
            self._tell(device, message)

    def _say(self, text: str) -> None:
        self.display.line(text)

    def _set_headline(self, text: str) -> None:
        self._headline = text

    def _report(self, number: int) -> None:
        self._say(round_line(self.store, self.run, number, self.config.rounds))

    def _view(self) -> View:
        opened = self.results.opened
        if opened is None:
            return View(self._headline)
        waited_s = time.monotonic() - opened.opened_at
        missing = len(opened.waiting_for())
        until = f"since {waited_s:.0f} s (until {self.config.deadline_s:.0f} s)"
        tail = f", waiting for {missing} {until}" if missing else ""
        return View(f"{self._headline}{tail}", opened.lines(self.presence))
