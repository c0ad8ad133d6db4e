"""The device's loop: says hello, takes tasks, fetches what they need, works, keeps and sends results.

One thread reads the inbox and owns all state; a worker thread runs the graphs and reports back through
the inbox. Nothing here knows a method, and nothing here blocks on the network.
"""

import contextlib
import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from edge_client.downlink import routes
from edge_client.guard import Exceeded, Guard
from edge_client.identity import Renewal
from edge_client.integrity import Damaged, Integrity
from edge_client.readiness import Readiness
from edge_client.retention import blobs_of_model, retired
from edge_client.runtime import Runtime, Stopped
from edge_client.vault import Vault
from edge_client.workbench import Job, Workbench
from fedvit.blobs import BlobStore, digest_of
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, DataError, FedvitError, OverBudget, PeerRefused, StorageFailed
from fedvit.program import Program, decode_program
from fedvit.resources import DeviceProfile
from fedvit.transport.base import Connected, Disconnected, Received, Transport, Will
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import (
    Apart,
    Cancel,
    CoordinatorState,
    Declined,
    DeviceState,
    Done,
    Extended,
    Failed,
    FromDevice,
    Hello,
    Manifest,
    Progress,
    Refused,
    Result,
    ResultAck,
    RunEnded,
    Task,
    Want,
    Welcome,
    decode,
    encode,
    encode_class_list,
    inline_room,
)
from fedvit.wire.topics import Topics, check_name

log = logging.getLogger(__name__)

TICK_S = 0.1
HELLO_AGAIN_S = 5.0
"""A hello, or what a task came to, is sent again after about this long without an answer; the wait doubles to a
minute."""
AGAIN_MAX_S = 60.0
HELLO_SPREAD_S = 1.0
"""The devices of a fleet that stayed connected say hello to a new coordinator spread over this time."""
RETURN_SPREAD_S = 4.0
"""The devices of a fleet that lost its broker connect again spread over this time."""
SAME_ID_PATIENCE_S = 75.0
"""How long a device waits for its own last will, when its id is said to be taken: 1.5 keepalives and some."""

OTHER_VERSION_PATIENCE_S = 20.0
"""How long a device that heard another wire version waits for a welcome in its own: one stray message ends nobody."""

FETCHED_ANEW = 2
"""So often a task fetches a blob again that this device's disk does not keep as it was written."""

COORDINATOR = "coordinator"
OVER = ("finished", "cancelled")
"""How a run ends that is not resumed."""


class Work(Protocol):
    """Work under way in another thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is done."""


def in_own_thread(work: Callable[[], None], name: str) -> Work:
    """Begin work at once: right for a process that is one device."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class _Worked(NamedTuple):
    """The worker thread finished, one way or the other."""

    job: Job
    result: Result | None
    error: Exception | None


class Resend:
    """When to say something again that was not answered: jittered, doubling."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._wait_s = HELLO_AGAIN_S
        self._due = self._began + self._wait_s

    def is_overdue(self) -> bool:
        """Whether an answer should have come by now, however often it was asked for since."""
        return time.monotonic() >= self._began + HELLO_AGAIN_S

    def due(self) -> bool:
        if time.monotonic() < self._due:
            return False
        self._wait_s = min(AGAIN_MAX_S, 2 * self._wait_s)
        self._due = time.monotonic() + self._wait_s * random.uniform(0.75, 1.25)
        return True

    def hasten(self, within_s: float) -> None:
        """Let it be due at some time in the next `within_s` seconds."""
        self._due = min(self._due, time.monotonic() + random.uniform(0.0, within_s))


@dataclass
class _Pending:
    """What a task came to, and the coordinator has not acknowledged yet."""

    answer: Result | Failed | Declined
    not_known_in: int | None = None  # the epoch in which the coordinator does not serve the task's run
    resend: Resend = field(default_factory=Resend)

    @property
    def is_result(self) -> bool:
        return isinstance(self.answer, Result)


class Agent:
    """One device of a fleet. `serve` runs until `stop` is set, the run ends (`once`), or the coordinator refuses.

    Who drives several from one loop calls what `serve` is made of instead: `open`, then `on_event` for whatever comes
    into the inbox and `on_time` a few times a second until it is `over`, and `leave`. `begin` starts a task's work,
    `exchange` makes what fetches and serves blobs.
    """

    workbench: ClassVar[type[Workbench]] = Workbench

    def __init__(
        self,
        *,
        device: str,
        federation: str,
        transport: Transport,
        data: DeviceData,
        vault: Vault,
        blobs: BlobStore,
        runtime: Runtime,
        profile: DeviceProfile,
        software: str,
        guard: Guard | None = None,
        renewal: Renewal | None = None,
        begin: Callable[[Callable[[], None], str], Work] = in_own_thread,
        exchange: Callable[..., BlobExchange] = BlobExchange,
        readiness: Readiness | None = None,
        integrity: Integrity | None = None,
        labels: dict[str, str] | None = None,
        keep_runs: int | None = None,
    ) -> None:
        self.device = check_name(device, "device id")
        self.topics = Topics(check_name(federation, "federation"))
        self.instance = secrets.token_hex(8)
        self.transport = transport
        self.data = data
        self.vault = vault
        self.blobs = blobs
        self.profile = profile
        self.software = software
        self.labels = labels or {}
        self.keep_runs = keep_runs  # vaults of older runs that are over are removed; None: all stay
        self._integrity = integrity or Integrity(blobs, vault.files)
        self._bench = self.workbench(
            device=self.device,
            data=data,
            vault=vault,
            blobs=blobs,
            integrity=self._integrity,
            runtime=runtime,
            guard=guard or Guard(profile.budget),
            traffic=lambda: (transport.received_bytes, transport.sent_bytes),
            tell=self._tell_progress,
        )
        self.readiness = readiness or Readiness()
        self.renewal = renewal  # of the certificate that this device shows; None: it shows none
        self.exchange = exchange(
            transport, blobs, tell=self._tell_blob, topic_for=self._upload_topic, may_read=self._may_read
        )
        self._inbox = transport.inbox
        self._connected = False
        self._waits_said = False  # the log says already that no coordinator answers
        self._link_trouble = ""
        self._epoch: int | None = None
        self._hello: Resend | None = None  # set while a hello waits for its answer
        self._refused_since: float | None = None
        self._other_version: tuple[PeerRefused, float] | None = None  # heard since the last welcome, and when
        self._job: Job | None = None
        self._begin = begin
        self._worker: Work | None = None
        self._pending: dict[tuple[str, int, str], _Pending] = {}  # by run, round and kind
        self._class_list: Manifest | None = None
        self._ended: RunEnded | None = None
        self._programs: dict[str, Program] = {}
        self._class_list = self._classes_apart()

    # --- the loop -------------------------------------------------------------------------------------

    def serve(self, stop: threading.Event, *, once: bool = False) -> str:
        """Take part until told to stop; returns why it ended. Raises PeerRefused when the refusal is final."""
        self.open()
        try:
            while not stop.is_set():
                with contextlib.suppress(queue.Empty):
                    self.on_event(self._inbox.get(timeout=TICK_S))
                self.on_time()
                if once and self.over:
                    return self.over
            return "stopped"
        finally:
            self.leave()

    def open(self) -> None:
        """Begin to connect; what an earlier process left unacknowledged is sent again. Raises StorageFailed."""
        self.vault.finish_removals()
        for mended in self.vault.mend_all():
            self._integrity.report(mended.what)
            if mended.lost:
                run, number = mended.lost
                self._keep(Failed(run, number, "train", mended.what[:500]))
        for result in self.vault.pending():
            self._keep(result)
        self.transport.subscribe(self.topics.coordinator_state, 1)
        self.transport.subscribe(self.topics.to_device(self.device), 1)
        if self.renewal:
            self.transport.subscribe(self.renewal.answers, 1)
        self.transport.open(self._will)

    def _will(self, connection: int) -> Will:
        farewell = DeviceState(self.instance, online=False, connection=connection)
        return Will(self.topics.device_state(self.device), encode(farewell))

    @property
    def over(self) -> str | None:
        """How the run ended, when it did and no other began."""
        return f"run {self._ended.run} {self._ended.status}" if self._ended and not self._job else None

    def halt(self) -> None:
        """Ask work that is under way to stop at its next step; that it did is told to nobody."""
        if self._job:
            self._job.stop.set()

    def leave(self) -> None:
        """Say goodbye, and wait until no work is under way."""
        self.halt()
        self.exchange.cancel()
        if self._connected:
            farewell = self._will(self.transport.connection)
            self.transport.publish(farewell.topic, farewell.payload, qos=1)
        self.transport.close()
        if self._worker:
            self._worker.join(timeout=30)

    def on_event(self, event: object) -> None:
        """Handle what came into the inbox. Raises PeerRefused when the coordinator refuses for good."""
        match event:
            case Connected():
                self._connected = True
                self._waits_said = False
                self._link_trouble = ""
                log.info("connected to the broker")
                self._say_hello()
                self.exchange.reconnected()
                if self.renewal:
                    self.renewal.connected(self.transport)
            case Disconnected(reason=reason):
                if reason != self._link_trouble:
                    log.warning("no connection to the broker; trying again", extra={"reason": reason})
                self._link_trouble = reason
                self._connected = False
            case Received(topic=topic, payload=payload):
                self._on_received(topic, payload)
            case _Worked():
                self._on_worked(event)

    def on_time(self) -> None:
        """Do what is due; call it a few times a second."""
        if self._job and time.monotonic() > self._job.expires_at:
            # the round is over without us: to go on would only cost energy
            self._fail(self._job, OverBudget(f"not done within the deadline of {self._job.given_s:.0f} s"))
        if self._other_version and time.monotonic() - self._other_version[1] > OTHER_VERSION_PATIENCE_S:
            raise self._other_version[0]
        if self._job is None:
            self._integrity.scrub()
        if not self._connected:
            return
        self.exchange.tick()
        if self.renewal:
            self.renewal.tick(self.transport)
        if self._hello and self._hello.due():
            if self._hello.is_overdue() and not self._waits_said:
                self._waits_said = True
                log.warning(
                    "no coordinator answers; asking again until one does, 'edge-client doctor' looks closer",
                    extra={"federation": self.topics.federation},
                )
            self._say_hello(self._hello)
        if self._hello is None:
            for pending in list(self._pending.values()):
                if pending.not_known_in is None and pending.resend.due():
                    self._send_answer(pending.answer)

    # --- messages -------------------------------------------------------------------------------------

    def _on_received(self, topic: str, payload: bytes) -> None:
        if self.renewal and topic == self.renewal.answers:
            self.renewal.answered(payload)
            return
        if topic not in (self.topics.coordinator_state, self.topics.to_device(self.device)):
            self.exchange.heard(topic, payload)
            return
        try:
            message = decode(payload)
        except BadPayload as error:
            log.warning("message dropped", extra={"reason": str(error)})
            return
        except PeerRefused as error:
            self._on_other_version(error)
            return
        match message:
            case CoordinatorState():
                self._on_coordinator(message)
            case Welcome() if message.instance == self.instance:
                self._on_welcome(message)
            case Refused() if message.instance == self.instance:
                self._on_refused(message)
            case Task() if message.instance == self.instance and message.epoch == self._epoch:
                self._on_task(message)
            case Extended():
                self._on_extended(message)
            case Cancel():
                self._on_cancel(message)
            case ResultAck():
                self._on_ack(message)
            case RunEnded():
                self._on_run_ended(message)
            case Want():
                self._on_want(message)
            case Done():
                self.exchange.on_done(COORDINATOR, message)
            case Apart():
                self.exchange.on_apart(COORDINATOR, message)
            case _:
                pass  # meant for an earlier process with this id

    def _on_other_version(self, error: PeerRefused) -> None:
        """Either the coordinator was replaced by one of another version, or this was damage: a hello tells."""
        if self._other_version is None:
            log.warning("message dropped", extra={"reason": str(error)})
            self._other_version = error, time.monotonic()
            if self._hello is None:
                self._say_hello()

    def _on_want(self, want: Want) -> None:
        try:
            self.exchange.on_want(COORDINATOR, want)
        except (BadPayload, StorageFailed) as error:  # it asks again
            log.warning("the coordinator wants what is not here", extra={"reason": str(error)})

    def _on_coordinator(self, state: CoordinatorState) -> None:
        if not state.alive:
            log.info("the coordinator left; waiting for it")
        elif state.epoch != self._epoch:
            # a hello that is under way may be answered before another one is due
            self._hello = self._hello or Resend()
            self._hello.hasten(HELLO_SPREAD_S)

    def _say_hello(self, resend: Resend | None = None) -> None:
        self._hello = resend or Resend()
        self._send(self._announced())

    def _announced(self) -> Hello:
        data = self.data
        return Hello(
            instance=self.instance,
            software=self.software,
            profile=self.profile,
            classes=() if self._class_list else data.classes,
            train_samples=len(data.train),
            test_samples=len(data.test),
            labels=self.labels,
            connection=self.transport.connection,
            class_list=self._class_list,
        )

    def _classes_apart(self) -> Manifest | None:
        """The blob that names the classes where they do not fit into a hello. Raises DataError where they are too many
        for that, too, and StorageFailed."""
        try:
            encode(self._announced())
        except BadPayload:
            try:
                return self.blobs.put(encode_class_list(self.data.classes))
            except BadPayload as error:
                raise DataError(f"{len(self.data.classes)} class folders cannot be announced: {error}") from error
        return None

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._epoch != welcome.epoch:
            log.info("joined", extra={"device": self.device, "next": welcome.waiting_for})
        self._epoch = welcome.epoch
        self._hello = None
        self._refused_since = None
        self._other_version = None
        for pending in list(self._pending.values()):
            if pending.not_known_in != welcome.epoch:
                pending.not_known_in = None
                self._send_answer(pending.answer)

    def _on_refused(self, refused: Refused) -> None:
        if refused.final:
            raise PeerRefused(f"the coordinator refused device {self.device!r}: {refused.reason}")
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            log.warning("not accepted yet; trying again", extra={"device": self.device, "reason": refused.reason})
        elif now - self._refused_since > SAME_ID_PATIENCE_S:
            raise PeerRefused(f"the coordinator refused device {self.device!r}: {refused.reason}")

    def _on_extended(self, extended: Extended) -> None:
        job = self._job
        if job and job.is_meant(extended):
            now = time.monotonic()
            job.given_s += now + extended.deadline_s - job.expires_at
            job.expires_at = now + extended.deadline_s

    def _on_cancel(self, cancel: Cancel) -> None:
        """Nothing of a task that is at work is kept, nor that it could not be done; a result waits for its answer."""
        key = (cancel.run, cancel.round, cancel.kind)
        if (pending := self._pending.get(key)) and not pending.is_result:
            del self._pending[key]
        if self._job and self._job.is_meant(cancel):
            log.info("task cancelled", extra={"round": cancel.round, "kind": cancel.kind, "reason": cancel.reason})
            self._drop_job()

    def _on_ack(self, ack: ResultAck) -> None:
        key = (ack.run, ack.round, ack.kind)
        pending = self._pending.get(key)
        if pending is None:
            if self._job and self._job.is_meant(ack) and not ack.keep:  # it was given again before this was heard
                self._drop_job()
            return
        if ack.keep:
            log.info("result kept for later", extra={"run": ack.run, "round": ack.round, "reason": ack.reason})
            pending.not_known_in = self._epoch
            return
        del self._pending[key]
        if not isinstance(pending.answer, Result):
            return
        if ack.kind == "train":
            self._settle(ack.run, ack.round, accepted=ack.accepted)
        if not ack.accepted:
            log.warning(
                "result refused", extra={"run": ack.run, "round": ack.round, "kind": ack.kind, "reason": ack.reason}
            )
            if pending.answer.upload:
                with contextlib.suppress(Damaged, StorageFailed):  # it may be why, and is then told
                    self._integrity.check([pending.answer.upload.digest], afresh=True)

    def _settle(self, run: str, number: int, *, accepted: bool) -> None:
        try:
            self.vault.settle(run, number, accepted=accepted)
        except StorageFailed as error:  # the device goes on; started again it sends the result once more
            log.error("result not settled", extra={"run": run, "round": number, "reason": str(error)})

    def _on_run_ended(self, ended: RunEnded) -> None:
        log.info("run ended", extra={"run": ended.run, "status": ended.status})
        over = ended.status in OVER and self._end(ended.run)
        for key, pending in list(self._pending.items()):
            if key[0] == ended.run and (over or not pending.is_result):
                del self._pending[key]
        if self._job and self._job.task.run != ended.run:
            return  # an earlier run's end, late
        self._drop_job()
        self._ended = ended
        if over:
            self._make_room(ended.run)

    def _end(self, run: str) -> bool:
        """Whether the vault knows from now on that nobody will acknowledge results of the run."""
        try:
            self.vault.end(run)
        except FedvitError as error:  # the device stays; results of the run wait on
            log.error("end of the run not noted", extra={"run": run, "reason": str(error)})
            return False
        return True

    def _make_room(self, run: str) -> None:
        """After a run: its blobs go, but those that the device's own model is made of; and vaults of older runs."""
        try:
            if run in self.vault.runs()[:1] and (note := self.vault.noted(run)):
                needed = blobs_of_model(self._program(note.program), note, self.vault)
                freed = self.blobs.prune(keep=needed | self._pinned())
                log.info("blobs removed", extra={"run": run, "bytes": freed})
            for old in [] if self.keep_runs is None else retired(self.vault, self.keep_runs):
                self.vault.remove(old)
                log.info("vault removed", extra={"run": old, "kept": self.keep_runs})
        except (FedvitError, OSError) as error:  # it costs room, and nothing else
            log.error("what the run left stays on the disk", extra={"run": run, "reason": str(error)})

    # --- a task ---------------------------------------------------------------------------------------

    def _on_task(self, task: Task) -> None:
        key = (task.run, task.round, task.kind)
        self._ended = None
        if self._job and self._job.key == key:  # told again: the coordinator was started again, or the link was cut
            self._job.expires_at = time.monotonic() + task.deadline_s
            return
        if (pending := self._pending.get(key)) and isinstance(pending.answer, Result):
            self._send_result(pending.answer)
            return
        self._pending = {key: pending for key, pending in self._pending.items() if pending.is_result}
        self._drop_job()
        if not_now := self.readiness.not_now():
            log.info("task declined", extra={"round": task.round, "kind": task.kind, "reason": not_now.reason})
            self._answer(Declined(task.run, task.round, task.kind, not_now.reason, not_now.again_s, task.task))
            return
        job = self._job = Job(task, time.monotonic() + task.deadline_s, task.deadline_s)
        log.info("task received", extra={"run": task.run, "round": task.round, "kind": task.kind})
        self._gather(job)

    def _gather(self, job: Job) -> None:
        """Get what the task needs and is not here."""
        task = job.task
        manifests = {manifest.digest: manifest for manifest in task.blobs}
        try:
            self.vault.reopen(task.run)
            inline, new_bytes = self._keep_inline(task, manifests)
            job.fetched_bytes += new_bytes
            recipes = task.recipes if self._bench.takes_recipes else ()
            job.routes = routes(dict.fromkeys(task.groups.values()), recipes, manifests, self.blobs.has)
            bases = {route.base for route in job.routes if route.base}
            patches = [recipe.patch.digest for route in job.routes for recipe in route.recipes]
            # what came inside stays though it is not needed: it comes again with the next task, and counts once
            self.blobs.prune(keep={*manifests, *self._pinned(), *bases, *patches, *inline})
            manifests |= {recipe.patch.digest: recipe.patch for recipe in recipes}
            made = {route.target.digest for route in job.routes}
            whole = [digest for digest in task.groups.values() if digest not in made]
            self._fetch(job, [task.program, *patches, *whole], manifests)
        except (FedvitError, OSError) as error:
            self._fail(job, error)

    def _gather_anew(self, job: Job, damaged: Damaged) -> None:
        """Blobs were damaged here: fetch them again, unless this disk keeps nothing as it is written."""
        job.working = False
        job.fetched_anew.update(damaged.digests)
        again = [digest for digest in damaged.digests if job.fetched_anew[digest] > FETCHED_ANEW]
        if again:
            reason = f"blob {again[0]} was fetched {FETCHED_ANEW} times more and is damaged again: replace the disk"
            self._fail(job, StorageFailed(f"{reason} that holds {self.blobs.folder}"))
        else:
            self._gather(job)

    def _keep_inline(self, task: Task, manifests: dict[str, Manifest]) -> tuple[set[str], int]:
        """Blobs that came inside the message need not be fetched: their digests, and how many bytes of them are new.

        Raises BadPayload for one that the task does not describe.
        """
        described = manifests.keys() | {recipe.patch.digest for recipe in task.recipes}
        inline, new_bytes = set[str](), 0
        for content in task.inline:
            digest = digest_of(content)
            if digest not in described:
                raise BadPayload(f"the task brings {len(content)} bytes that it does not describe")
            inline.add(digest)
            if not self.blobs.keeps(digest):  # bytes count though a neighbour in the same folder has them
                self.blobs.put(content)
                new_bytes += len(content)
        return inline, new_bytes

    def _fetch(self, job: Job, digests: list[str], manifests: dict[str, Manifest]) -> None:
        """Get blobs, then what the Program names in turn, then start the work."""
        unknown = [digest for digest in digests if digest not in manifests]
        if unknown:
            self._fail(job, BadPayload(f"the task names blob {unknown[0]} but does not describe it"))
            return
        job.missing = set(digests)
        job.fetched_bytes += sum(manifests[digest].size for digest in job.missing if not self.blobs.has(digest))

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if job is not self._job:
                return
            if error:
                self._fail(job, error)
                return
            job.missing.discard(manifest.digest)
            if not job.missing:
                self._fetched(job, manifests)

        for digest in sorted(job.missing):
            if job is self._job:
                lane = self.topics.lane(self.device, digest)
                self.exchange.fetch(manifests[digest], COORDINATOR, self.topics.broadcast(digest), finished, lane)

    def _fetched(self, job: Job, manifests: dict[str, Manifest]) -> None:
        if job.working:
            return
        try:
            program = self._program(job.task.program)
            wanted = [graph.digest for graph in program.graphs.values()]
            wanted += [group.initial for group in program.groups.values() if group.initial]
            missing = [digest for digest in wanted if not self.blobs.has(digest)]
        except Damaged as error:
            self._gather_anew(job, error)
            return
        except FedvitError as error:
            self._fail(job, error)
            return
        if missing:
            self._fetch(job, missing, manifests)
            return
        job.working = True
        before = self._worker

        def work() -> None:
            if before:
                before.join()  # a cancelled task ends at its next step
            try:
                if job.stop.is_set():
                    raise Stopped("the task was stopped before it began")
                self._inbox.put(_Worked(job, self._bench.do(job, program), None))
            except Exception as error:  # noqa: BLE001 - reported to the coordinator
                self._inbox.put(_Worked(job, None, error))

        self._worker = self._begin(work, f"task-{job.task.kind}-{job.task.round}")

    def _program(self, digest: str) -> Program:
        if digest not in self._programs:
            self._programs = {digest: decode_program(self._integrity.read(digest))}
        return self._programs[digest]

    def _on_worked(self, worked: _Worked) -> None:
        job = worked.job
        if worked.result:
            if self.vault.is_over(worked.result.run):  # it was done just when the run ended
                self._end(worked.result.run)
                return
            result = msgspec.structs.replace(worked.result, damaged=self._integrity.reports())
            self._answer(result)
            log.info(
                "task done",
                extra={"round": result.round, "kind": result.kind, "samples": result.samples, **result.metrics},
            )
            if job is self._job:
                self._job = None
        elif isinstance(worked.error, Damaged):
            if job is self._job:
                self._gather_anew(job, worked.error)
        elif worked.error and not isinstance(worked.error, Stopped):
            self._fail(job, worked.error)

    def _fail(self, job: Job, error: Exception) -> None:
        """Tell the coordinator why this task cannot be done; the device stays for the next one."""
        if job is not self._job:
            return
        log.error("task failed", extra={"reason": str(error)}, exc_info=not isinstance(error, FedvitError) and error)
        task = job.task
        reason = str(error) if isinstance(error, FedvitError) else f"{type(error).__name__}: {error}"
        self._drop_job()
        broke, use = (error.broke, error.use) if isinstance(error, Exceeded) else (None, None)
        self._answer(Failed(task.run, task.round, task.kind, reason[:500], broke, use, task.task))

    def _drop_job(self) -> None:
        if self._job:
            self._job.stop.set()
            self._job = None
            self.exchange.cancel(COORDINATOR)

    # --- sending --------------------------------------------------------------------------------------

    def _send(self, message: FromDevice) -> None:
        """QoS 1; what is lost while the link is down is said again after the next welcome."""
        self.transport.publish(self.topics.from_device(self.device), encode(message), qos=1)

    def _tell_progress(self, progress: Progress) -> None:
        """From the thread that works."""
        self.transport.publish(self.topics.from_device(self.device), encode(progress), qos=0)

    def _keep(self, answer: Result | Failed | Declined) -> None:
        """From now on the answer is sent again until it is acknowledged."""
        self._pending[answer.run, answer.round, answer.kind] = _Pending(answer)

    def _answer(self, answer: Result | Failed | Declined) -> None:
        self._keep(answer)
        self._send_answer(answer)

    def _send_answer(self, answer: Result | Failed | Declined) -> None:
        if isinstance(answer, Result):
            self._send_result(answer)
        else:
            self._send(answer)

    def _send_result(self, result: Result) -> None:
        """With its upload inside, if that is small. An upload that is not what it was is not sent."""
        upload = result.upload
        try:
            if upload:
                self._integrity.check([upload.digest])
            if upload and not self.blobs.has(upload.digest):
                self._forget(result, f"its upload {upload.digest} is not in {self.blobs.folder} any more")
                return
            if upload and upload.size <= inline_room(result):
                result = msgspec.structs.replace(result, inline=self._integrity.read(upload.digest))
        except Damaged:
            assert upload is not None  # only that was looked at
            self._forget(result, f"its upload {upload.digest} was damaged in {self.blobs.folder}")
            return
        except StorageFailed as error:
            log.warning("result not sent yet", extra={"round": result.round, "reason": str(error)})
            return
        self._send(result)

    def _forget(self, result: Result, reason: str) -> None:
        """A result that cannot be sent: a newer task tidied up before it was known, or its file was deleted."""
        log.error("result lost", extra={"run": result.run, "round": result.round, "reason": reason})
        if result.kind == "train":
            self._settle(result.run, result.round, accepted=False)
        self._answer(Failed(result.run, result.round, result.kind, reason[:500], task=result.task))

    def _tell_blob(self, peer: str, message: Want | Done | Apart) -> None:
        assert not isinstance(message, Apart)  # only the coordinator serves several at once
        self._send(message)

    def _upload_topic(self, digest: str) -> str:
        return self.topics.upload(self.device, digest)

    def _pinned(self) -> set[str]:
        answers = (pending.answer for pending in self._pending.values())
        uploads = {answer.upload.digest for answer in answers if isinstance(answer, Result) and answer.upload}
        return uploads | {self._class_list.digest} if self._class_list else uploads

    def _may_read(self, peer: str, digest: str) -> bool:
        return digest in self._pinned()
