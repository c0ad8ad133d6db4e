"""The device's loop: announces itself, accepts tasks, fetches their blobs, runs them, stores and sends results.

One thread reads the inbox and owns all state; a worker thread runs the graphs and reports back through
the inbox. No code here depends on a method, and none blocks on the network.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from edge_client.health.history import AgentState, History
from edge_client.health.readiness import Readiness
from edge_client.health.status import StatusFile
from edge_client.link.device_link import DeviceLink
from edge_client.link.session import Session
from edge_client.storage.device_storage import DeviceStorage
from edge_client.work.current_task import CurrentTask
from edge_client.work.model_states import ModelStates
from edge_client.work.secure_sums import Masked, SecureSums
from edge_client.work.task_executor import TaskExecutor, Worked
from fedvit.errors import BadPayload, FedvitError, PeerRefused
from fedvit.logs import log_fields
from fedvit.policy import Policy
from fedvit.task_names import TaskName
from fedvit.tracing import Tracing
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.wire.messages import (
    AnyMessage,
    Cancel,
    CoordinatorState,
    Extended,
    Failed,
    Models,
    Refused,
    ResultAck,
    RunEnded,
    SumQuestion,
    Task,
    Welcome,
    decode,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
LEAVE_S = 30.0
"""Longest wait for the end of a task's work when the device leaves."""
FINAL = ("finished", "cancelled")
"""States of a run that is not resumed any more."""


class Agent:
    """One device of a fleet. `serve` runs until `stop` is set, the run ends (`once`), or the coordinator refuses.

    A loop that drives several agents calls the parts of `serve` instead: `open`, then `on_event` for each event of the
    inbox and `on_time` a few times a second until it is `over`, and `leave`.
    """

    worker_class: ClassVar[type[TaskExecutor]] = TaskExecutor

    def __init__(
        self,
        link: DeviceLink,
        storage: DeviceStorage,
        worker: TaskExecutor,
        policy: Policy,
        *,
        readiness: Readiness | None = None,
        status: StatusFile | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.link = link
        self.storage = storage
        self.worker = worker
        self.session = Session(link, storage)
        self.history = History()
        self._readiness = readiness or Readiness(policy=policy)
        self.current = CurrentTask(self.session, storage, worker, self._readiness, self.history, tracing)
        self.sums = SecureSums(
            link, storage, policy.send, link.renewal.identity if link.renewal else None, worker.begin_work
        )
        self.models = ModelStates(link, storage, policy.models)
        self._policy = policy
        self._status = status
        self._ended: RunEnded | None = None

    # --- the loop -------------------------------------------------------------------------------------

    def serve(self, stop: threading.Event, *, once: bool = False, on_turn: Callable[[], None] = lambda: None) -> str:
        """Take part until `stop` is set; return why it ended. Raises PeerRefused when the refusal is final.

        `on_turn` is called about every TICK_S.
        """
        self.open()
        try:
            while not stop.is_set():
                with contextlib.suppress(queue.Empty):
                    self.on_event(self.link.transport.inbox.get(timeout=TICK_S))
                self.on_time()
                on_turn()
                if once and self.over:
                    return self.over
            return "stopped"
        finally:
            self.leave()

    def open(self) -> None:
        """Start to connect; unacknowledged answers of an earlier process are sent again. Raises StorageFailed."""
        for repair in self.storage.repair():
            if repair.lost:
                run, number = repair.lost
                self.link.answers.keep(Failed(run, number, "train", repair.message[:500]))
        for result in self.storage.vault.pending():
            self.link.answers.keep(result)
        self.link.open()

    @property
    def over(self) -> str | None:
        """The end of the run; None while it goes on or after another one began."""
        return f"run {self._ended.run} {self._ended.status}" if self._ended and not self.task else None

    @property
    def task(self) -> Task | None:
        """The task that is being worked on."""
        execution = self.current.execution
        return execution.task if execution else None

    def state(self) -> AgentState:
        """Return what the agent does now. May be called from any thread."""
        answers, history, session = self.link.answers, self.history, self.session
        return AgentState(
            connected=session.connected,
            joined=session.is_joined,
            activity=self._describe_activity(),
            task=self.task,
            progress=self.worker.progress,
            last_task=history.task,
            last_error=history.error,
            memory=self.worker.guard.memory,
            peak_rss_bytes=history.peak_rss_bytes,
            waiting=len(answers),
            answers=dict(answers.counts),
            data=self.storage.data,
        )

    def _describe_activity(self) -> str:
        session, execution = self.session, self.current.execution
        if not session.connected:
            return "no connection to the broker"
        if session.refusal is not None:
            return f"not accepted yet: {session.refusal}"
        if execution is None and self._readiness.is_paused():
            return "paused by its owner"
        if session.epoch is None:
            return "waiting for a coordinator"
        if execution is None:
            return "waiting for a task"
        if not execution.working:
            return "fetching"
        return {"train": "training", "evaluate": "testing"}.get(execution.task.kind, "comparing models")

    def halt(self) -> None:
        """Ask the running task to stop at its next step, without a report to the coordinator."""
        if self.current.execution:
            self.current.execution.stop.set()

    def leave(self) -> None:
        """Announce that the device leaves, and wait until no task is running."""
        self.halt()
        self.link.close(connected=self.session.connected)
        self.worker.join(LEAVE_S)
        if self._status:
            self._status.close(self.state())

    def _log_fields(self) -> dict[str, Any]:
        """Fields of all lines of this device, in a process that may be several."""
        device, task = self.link.identity.device, self.task
        return TaskName.of(task, device).fields() if task else {"device": device}

    # --- events ---------------------------------------------------------------------------------------

    def on_event(self, event: object) -> None:
        """Handle one event of the inbox. Raises PeerRefused when the coordinator refuses for good."""
        with log_fields(self._log_fields):
            self._handle(event)

    def _handle(self, event: object) -> None:
        match event:
            case Connected(certificate=certificate):
                self.session.on_connected()
                self._send_hello()
                self.link.resume(certificate)
            case Disconnected(reason=reason, refused=refused):
                # the broker of an ended run may end with it
                if self.session.on_disconnected(event) and (refused or self._ended is None):
                    self.history.note_error(f"no connection to the broker: {reason}")
            case Received(topic=topic, payload=payload):
                if not self.link.take_bulk(topic, payload):
                    self._decode(payload)
            case Worked():
                self.current.finish(event)
            case Masked():
                self.sums.send_masked(event)

    def on_time(self) -> None:
        """Do what is due; call it a few times a second."""
        with log_fields(self._log_fields):
            self._do_due()

    def _do_due(self) -> None:
        self.current.tick()
        is_hello_due = self.session.tick()
        if self._status:
            self._status.tick(self.state())
        if not self.session.connected:
            return
        self.link.tick()
        if is_hello_due:
            self._send_hello(again=True)
        if self.session.is_joined:
            self.link.answers.send_due()
            self.models.tick()

    def _decode(self, payload: bytes) -> None:
        try:
            message = decode(payload)
        except BadPayload as error:
            log.warning("message dropped", extra={"reason": str(error)})
        except PeerRefused as error:  # the coordinator has another version now, or the message was damaged
            if self.session.on_other_version(error):
                self._send_hello()
        else:
            self.on_message(message)

    def on_message(self, message: AnyMessage) -> None:
        """Handle a message of the coordinator. Raises PeerRefused when it refuses for good."""
        match message:
            case CoordinatorState():
                if self.session.on_coordinator(message):
                    self.current.forget_other_run(message.run)
            case Welcome() if self.session.is_for_this_process(message):
                self.session.on_welcome(message)
            case Refused() if self.session.is_for_this_process(message):
                self.history.note_error(f"not accepted: {message.reason}")
                self.session.on_refused(message)
            case Task() if self.session.is_for_this_process(message):
                self._ended = None
                self.current.take(message)
            case Extended():
                self.current.extend(message)
            case Cancel():
                self.current.cancel(message)
            case ResultAck():
                self.current.acknowledge(message)
            case RunEnded():
                self._on_run_ended(message)
            case Models() if self.session.is_for_this_process(message):
                self.models.apply(message)
            case _ if isinstance(message, SumQuestion):
                self.sums.answer(message)
            case _:
                self.link.on_blob_message(message)

    def _send_hello(self, *, again: bool = False) -> None:
        try:
            self.current.refresh_images()
        except FedvitError as error:  # the images that were announced before; a task would be declined
            log.warning("images cannot be used", extra={"reason": str(error)})
        self.session.announce(again=again)

    def _on_run_ended(self, ended: RunEnded) -> None:
        log.info("run ended", extra={"run": ended.run, "status": ended.status})
        is_final = ended.status in FINAL and self.storage.end_run(ended.run, ended.best)
        self.link.answers.drop_all(ended.run, with_results=is_final)
        if not self.current.end_run(ended.run):
            return  # an earlier run's end, late
        self._ended = ended
        if is_final:
            self.storage.free_space(ended.run, self._policy.train.keep_runs, self.link.list_served())
