"""One link to the broker, shared by several runs: each device belongs to one of them at a time.

The router handles every hello and last will, and forwards the messages of a device to its run. A run has its own
`Transport`, which only carries the messages of its devices. The router's state belongs to the thread that calls `pump`;
runs reach it through its inbox.
"""

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import ClassVar, NamedTuple

import msgspec

from coordinator.record.leadership import Leadership
from coordinator.record.record import Record
from coordinator.rounds.lease import Lease
from coordinator.rounds.models.keeper import ModelKeeper
from coordinator.rounds.presence import Presence, hello_spread_s
from coordinator.rounds.sender_limits import SenderLimits
from coordinator.rounds.service.assignment import Assignments, RunLink
from fedvit.errors import BadPayload, PeerRefused
from fedvit.transport.base import (
    BulkReceived,
    BulkSink,
    Connected,
    Disconnected,
    Received,
    Transport,
    Wake,
    Will,
    WillMaker,
)
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    CoordinatorState,
    DeviceState,
    FromCoordinator,
    Hello,
    ModelReport,
    Refused,
    Result,
    ResultAck,
    Welcome,
    decode,
    encode,
    peek_tag,
    unread_hello,
)
from fedvit.wire.topics import Topics, is_name

log = logging.getLogger(__name__)

EVENTS_AT_ONCE = 500
"""After this many events the service handles its runs, however fast devices send."""
_HEAD_BYTES = 16
"""A message's type is within its first bytes."""


class RunTransport(RunLink):
    """The link as one run sees it: its own devices, and the epoch that all runs share.

    A final refusal of this run is not sent to the device: another run may accept it.
    """

    offers_refused: ClassVar[bool] = True

    def __init__(self, router: "Router", run: str, devices_where: str) -> None:
        super().__init__(SimpleQueue())
        self.run = run
        self.devices_where = devices_where
        self._router = router
        self._link = router.link

    @property
    def limits(self) -> BrokerLimits:
        return self._link.limits

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._router.events.put(_Opened(self))

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Nothing to do: the router subscribes, and forwards messages of this run's devices."""

    def unsubscribe(self, topic_filter: str) -> None:
        pass

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        topics = self._router.topics
        if topic == topics.coordinator_state:  # the router publishes it for all runs
            return True
        if b"refused" in payload[:_HEAD_BYTES] and isinstance(refused := decode(payload), Refused) and refused.final:
            self._router.events.put(_Rejected(self, topics.device_of(topic), refused.reason))
            return True
        if peek_tag(payload) == b"welcome" and isinstance(welcome := decode(payload), Welcome):
            # before it is sent: the device's answer to what follows comes later
            self._router.events.put(_Welcomed(topics.device_of(topic), welcome.instance))
        return self._router.publish(topic, payload, qos=qos)

    def listen(self, topic: str, sink: BulkSink) -> None:
        self._link.listen(topic, sink)

    def stop_listening(self, topic: str) -> None:
        self._link.stop_listening(topic)

    def bulk_up(self) -> bool:
        return self._link.bulk_up()

    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        return self._link.send_bulk(topic, messages)

    def pending_bytes(self) -> int:
        return self._link.pending_bytes()

    def close(self) -> None:
        self._router.events.put(_Closed(self))


class _Opened(NamedTuple):
    transport: RunTransport


class _Closed(NamedTuple):
    transport: RunTransport


class _Rejected(NamedTuple):
    """A run refused a device finally."""

    transport: RunTransport
    device: str
    reason: str


class _Welcomed(NamedTuple):
    """A run welcomes a device."""

    device: str
    instance: str


class Router:
    """See above. `has_ended(run)` says whether results of a run are no longer wanted; `operator_log` prints a line.

    `leadership`: of a service that others stand by for. While the database does not confirm it, nothing is sent, and
    runs wait as without a link. With a `store` devices are told which of their models to use.
    """

    def __init__(
        self,
        link: Transport,
        federation: str,
        *,
        has_ended: Callable[[str], bool],
        operator_log: Callable[[str], None],
        leadership: Leadership | None = None,
        store: Record | None = None,
    ) -> None:
        self.link = link
        self.topics = Topics(federation)
        self.events = link.inbox
        self.epoch = 0
        self.connected = False  # and, with a leadership, it is confirmed
        self._linked = False
        self._leadership = leadership
        self._has_ended = has_ended
        self._operator_log = operator_log
        self._lease = Lease(link, self.topics, "", operator_log, leadership.term if leadership else 0)
        self._presence = Presence()
        self._assignments = Assignments(
            self.topics,
            self._presence,
            self._send_idle,
        )
        self.models = ModelKeeper(store, self._send, lambda: self.epoch, operator_log) if store else None
        self.seen_since = self._presence.seen_since
        self.members = self._assignments.list_devices
        self._link_trouble = ""
        self.limits = SenderLimits(self.topics)
        link.admits = self.limits.admits
        self._labels: dict[str, dict[str, str]] = {}  # by device: those that the operator set

    def open(self) -> None:
        for topic in (*self.topics.from_all_devices, self.topics.coordinator_state):
            self.link.subscribe(topic, 1)
        self.link.open(self._lease.will)

    def close(self) -> None:
        if self.connected and self._lease.is_held and self._leads():
            self._lease.end()
        self.link.close()

    def pump(self, timeout_s: float) -> None:
        """Handle events; wait at most this long for the first. Raises FederationTaken, LeadershipLost."""
        self._follow_leadership()
        try:
            self._on_event(self.events.get(timeout=timeout_s))
            for _ in range(EVENTS_AT_ONCE):
                self._on_event(self.events.get_nowait())
        except queue.Empty:
            pass

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        """Send a message; False if it is dropped: there is no link, or another service may lead."""
        return self._leads() and self.link.publish(topic, payload, qos=qos)

    def _leads(self) -> bool:
        return self._leadership is None or self._leadership.is_current()

    def _follow_leadership(self) -> None:
        """Raises LeadershipLost."""
        if self._leadership:
            self._leadership.check()
            if self.connected and not self._leads():
                self._operator_log("the database does not confirm that this service leads: paused until it does")
                self._on_disconnected(Disconnected("leadership is not confirmed"))
            elif self._linked and not self.connected and self._leads():
                self._on_connected()

    def set_labels(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Labels by device that replace those of the devices; a device whose labels change may change its run."""
        before, self._labels = self._labels, {device: dict(of) for device, of in labels.items()}
        for device in before.keys() | self._labels.keys():
            entry = self._assignments.devices.get(device)
            if entry and before.get(device) != self._labels.get(device) and self._presence.is_online(device):
                hello = decode(entry.event.payload)
                assert isinstance(hello, Hello)  # `event` is the message with the hello
                self._on_hello(device, hello, entry.event)

    def expel(self, device: str) -> None:
        """Exclude a device."""
        self._assignments.devices.pop(device, None)
        if device in self._presence:
            self._presence.dismiss(device)

    # --- events -------------------------------------------------------------------------------------------

    def _on_event(self, event: object) -> None:
        if isinstance(event, Received) and not isinstance(event, BulkReceived):
            self.limits.note_handled(event.payload)
        match event:
            case Received(topic=self.topics.coordinator_state):
                with suppress(BadPayload, PeerRefused):
                    if isinstance(state := decode(event.payload), CoordinatorState):
                        self._lease.on_coordinator(state)
            case Received():
                self._on_received(event)
            case Connected():
                self._linked = True
                if self._leads():
                    self._on_connected()
            case Disconnected(reason=reason):
                if reason != self._link_trouble:
                    self._operator_log(f"broker: {reason}; trying again")
                    self._link_trouble = reason
                self._linked = False
                self._on_disconnected(event)
            case _Opened(transport=transport):
                if self.connected:
                    self._connect(transport)
                self._assignments.add_run(transport)
            case _Closed(transport=transport):
                self._assignments.remove_run(transport)
            case _Rejected(transport=transport, device=device, reason=reason):
                self._assignments.reject(transport, device, reason)
            case _Welcomed(device=device, instance=instance):
                if self.models:
                    self.models.welcome(device, instance)
            case _:
                self._to_all_runs(Wake())

    def _to_all_runs(self, event: object) -> None:
        for transport in self._assignments.runs:
            transport.inbox.put(event)

    def _on_disconnected(self, event: Disconnected) -> None:
        self.connected = False
        self._presence.all_offline()
        self._to_all_runs(event)

    def _on_connected(self) -> None:
        self.connected = True
        self._link_trouble = ""
        self.epoch = self._lease.renew(hello_spread_s(len(self._assignments.devices)))
        for transport in self._assignments.runs:
            self._connect(transport)

    def _connect(self, transport: RunLink) -> None:
        transport.shared_epoch = self.epoch
        transport.announced_packet_bytes = self.link.announced_packet_bytes
        transport.inbox.put(Connected())

    def _on_received(self, event: Received) -> None:
        device = self.topics.device_of(event.topic)
        entry = self._assignments.devices.get(device)
        owner = entry.owner if entry else None
        if not is_name(device):
            log.warning("message dropped", extra={"reason": f"{device[:64]!r} cannot be the name of a device"})
            return
        try:
            message = None if "/up/b/" in event.topic else decode(event.payload)
        except (PeerRefused, BadPayload) as error:
            if self._answer_unreadable(device, event.payload, error):
                return
            message = None  # its run records the refusal
        match message:
            case Hello():
                self._on_hello(device, message, event)
                return
            case DeviceState(online=True):  # `edge-client doctor` asks whether a coordinator is online
                self._send(device, self._lease.state())
                return
            case DeviceState():
                if self._presence.state_changed(device, message):
                    log.info("device left", extra={"device": device})
            case Result() if owner is None:
                self._answer_result(device, message)
            case ModelReport():
                if self.models:
                    self.models.take(device, message)
                return
        if owner:
            owner.inbox.put(event)

    def _answer_unreadable(self, device: str, payload: bytes, error: PeerRefused | BadPayload) -> bool:
        """Refuse a device whose version or hello cannot be read; False for other messages."""
        if isinstance(error, PeerRefused):
            self._send(device, Refused("", f"{error}; install the same version on both sides", final=True))
        elif instance := unread_hello(payload):
            self._send(device, Refused(instance, f"its hello: {error}", final=True))
        else:
            return False
        return True

    def _answer_result(self, device: str, result: Result) -> None:
        """Answer a result of a run that the device no longer belongs to."""
        keep = not self._has_ended(result.run)
        reason = f"run {result.run!r} " + ("has no work for it now" if keep else "has ended")
        self._send(device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason, keep=keep))

    def _on_hello(self, device: str, hello: Hello, event: Received) -> None:
        hello = msgspec.structs.replace(hello, labels=hello.labels | self._labels.get(device, {}))
        if rival := self._presence.find_rival(device, hello):
            if rival.news:
                self._operator_log(rival.news)
            self._send(device, Refused(hello.instance, rival.reason, final=False))
            return
        if not self._presence.is_online(device):
            labels = "".join(f" {name}={value}" for name, value in sorted(hello.labels.items()))
            self._operator_log(f"{device} is online{labels}")
            log.info("device online", extra={"device": device, "labels": labels.strip()})
        self._presence.arrived(device, hello)
        self._assignments.assign(device, hello, event)

    def _send_idle(self, device: str, hello: Hello, why: str) -> None:
        """Welcome a device that no run wants."""
        self._send(device, Welcome(hello.instance, self.epoch, why, limits=self.link.limits.non_default()))
        if self.models:
            self.models.welcome(device, hello.instance)

    def _send(self, device: str, message: FromCoordinator) -> None:
        self.publish(self.topics.to_device(device), encode(message))
