"""One link to the broker, shared by several runs: each device belongs to one of them at a time.

The router hears every hello and last will, and passes on what a device says to the run that it belongs to. A run has a
`Transport` of its own, which carries its devices alone. All of the router's state belongs to the thread that calls
`pump`; runs reach it through its inbox.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from coordinator.config import why_not_asked
from coordinator.run.lease import Lease
from coordinator.run.presence import Presence
from fedvit.errors import BadPayload, PeerRefused
from fedvit.transport.base import BulkSink, Connected, Disconnected, Received, Transport, Wake, Will, WillMaker
from fedvit.wire.messages import (
    CoordinatorState,
    DeviceState,
    FromCoordinator,
    Hello,
    Refused,
    Result,
    ResultAck,
    Welcome,
    decode,
    encode,
    unread_hello,
)
from fedvit.wire.topics import Topics, is_name

log = logging.getLogger(__name__)

NO_WORK = "no run has work for it now"
EVENTS_AT_ONCE = 500
"""After this many the runs themselves are looked after, however much devices say."""
_HEAD_BYTES = 16
"""A message's type is within its first bytes."""


class RunTransport(Transport):
    """The link as one run sees it: its own devices, and the epoch that all runs share.

    A refusal that is final for this run does not reach the device: another run may want it.
    """

    def __init__(self, router: "Router", run: str, devices_where: str) -> None:
        super().__init__(SimpleQueue())
        self.run = run
        self.devices_where = devices_where
        self._router = router
        self._link = router.link

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._router.events.put(_Opened(self))

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """The router hears all devices, and passes on what this run's say."""

    def unsubscribe(self, topic_filter: str) -> None:
        pass

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        topics = self._router.topics
        if topic == topics.coordinator_state:  # the router says it for all runs
            return True
        if b"refused" in payload[:_HEAD_BYTES] and isinstance(refused := decode(payload), Refused) and refused.final:
            self._router.events.put(_Unwanted(self, topics.device_of(topic), refused.reason))
            return True
        return self._link.publish(topic, payload, qos=qos)

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


class _Unwanted(NamedTuple):
    """A run refused a device for good."""

    transport: RunTransport
    device: str
    reason: str


class Member(NamedTuple):
    """A device that said hello since this process began."""

    device: str
    labels: dict[str, str]
    online: bool
    run: str | None


class _Place:
    """What the router knows of one device beside its presence."""

    def __init__(self, hello: Hello, event: Received) -> None:
        self.hello = hello
        self.event = event  # the hello as it came
        self.owner: RunTransport | None = None
        self.refused: dict[str, str] = {}  # run -> why it does not want this device


class Router:
    """See above. `has_ended(run)` says that no result of a run is wanted any more; `say` is for the operator."""

    def __init__(
        self,
        link: Transport,
        federation: str,
        *,
        has_ended: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self.link = link
        self.topics = Topics(federation)
        self.events = link.inbox
        self.epoch = 0
        self.connected = False
        self._has_ended = has_ended
        self._say = say
        self._lease = Lease(link, self.topics, "", say)
        self._runs: list[RunTransport] = []  # in the order in which they take devices
        self._presence = Presence()
        self._places: dict[str, _Place] = {}
        self._link_trouble = ""

    def open(self) -> None:
        for topic in (*self.topics.from_all_devices, self.topics.coordinator_state):
            self.link.subscribe(topic, 1)
        self.link.open(self._lease.will)

    def close(self) -> None:
        if self.connected and self._lease.is_held:
            self._lease.end()
        self.link.close()

    def pump(self, timeout_s: float) -> None:
        """Handle what came; wait for it at most this long. Raises FederationTaken."""
        try:
            self._on_event(self.events.get(timeout=timeout_s))
            for _ in range(EVENTS_AT_ONCE):
                self._on_event(self.events.get_nowait())
        except queue.Empty:
            pass

    def members(self) -> list[Member]:
        return [
            Member(name, place.hello.labels, self._presence.is_online(name), place.owner.run if place.owner else None)
            for name, place in sorted(self._places.items())
        ]

    def expel(self, device: str) -> str | None:
        """The device may not come any more; the answer is the run that it belonged to."""
        place = self._places.pop(device, None)
        if device in self._presence:
            self._presence.dismiss(device)
        return place.owner.run if place and place.owner else None

    # --- what arrives -------------------------------------------------------------------------------------

    def _on_event(self, event: object) -> None:
        match event:
            case Received(topic=self.topics.coordinator_state):
                with suppress(BadPayload, PeerRefused):
                    if isinstance(state := decode(event.payload), CoordinatorState):
                        self._lease.heard(state)
            case Received():
                self._on_received(event)
            case Connected():
                self._on_connected()
            case Disconnected(reason=reason):
                if reason != self._link_trouble:
                    self._say(f"broker: {reason}; trying again")
                    self._link_trouble = reason
                self.connected = False
                self._presence.all_offline()
                self._to_all_runs(event)
            case _Opened(transport=transport):
                self._runs.append(transport)
                if self.connected:
                    self._connect(transport)
                self._offer_all()
            case _Closed(transport=transport):
                self._runs.remove(transport)
                for place in self._places.values():
                    place.refused.pop(transport.run, None)
                    if place.owner is transport:
                        place.owner = None
                self._offer_all()
            case _Unwanted(transport=transport, device=device, reason=reason):
                self._on_unwanted(transport, device, reason)
            case _:
                self._to_all_runs(Wake())

    def _to_all_runs(self, event: object) -> None:
        for transport in self._runs:
            transport.inbox.put(event)

    def _on_connected(self) -> None:
        self.connected = True
        self._link_trouble = ""
        self.epoch = self._lease.renew()
        for transport in self._runs:
            self._connect(transport)

    def _connect(self, transport: RunTransport) -> None:
        transport.shared_epoch = self.epoch
        transport.inbox.put(Connected())

    def _on_received(self, event: Received) -> None:
        device = self.topics.device_of(event.topic)
        place = self._places.get(device)
        owner = place.owner if place else None
        if not is_name(device):
            log.warning("message dropped", extra={"reason": f"{device[:64]!r} cannot be the name of a device"})
            return
        try:
            message = None if "/up/b/" in event.topic else decode(event.payload)
        except (PeerRefused, BadPayload) as error:
            if self._answer_unreadable(device, event.payload, error):
                return
            message = None  # its run counts it
        match message:
            case Hello():
                self._on_hello(device, message, event)
                return
            case DeviceState(online=True):  # it only asks whether somebody is here (`edge-client doctor`)
                self._tell(device, self._lease.state())
                return
            case DeviceState():
                if self._presence.state_changed(device, message):
                    log.info("device left", extra={"device": device})
            case Result() if owner is None:
                self._answer_result(device, message)
        if owner:
            owner.inbox.put(event)

    def _answer_unreadable(self, device: str, payload: bytes, error: PeerRefused | BadPayload) -> bool:
        """Refuse a device that no run can take part with; False for a message that says nothing of the kind."""
        if isinstance(error, PeerRefused):
            self._tell(device, Refused("", f"{error}; install the same version on both sides", final=True))
        elif instance := unread_hello(payload):
            self._tell(device, Refused(instance, f"its hello: {error}", final=True))
        else:
            return False
        return True

    def _answer_result(self, device: str, result: Result) -> None:
        """Of a run that the device does not belong to any more."""
        keep = not self._has_ended(result.run)
        reason = f"run {result.run!r} " + ("has no work for it now" if keep else "has ended")
        self._tell(device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason, keep=keep))

    # --- which run a device belongs to ------------------------------------------------------------------------

    def _on_hello(self, device: str, hello: Hello, event: Received) -> None:
        if rival := self._presence.rival(device, hello):
            where = rival.hello.profile.host
            reason = f"a device with id {device!r} is online already (on {where}); choose another with --id"
            self._tell(device, Refused(hello.instance, reason, final=False))
            return
        if not self._presence.is_online(device):
            labels = "".join(f" {name}={value}" for name, value in sorted(hello.labels.items()))
            self._say(f"{device} is here{labels}")
            log.info("device is here", extra={"device": device, "labels": labels.strip()})
        self._presence.arrived(device, hello)
        before = self._places.get(device)
        place = self._places[device] = _Place(hello, event)
        if before and before.owner and self._why_not(before.owner, place) is None:
            place.owner = before.owner
            place.owner.inbox.put(event)
            return
        if before and before.owner:  # its labels are others now
            gone = encode(DeviceState(hello.instance, online=False))
            before.owner.inbox.put(Received(self.topics.device_state(device), gone))
        self._offer(device)

    def _on_unwanted(self, transport: RunTransport, device: str, reason: str) -> None:
        place = self._places.get(device)
        if place and place.owner is transport:
            place.owner = None
            place.refused[transport.run] = reason
            self._offer(device)

    def _offer_all(self) -> None:
        for device, place in self._places.items():
            if place.owner is None and self._presence.is_online(device):
                self._offer(device)

    def _offer(self, device: str) -> None:
        """Give a device to the first run that is for it; where there is none it is told why."""
        place, reasons = self._places[device], []
        for transport in self._runs:
            why = self._why_not(transport, place)
            if why is None:
                place.owner = transport
                transport.inbox.put(place.event)
                return
            reasons.append(f"run {transport.run}: {why}")
        self._tell(device, Welcome(place.hello.instance, self.epoch, "; ".join(reasons)[:1000] or NO_WORK))

    def _why_not(self, transport: RunTransport, place: _Place) -> str | None:
        if transport not in self._runs:
            return "it is over"
        return place.refused.get(transport.run) or why_not_asked(transport.devices_where, place.hello.labels)

    def _tell(self, device: str, message: FromCoordinator) -> None:
        self.link.publish(self.topics.to_device(device), encode(message))
