"""The device's loop: announces itself, accepts tasks, fetches their blobs, runs them, stores and sends results.

One thread reads the inbox and owns all state; a worker thread runs the graphs and reports back through
the inbox. No code here depends on a method, and none blocks on the network.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from edge_client.answers import Answer, Answers
from edge_client.delta_chains import delta_chains
from edge_client.disk import DiskBudget
from edge_client.evaluation import blobs_of_model
from edge_client.guard import Exceeded, Guard
from edge_client.identity import Renewal
from edge_client.integrity import DamagedBlobs, Integrity
from edge_client.readiness import Readiness
from edge_client.resending import Resend
from edge_client.retention import retired
from edge_client.runtime import Runtime, Stopped
from edge_client.status import LastError, LastTask, StatusFile
from edge_client.task_executor import TaskExecution, TaskExecutor
from edge_client.vault import Vault
from fedvit.blobs import BlobStore, digest_of
from fedvit.data.folder import DeviceData
from fedvit.data.growing import Growing
from fedvit.errors import BadPayload, DataError, FedvitError, OverBudget, PeerRefused, StorageFailed
from fedvit.program import MAX_PROGRAM_BYTES, Program, decode_program
from fedvit.resources import DeviceProfile
from fedvit.transport.base import Connected, Disconnected, Received, Transport, Will
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    MAX_EMPTY_FOLDERS,
    BlobAck,
    BlobNack,
    BlobUrl,
    Cancel,
    CoordinatorState,
    Declined,
    DeviceState,
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
    TaskKind,
    TransferMessage,
    UseDedicatedTopic,
    Welcome,
    decode,
    encode,
    encode_class_list,
    term_of,
)
from fedvit.wire.topics import Topics, check_name
from fedvit.wire.transfer import chunk_bytes_within

log = logging.getLogger(__name__)

TICK_S = 0.1
RETURN_SPREAD_S = 4.0
"""Devices that lost their broker reconnect at random times within this interval, or a longer one that the coordinator
of a large fleet announces."""
SAME_ID_PATIENCE_S = 75.0
"""How long a device waits for its own last will when the coordinator reports that its id is in use: a little more than
1.5 keepalives."""

OTHER_VERSION_PATIENCE_S = 20.0
"""How long a device that received another wire version waits for a welcome in its own, so that a single stray message
does not end it."""

FETCHED_ANEW = 2
"""How often a task fetches a blob again after this device's disk damaged it."""

IMAGES_AGAIN_S = 60.0
"""A device without an image to train with declines, and is asked again after this time."""

COORDINATOR = "coordinator"
OVER = ("finished", "cancelled")
"""States of a run that is not resumed any more."""


class Work(Protocol):
    """Work that runs in another thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work has ended."""


def in_own_thread(work: Callable[[], None], name: str) -> Work:
    """Start the work at once, for a process that is one device."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class _Worked(NamedTuple):
    """The worker thread ended, with a result or an error."""

    execution: TaskExecution
    result: Result | None
    error: Exception | None


class AgentState(NamedTuple):
    """What an agent does at a moment."""

    connected: bool  # to the broker
    joined: bool  # a coordinator has answered its hello
    at_work: TaskKind | None
    waiting: int  # answers to tasks that are not acknowledged yet
    answers: dict[tuple[TaskKind, str], int]  # number of answers since the start, by kind of task and of message


class Agent:
    """One device of a fleet. `serve` runs until `stop` is set, the run ends (`once`), or the coordinator refuses.

    A loop that drives several agents calls the parts of `serve` instead: `open`, then `on_event` for each event of the
    inbox and `on_time` a few times a second until it is `over`, and `leave`. `begin` starts a task's work, `exchange`
    makes the object that fetches and serves blobs.
    """

    executor_class: ClassVar[type[TaskExecutor]] = TaskExecutor

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
        disk_budget: int | None = None,
        growing: Growing | None = None,
        status: StatusFile | None = None,
        recent_log: Callable[[], str] = lambda: "",
        counts_classes: bool = True,
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
        self._growing = growing  # where `data` is from, looked through before each task; None: `data` never changes
        self._status = status
        self.progress: Progress | None = None  # the newest that was reported
        self.peak_rss_bytes: int | None = None  # of the newest task
        self.last_task: LastTask | None = None
        self.last_error: LastError | None = None
        self._run_classes: Collection[str] | None = None  # other images are not used; None: no run has a task here
        self._task_run: str | None = None  # of the newest task
        self._recent_log = recent_log  # sent with the failure of a task
        self._integrity = integrity or Integrity(blobs, vault.files)
        self.disk = DiskBudget(vault, blobs, disk_budget)
        self._executor = self.executor_class(
            device=self.device,
            data=data,
            vault=vault,
            blobs=blobs,
            integrity=self._integrity,
            runtime=runtime,
            guard=guard or Guard(profile.budget),
            disk=self.disk,
            traffic=lambda: (transport.received_bytes, transport.sent_bytes),
            report=self._report_progress,
            counts_classes=counts_classes,
        )
        self.readiness = readiness or Readiness()
        self.renewal = renewal  # of this device's certificate; None: it has none
        self.exchange = exchange(
            transport, blobs, send=self._send_transfer_message, topic_for=self._upload_topic, may_read=self._may_read
        )
        self._inbox = transport.inbox
        self._connected = False
        self._wait_logged = False  # the log has reported that no coordinator answers
        self._link_trouble = ""
        self._epoch: int | None = None
        self._term = 0  # the latest known, of a coordinator that leads others
        self._hello: Resend | None = None  # set while a hello waits for its answer
        self._refusal: str | None = None  # reason of the newest answer, while the device may still be accepted
        self._refused_since: float | None = None
        self._other_version: tuple[PeerRefused, float] | None = None  # received since the last welcome, and when
        self._execution: TaskExecution | None = None
        self._begin = begin
        self._worker: Work | None = None
        self._answers = Answers(
            vault=vault, blobs=blobs, integrity=self._integrity, send=self._send, recent_log=recent_log
        )
        self._class_list: Manifest | None = None
        self._ended: RunEnded | None = None
        self._programs: dict[str, Program] = {}
        self._class_list = self._class_list_blob()

    # --- the loop -------------------------------------------------------------------------------------

    def serve(self, stop: threading.Event, *, once: bool = False, on_turn: Callable[[], None] = lambda: None) -> str:
        """Take part until `stop` is set; returns why it ended. Raises PeerRefused when the refusal is final.

        `on_turn` is called about every TICK_S.
        """
        self.open()
        try:
            while not stop.is_set():
                with contextlib.suppress(queue.Empty):
                    self.on_event(self._inbox.get(timeout=TICK_S))
                self.on_time()
                on_turn()
                if once and self.over:
                    return self.over
            return "stopped"
        finally:
            self.leave()

    def open(self) -> None:
        """Start to connect; unacknowledged answers of an earlier process are sent again. Raises StorageFailed."""
        self.vault.finish_removals()
        for repair in self.vault.repair_all():
            self._integrity.report(repair.message)
            if repair.lost:
                run, number = repair.lost
                self._answers.keep(Failed(run, number, "train", repair.message[:500]))
        for result in self.vault.pending():
            self._answers.keep(result)
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
        """How the run ended; None while it goes on or after another one began."""
        return f"run {self._ended.run} {self._ended.status}" if self._ended and not self._execution else None

    @property
    def task(self) -> Task | None:
        """The task that is being worked on."""
        return self._execution.task if self._execution else None

    @property
    def doing(self) -> str:
        """What the device does now, for people."""
        if not self._connected:
            return "no connection to the broker"
        if self._refusal is not None:
            return f"not accepted yet: {self._refusal}"
        if self._epoch is None:
            return "waiting for a coordinator"
        if self._execution is None:
            return "waiting for a task"
        if not self._execution.working:
            return "fetching"
        return "training" if self._execution.task.kind == "train" else "testing"

    def state(self) -> AgentState:
        """May be called from any thread."""
        execution, joined = self._execution, self._connected and self._epoch is not None and self._hello is None
        at_work = execution.task.kind if execution else None
        return AgentState(self._connected, joined, at_work, len(self._answers), dict(self._answers.counts))

    def halt(self) -> None:
        """Ask the running task to stop at its next step, without a report to the coordinator."""
        if self._execution:
            self._execution.stop.set()

    def leave(self) -> None:
        """Announce that the device leaves, and wait until no task is running."""
        self.halt()
        self.exchange.cancel()
        if self._connected:
            farewell = self._will(self.transport.connection)
            self.transport.publish(farewell.topic, farewell.payload, qos=1)
        self.transport.close()
        if self._worker:
            self._worker.join(timeout=30)
        if self._status:
            self._status.close(self)

    def on_event(self, event: object) -> None:
        """Handle one event of the inbox. Raises PeerRefused when the coordinator refuses for good."""
        match event:
            case Connected(certificate=certificate):
                self._connected = True
                self._wait_logged = False
                self._link_trouble = ""
                log.info("connected to the broker")
                self._send_hello()
                self.exchange.on_reconnect()
                if self.renewal:
                    self.renewal.note_connected(self.transport, certificate)
            case Disconnected():
                self._on_disconnected(event)
            case Received(topic=topic, payload=payload):
                self._on_received(topic, payload)
            case _Worked():
                self._on_worked(event)

    def on_time(self) -> None:
        """Do what is due; call it a few times a second."""
        if self._execution and time.monotonic() > self._execution.expires_at:
            # the round closes without this device: continuing would only cost energy
            self._fail(self._execution, OverBudget(f"not done within the deadline of {self._execution.given_s:.0f} s"))
        if self._other_version and time.monotonic() - self._other_version[1] > OTHER_VERSION_PATIENCE_S:
            raise self._other_version[0]
        if self._execution is None:
            self._integrity.scrub()
        if self._status:
            self._status.tick(self)
        if not self._connected:
            return
        self.exchange.tick()
        if self.renewal:
            self.renewal.tick(self.transport)
        if self._hello and self._hello.due():
            if self._hello.is_overdue() and not self._wait_logged and self._refusal is None:
                self._wait_logged = True
                log.warning(
                    "no coordinator answers; retrying. 'edge-client doctor' looks for the cause",
                    extra={"federation": self.topics.federation},
                )
            self._send_hello(self._hello)
        if self._hello is None:
            self._answers.send_due()

    def _on_disconnected(self, event: Disconnected) -> None:
        if event.reason != self._link_trouble:
            if event.refused or self._ended is None:  # the broker of an ended run may end with it
                what = f"no connection to the broker: {event.reason}"
                self.last_error = LastError(what=what, at_s=time.time())
            remedy = "" if self._connected else ". 'edge-client doctor' looks for the cause"
            log.warning(f"no connection to the broker; trying again{remedy}", extra={"reason": event.reason})
        self._link_trouble = event.reason
        self._connected = False
        self._refusal = None

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
            case BlobNack():
                self._on_want(message)
            case BlobAck():
                self.exchange.on_ack(COORDINATOR, message)
            case BlobUrl():
                self._on_url(message)
            case UseDedicatedTopic():
                self.exchange.on_use_dedicated_topic(COORDINATOR, message)
            case _:
                pass  # meant for an earlier process with this id

    def _on_other_version(self, error: PeerRefused) -> None:
        """The coordinator has another version now, or the message was damaged: the answer to a hello shows which."""
        if self._other_version is None:
            log.warning("message dropped", extra={"reason": str(error)})
            self._other_version = error, time.monotonic()
            if self._hello is None:
                self._send_hello()

    def _on_want(self, want: BlobNack) -> None:
        try:
            self.exchange.on_nack(COORDINATOR, want)
        except (BadPayload, StorageFailed) as error:  # the coordinator asks again
            log.warning("the coordinator asks for a blob that is not here", extra={"reason": str(error)})

    def _on_url(self, found: BlobUrl) -> None:
        try:
            self.exchange.on_url(COORDINATOR, found)
        except BadPayload as error:  # the coordinator sends chunks instead
            log.warning("URL refused", extra={"reason": str(error)})

    def _is_outdated(self, epoch: int) -> bool:
        """Whether an epoch is of a coordinator that led before the one that leads now."""
        term = term_of(epoch)
        if 0 < term < self._term:
            log.info("a coordinator that no longer leads is ignored", extra={"term": term, "leads": self._term})
            return True
        self._term = max(self._term, term)
        return False

    def _on_coordinator(self, state: CoordinatorState) -> None:
        if self._is_outdated(state.epoch):
            return
        if not state.alive:
            self._refusal = None
            log.info("the coordinator left; waiting for it")
        elif state.epoch != self._epoch:
            if self._task_run not in (None, state.run):  # the end of that run was not heard
                self._run_classes = None
            # a hello on its way may be answered before the next one is due
            self._hello = self._hello or Resend()
            self._hello.hasten(state.spread_s)

    def _look_at_images(self) -> bool:
        """Take changes of the folder into account. True if the device has to announce itself again. Raises DataError
        when there is no image to train with."""
        if self._growing is None or (self._execution and self._execution.working):
            return False
        if self._answers.has_served_results():
            return False  # the coordinator compares a result with the numbers that were announced before it
        if not self._growing.look(self._run_classes):
            return False
        before, self.data = self.data, self._growing.data
        self._executor.use(self.data)
        self._class_list = self._class_list_blob()
        log.info("images changed", extra={"train": len(self.data.train), "test": len(self.data.test)})
        self._growing.log_problems()
        return before.counts != self.data.counts

    def _send_hello(self, resend: Resend | None = None) -> None:
        try:
            self._look_at_images()
        except FedvitError as error:  # the images that were announced before; a task would be declined
            log.warning("images cannot be used", extra={"reason": str(error)})
        self._announce(resend)

    def _announce(self, resend: Resend | None = None) -> None:
        self._hello = resend or Resend()
        self._send(self._hello_message())

    def _hello_message(self) -> Hello:
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
            empty_folders=data.empty[:MAX_EMPTY_FOLDERS],
        )

    def _class_list_blob(self) -> Manifest | None:
        """The blob with the class names, if they do not fit into a hello. Raises DataError if they do not fit into a
        blob either, and StorageFailed."""
        try:
            encode(self._hello_message())
        except BadPayload:
            try:
                return self.blobs.put(encode_class_list(self.data.classes))
            except BadPayload as error:
                raise DataError(f"{len(self.data.classes)} class folders cannot be announced: {error}") from error
        return None

    def _use_limits(self, limits: BrokerLimits) -> None:
        """Keep the broker's limits from now on."""
        self.transport.use_limits(limits)
        chunk_bytes = chunk_bytes_within(limits.max_payload_bytes)
        if chunk_bytes != self.blobs.chunk_bytes:
            self.blobs.chunk_bytes = chunk_bytes
            for digest in self._pinned():
                self.exchange.stop_sending(digest)  # it was being sent in chunks of another size

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._is_outdated(welcome.epoch):
            return
        if self._epoch != welcome.epoch:
            log.info("joined", extra={"device": self.device, "next": welcome.waiting_for})
            if self.renewal:
                self.renewal.ask_soon()
        if welcome.store not in ("", self.exchange.store_origin):
            log.info("large blobs come from an object store", extra={"store": welcome.store})
        self.exchange.store_origin = welcome.store
        self._use_limits(welcome.limits or BrokerLimits())
        self._epoch = welcome.epoch
        self.transport.spread_return(max(RETURN_SPREAD_S, welcome.spread_s))
        self._hello = None
        self._refused_since = self._refusal = None
        self._other_version = None
        self._answers.send_all(welcome.epoch)

    def _on_refused(self, refused: Refused) -> None:
        self.last_error = LastError(what=f"not accepted: {refused.reason}", at_s=time.time())
        if refused.final:
            raise PeerRefused(f"the coordinator refused device {self.device!r}: {refused.reason}")
        now, self._refusal = time.monotonic(), refused.reason
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > SAME_ID_PATIENCE_S:
            raise PeerRefused(f"the coordinator refused device {self.device!r}: {refused.reason}")
        log.warning("not accepted yet; retrying", extra={"device": self.device, "reason": refused.reason})

    def _on_extended(self, extended: Extended) -> None:
        execution = self._execution
        if execution and execution.matches(extended):
            now = time.monotonic()
            execution.given_s += now + extended.deadline_s - execution.expires_at
            execution.expires_at = now + extended.deadline_s

    def _on_cancel(self, cancel: Cancel) -> None:
        """Discard a running task, or the report of its failure; a finished result still waits for its answer."""
        self._answers.drop((cancel.run, cancel.round, cancel.kind))
        if self._execution and self._execution.matches(cancel):
            log.info("task cancelled", extra={"round": cancel.round, "kind": cancel.kind, "reason": cancel.reason})
            self._drop_execution()

    def _on_ack(self, ack: ResultAck) -> None:
        if (ack.run, ack.round, ack.kind) not in self._answers:
            if self._execution and self._execution.matches(ack) and not ack.keep:
                self._drop_execution()  # the task was sent again before this arrived
        elif not self._answers.acknowledge(ack, self._epoch):
            self.last_error = LastError(
                what=f"round {ack.round} of {ack.run}: the result was refused: {ack.reason}", at_s=time.time()
            )

    def _on_run_ended(self, ended: RunEnded) -> None:
        log.info("run ended", extra={"run": ended.run, "status": ended.status})
        over = ended.status in OVER and self._end(ended.run)
        self._answers.drop_all(ended.run, with_results=over)
        if self._execution and self._execution.task.run != ended.run:
            return  # an earlier run's end, late
        self._drop_execution()
        self._run_classes = None
        self._ended = ended
        if over:
            self._free_disk_space(ended.run)

    def _end(self, run: str) -> bool:
        """Note in the vault that results of the run will not be acknowledged any more; False if that failed."""
        try:
            self.vault.end(run)
        except FedvitError as error:  # the device continues; results of the run still wait
            log.error("end of the run not noted", extra={"run": run, "reason": str(error)})
            return False
        return True

    def _free_disk_space(self, run: str) -> None:
        """After a run: remove its blobs, except those of the device's own model, and vaults of older runs."""
        try:
            if run in self.vault.runs()[:1] and (note := self.vault.noted(run)):
                needed = blobs_of_model(self._program(note.program), note, self.vault)
                freed = self.blobs.prune(keep=needed | self._pinned())
                log.info("blobs removed", extra={"run": run, "bytes": freed})
            for old in [] if self.keep_runs is None else retired(self.vault, self.keep_runs):
                self.vault.remove(old)
                log.info("vault removed", extra={"run": old, "kept": self.keep_runs})
        except (FedvitError, OSError) as error:  # costs disk space only
            log.error("files of the run could not be removed", extra={"run": run, "reason": str(error)})

    # --- a task ---------------------------------------------------------------------------------------

    def _on_task(self, task: Task) -> None:
        key = (task.run, task.round, task.kind)
        self._ended = None
        self._answers.least_resend_s = task.progress_s
        if self._execution and self._execution.key == key:  # sent again: the coordinator restarted, or the link was cut
            self._execution.expires_at = time.monotonic() + task.deadline_s
            return
        if result := self._answers.result(key):
            self._answers.send(result)
            return
        self._answers.drop_all()
        self._drop_execution()
        if not_now := self.readiness.not_now():
            log.info("task declined", extra={"round": task.round, "kind": task.kind, "reason": not_now.reason})
            self._note_end(task, f"declined ({not_now.reason})")
            self._answer(Declined(task.run, task.round, task.kind, not_now.reason, not_now.again_s, task.task))
            return
        try:
            self._run_classes, self._task_run = self._classes_of(task), task.run
            if self._look_at_images():
                self._announce()  # before the result, with which the coordinator compares it
        except FedvitError as error:
            log.warning("task declined", extra={"round": task.round, "kind": task.kind, "reason": str(error)})
            reason = f"images cannot be used: {error}"[:500]
            self._note_end(task, f"declined ({reason})")
            self._answer(Declined(task.run, task.round, task.kind, reason, IMAGES_AGAIN_S, task.task))
            return
        execution = self._execution = TaskExecution(task, time.monotonic() + task.deadline_s, task.deadline_s)
        log.info("task received", extra={"run": task.run, "round": task.round, "kind": task.kind})
        self._fetch_missing(execution)

    def _classes_of(self, task: Task) -> Collection[str]:
        """Classes whose images can be used for the task: those of the run once its program is here, else those that
        were announced, since the coordinator refuses a device with others."""
        with contextlib.suppress(DamagedBlobs):
            if self.blobs.has(task.program):
                return self._program(task.program).classes
        return self.data.classes

    def _fetch_missing(self, execution: TaskExecution) -> None:
        """Fetch the blobs that the task needs and this device does not have."""
        task = execution.task
        manifests = {manifest.digest: manifest for manifest in task.blobs}
        try:
            described = manifests.get(task.program)
            size_bytes = max(self.blobs.bytes_here(task.program), described.size if described else 0)
            if size_bytes > MAX_PROGRAM_BYTES:  # it is read whole
                raise BadPayload(f"a program of {size_bytes} bytes exceeds the limit of {MAX_PROGRAM_BYTES} bytes")
            self.vault.reopen(task.run)
            inline, new_bytes = self._keep_inline(task, manifests)
            execution.fetched_bytes += new_bytes
            recipes = task.recipes if self._executor.accepts_delta_chains else ()
            execution.delta_chains = delta_chains(
                dict.fromkeys(task.groups.values()), recipes, manifests, self.blobs.has
            )
            bases = {chain.base for chain in execution.delta_chains if chain.base}
            patches = [step.patch.digest for chain in execution.delta_chains for step in chain.steps]
            # inline blobs stay even if unused: they come again with the next task, and count once
            self.blobs.prune(keep={*manifests, *self._pinned(), *bases, *patches, *inline})
            manifests |= {step.patch.digest: step.patch for step in recipes}
            made = {chain.target.digest for chain in execution.delta_chains}
            whole = [digest for digest in task.groups.values() if digest not in made]
            self._fetch(execution, [task.program, *patches, *whole], manifests)
        except (FedvitError, OSError) as error:
            self._fail(execution, error)

    def _fetch_again(self, execution: TaskExecution, damaged: DamagedBlobs) -> None:
        """Fetch damaged blobs again, unless this disk damages them each time."""
        execution.working = False
        execution.fetched_anew.update(damaged.digests)
        again = [digest for digest in damaged.digests if execution.fetched_anew[digest] > FETCHED_ANEW]
        if again:
            reason = f"blob {again[0]} was fetched {FETCHED_ANEW} times more and is damaged again: replace the disk"
            self._fail(execution, StorageFailed(f"{reason} that holds {self.blobs.folder}"))
        else:
            self._fetch_missing(execution)

    def _keep_inline(self, task: Task, manifests: dict[str, Manifest]) -> tuple[set[str], int]:
        """Store the blobs inside the message, which need not be fetched: their digests, and how many bytes are new.

        Raises BadPayload for one that the task does not describe.
        """
        described = manifests.keys() | {step.patch.digest for step in task.recipes}
        inline, new_bytes = set[str](), 0
        for content in task.inline:
            digest = digest_of(content)
            if digest not in described:
                raise BadPayload(f"the task contains {len(content)} bytes that it does not describe")
            inline.add(digest)
            if not self.blobs.keeps(digest):  # bytes count even if another device that shares the folder has them
                self.blobs.put(content)
                new_bytes += len(content)
        return inline, new_bytes

    def _fetch(self, execution: TaskExecution, digests: list[str], manifests: dict[str, Manifest]) -> None:
        """Fetch blobs, then those that the Program names, then start the work."""
        unknown = [digest for digest in digests if digest not in manifests]
        if unknown:
            self._fail(execution, BadPayload(f"the task names blob {unknown[0]} but does not describe it"))
            return
        made = [chain.target.digest for chain in execution.delta_chains]
        try:
            self.disk.make_room(
                execution.task.run,
                sum(manifests[digest].size - self.blobs.bytes_here(digest) for digest in {*digests, *made}),
            )
        except (FedvitError, OSError) as error:
            self._fail(execution, error)
            return
        execution.missing = set(digests)
        execution.fetched_bytes += sum(
            manifests[digest].size for digest in execution.missing if not self.blobs.has(digest)
        )

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if execution is not self._execution:
                return
            if error:
                self._fail(execution, error)
                return
            execution.missing.discard(manifest.digest)
            if not execution.missing:
                self._fetched(execution, manifests)

        for digest in sorted(execution.missing):
            if execution is self._execution:
                dedicated_topic = self.topics.chunks_for(self.device, digest)
                self.exchange.fetch(
                    manifests[digest], COORDINATOR, self.topics.broadcast(digest), finished, dedicated_topic
                )

    def _fetched(self, execution: TaskExecution, manifests: dict[str, Manifest]) -> None:
        if execution.working:
            return
        try:
            program = self._program(execution.task.program)
            wanted = [graph.digest for graph in program.graphs.values()]
            wanted += [group.initial for group in program.groups.values() if group.initial]
            missing = [digest for digest in wanted if not self.blobs.has(digest)]
        except DamagedBlobs as error:
            self._fetch_again(execution, error)
            return
        except FedvitError as error:
            self._fail(execution, error)
            return
        if missing:
            self._fetch(execution, missing, manifests)
            return
        execution.working = True
        before = self._worker

        def work() -> None:
            if before:
                before.join()  # a cancelled task ends at its next step
            try:
                if execution.stop.is_set():
                    raise Stopped("the task was stopped before it began")
                self._inbox.put(_Worked(execution, self._executor.run(execution, program), None))
            except Exception as error:  # noqa: BLE001 - reported to the coordinator
                self._inbox.put(_Worked(execution, None, error))

        self._worker = self._begin(work, f"task-{execution.task.kind}-{execution.task.round}")

    def _program(self, digest: str) -> Program:
        if digest not in self._programs:
            self._programs = {digest: decode_program(self._integrity.read(digest))}
        return self._programs[digest]

    def _on_worked(self, worked: _Worked) -> None:
        execution = worked.execution
        if self._growing:
            self._growing.log_problems()  # images that could not be decoded
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
            self._note_end(execution.task, "done", result)
            if execution is self._execution:
                self._execution = None
        elif isinstance(worked.error, DamagedBlobs):
            if execution is self._execution:
                self._fetch_again(execution, worked.error)
        elif worked.error and not isinstance(worked.error, Stopped):
            self._fail(execution, worked.error)

    def _fail(self, execution: TaskExecution, error: Exception) -> None:
        """Report to the coordinator why this task failed; the device stays for the next one."""
        if execution is not self._execution:
            return
        log.error("task failed", extra={"reason": str(error)}, exc_info=not isinstance(error, FedvitError) and error)
        task = execution.task
        reason = str(error) if isinstance(error, FedvitError) else f"{type(error).__name__}: {error}"
        self.last_error = LastError(what=f"round {task.round} of {task.run}: {reason}", at_s=time.time())
        self._note_end(task, "failed")
        self._drop_execution()
        broke, use = (error.broke, error.use) if isinstance(error, Exceeded) else (None, None)
        lines = self._recent_log()
        self._answer(Failed(task.run, task.round, task.kind, reason[:500], broke, use, task.task, lines))

    def _note_end(self, task: Task, outcome: str, result: Result | None = None) -> None:
        self.last_task = LastTask(
            run=task.run,
            round=task.round,
            kind=task.kind,
            outcome=outcome,
            samples=result.samples if result else None,
            metrics=result.metrics if result else {},
            ended_s=time.time(),
        )
        if result:
            self.peak_rss_bytes = result.use.peak_rss_bytes

    def _drop_execution(self) -> None:
        if self._execution:
            self._execution.stop.set()
            self._execution = None
            self.exchange.cancel(COORDINATOR)

    # --- sending --------------------------------------------------------------------------------------

    def _send(self, message: FromDevice) -> None:
        """QoS 1; messages that are lost while the link is down are sent again after the next welcome."""
        self.transport.publish(self.topics.from_device(self.device), encode(message), qos=1)

    def _report_progress(self, progress: Progress) -> None:
        """Called in the worker thread."""
        self.progress = progress
        self.transport.publish(self.topics.from_device(self.device), encode(progress), qos=0)

    def _answer(self, answer: Answer) -> None:
        self._answers.add(answer)

    def _send_transfer_message(self, peer: str, message: TransferMessage) -> None:
        assert not isinstance(message, UseDedicatedTopic | BlobUrl)  # only the coordinator sends them
        self._send(message)

    def _upload_topic(self, digest: str) -> str:
        return self.topics.upload(self.device, digest)

    def _pinned(self) -> set[str]:
        uploads = self._answers.uploads()
        return uploads | {self._class_list.digest} if self._class_list else uploads

    def _may_read(self, peer: str, digest: str) -> bool:
        return digest in self._pinned()
