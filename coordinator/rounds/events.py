"""The events of a run: each message goes to its part, and the consequences to the parts that they concern.

Parts do not call each other back: `follow_up` asks for the consequences after each message and each tick.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from coordinator.rounds.isolation import ends_run
from coordinator.rounds.leading import Owner
from coordinator.rounds.open_round import Missing
from coordinator.rounds.parts import RunParts
from coordinator.rounds.reporter import view
from coordinator.rounds.scheduler import Overdue
from coordinator.rounds.sender_limits import Flood
from coordinator.rounds.tasks import TaskState
from fedvit.logs import log_fields
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobPut,
    CoordinatorState,
    Declined,
    DeviceState,
    Failed,
    Hello,
    ModelReport,
    Progress,
    Result,
    SumAnswer,
)

log = logging.getLogger(__name__)


class Events:
    """Handles what the inbox receives, in the thread that serves the run."""

    def __init__(self, parts: RunParts, owner: Owner, on_tick: Callable[[], None]) -> None:
        self._parts = parts
        self._state = parts.state
        self._owner = owner
        self._on_tick = on_tick

    def on_message(self, device: str, message: AnyMessage) -> None:
        """Handle a message. An error ends only this device's task, unless the record or the disk cannot be used."""
        with log_fields(partial(self._log_fields, device)):
            try:
                self._handle(device, message)
                self._follow_up()
            except Exception as error:
                if ends_run(error):
                    raise
                self._isolate(device, type(message).__name__, error)

    def on_chunk(self, device: str, topic: str, payload: bytes) -> None:
        with log_fields(partial(self._log_fields, device)):
            try:
                self._parts.exchange.heard(topic, payload)
            except Exception as error:
                if ends_run(error):
                    raise
                self._isolate(device, "chunk", error)

    def _log_fields(self, device: str) -> dict[str, Any]:
        """Fields of lines that a message of a device causes."""
        task = self._state.tasks.of(device)
        return task.name.fields() if task else {"device": device}

    def on_unreadable(self, device: str, kind: str, reason: str) -> None:
        self._state.refuse(device, kind, reason)

    def on_coordinator(self, state: CoordinatorState) -> None:
        self._parts.lease.on_coordinator(state)

    def on_link(self, *, up: bool, trouble: str) -> None:
        state, parts = self._state, self._parts
        if trouble:
            parts.operator_log(f"broker: {trouble}; trying again")
        if up:
            state.epoch = parts.lease.renew(state.spread_s)
            parts.exchange.on_reconnect()
        else:
            for task in state.tasks:
                task.note_left(state.config.rejoin_grace_s)
            state.presence.all_offline()

    def on_tick(self) -> None:
        parts = self._parts
        for line in (*parts.compute.take_warnings(), *(parts.objects.take_lines() if parts.objects else ())):
            parts.operator_log(line)
        for flood in parts.inbox.limits.take_floods():
            self._on_flood(flood)
        parts.recovery.report_damage()
        parts.exchange.tick()
        if parts.objects:
            parts.objects.tick()
        parts.membership.admit_signed()
        parts.collector.commit()
        parts.scheduler.send_queued()
        for overdue in parts.scheduler.overdue(parts.uploads.fetching(), parts.uploads.waiting()):
            self._give_up(overdue)
        if parts.models:
            parts.models.tick()
        self._follow_up()
        self._owner.watch()
        if parts.display.due():
            parts.display.show(view(self._state))
        parts.reporter.tick(self._state, parts.objects.trouble if parts.objects else "")
        self._on_tick()

    def expel(self, device: str, reason: str) -> None:
        """Exclude a device from the run, and end its tasks, whether this process or an earlier one assigned them."""
        state, parts = self._state, self._parts
        state.revoked.add(device)
        parts.sums.expel(device)
        asked = [task.round for task in state.store.tasks.read_unanswered(state.run) if task.device == device]
        task = state.tasks.of(device)
        if not (asked or task or device in state.presence):
            return  # it never took part
        parts.membership.expel(device, reason)
        if task:
            parts.collector.dismiss([task], reason, TaskState.REVOKED)
        state.store.tasks.end(state.run, [(number, device) for number in asked], TaskState.REVOKED)
        self._follow_up()

    def _handle(self, device: str, message: AnyMessage) -> None:
        parts = self._parts
        match message:
            case Hello():
                parts.membership.on_hello(device, message)
                return
            case DeviceState(online=True):  # `edge-client doctor` asks whether a coordinator is online
                parts.inbox.send(device, parts.lease.state())
                return
            case DeviceState():
                if parts.membership.on_state(device, message):
                    parts.collector.device_left(device)
                    parts.sums.stop_fetching(device)
                return
            case Result():
                parts.collector.on_result(device, message)
            case Failed():
                task = self._state.tasks.of(device)
                if task and parts.recovery.is_excused(device, message):
                    parts.scheduler.send_task(task)
                else:
                    parts.collector.on_failed(device, message)
            case Declined():
                parts.collector.on_declined(device, message)
            case Progress():
                parts.scheduler.on_progress(device, message)
            case ModelReport():
                if parts.models:
                    parts.models.on_report(device, message)
            case BlobNack():
                if parts.recovery.can_serve(device, message.digest):
                    parts.scheduler.on_nack(device, message)
            case BlobPut():
                parts.exchange.on_put(device, message)
            case BlobAck():
                parts.exchange.on_ack(device, message)
            case _ if isinstance(message, SumAnswer):
                parts.sums.on_answer(device, message)
            case _:
                self._state.refuse(device, "message", f"a {type(message).__name__} is not for the coordinator")
        if self._state.presence.should_request_hello(device):
            # a new epoch makes the device send its hello
            parts.inbox.send(device, CoordinatorState(self._state.epoch + 1, alive=True))

    def _follow_up(self) -> None:
        """Handle the consequences of the parts' actions for each other; nothing else connects the parts."""
        parts, ends, scheduler = self._parts, self._parts.ends, self._parts.scheduler
        for arrival in parts.membership.take_arrivals():
            if overdue := scheduler.on_arrival(arrival.device, was_away=arrival.was_away):
                self._give_up(overdue)
            parts.sums.on_arrival(arrival.device)
        for device, error in ends.take_errors():
            self._isolate(device, "Result", error)
        for task in ends.take_to_resend():
            scheduler.send_task(task)
        for strike in ends.take_strikes():
            parts.strike(*strike)
        for device in ends.take_freed():
            scheduler.assign_open(device)

    def _on_flood(self, flood: Flood) -> None:
        """A device sends more than any honest one: a strike, and after the last one it is shut out."""
        parts = self._parts
        device, reason, is_last = flood
        self._state.refuse(device, "flood", reason)
        parts.strike(device, self._state.number, reason)
        if not is_last:
            parts.operator_log(f"{device}: {reason}")
        elif self._owner.revoke(device, reason):
            parts.operator_log(f"{device}: {reason}; its certificate is revoked")
        else:
            parts.inbox.limits.ban(device)
            parts.operator_log(f"{device}: {reason}; it is banned until this process ends")
            if self._state.presence.is_online(device):  # it would wait for a task without an end
                parts.membership.send_away(device, reason)
            self.expel(device, reason)

    def _give_up(self, overdue: Overdue) -> None:
        task, why, reason = overdue
        if why is Missing.CRASHED:
            backoff_s = self._state.presence[task.device].backoff.count_crash(reason)
            crashed = f"{task.device}: {reason}; it is asked again in {backoff_s:.0f} s at the earliest"
            self._parts.operator_log(crashed)
        self._parts.collector.give_up(task, why, reason)

    def _isolate(self, device: str, what: str, error: Exception) -> None:
        """Log and count an unexpected error of this side in handling a device's message; it ends the device's task."""
        log.error("error in handling a message", extra={"device": device, "message_type": what}, exc_info=error)
        reason = f"an error in handling its {what}: {type(error).__name__}: {error}"[:500]
        self._state.refuse(device, "error", reason)
        self._parts.operator_log(f"{device}: {reason}; its task ends, the run continues (the log has details)")
        if task := self._state.tasks.of(device):
            self._parts.collector.fail(task, reason)
