"""The event loop of a coordinator: one thread handles all events in order, until a condition holds.

So the code of a run reads from top to bottom, and its state needs no lock.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from coordinator.rounds.sender_limits import SenderLimits
from fedvit.errors import BadPayload, PeerRefused
from fedvit.transport.base import BulkReceived, Connected, Disconnected, Received, Transport, Wake
from fedvit.wire.messages import AnyMessage, CoordinatorState, FromCoordinator, Refused, decode, encode, unread_hello
from fedvit.wire.topics import Topics, is_name

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

TICK_S = 0.1
EVENTS_AT_ONCE = 500
"""After this many events, deadlines and Ctrl-C are checked, however fast a device sends."""


class Interrupted(Exception):
    """The operator asked to stop; the run can be resumed."""


class Handler(Protocol):
    """Handles the events."""

    def on_message(self, device: str, message: AnyMessage) -> None: ...

    def on_chunk(self, device: str, topic: str, payload: bytes) -> None: ...

    def on_unreadable(self, device: str, kind: str, reason: str) -> None:
        """A message cannot be decoded; the device has been answered if possible."""
        ...

    def on_coordinator(self, state: CoordinatorState) -> None:
        """A coordinator of this federation, this one or another, published its state."""
        ...

    def on_link(self, *, up: bool, trouble: str) -> None:
        """The link to the broker went up or down; `trouble`: why it is down, if the reason is new."""
        ...

    def on_tick(self) -> None:
        """Called several times a second."""
        ...


class Inbox:
    """Receives events from the transport, and sends messages."""

    handler: Handler  # must be set before the first `pump`

    def __init__(self, transport: Transport, topics: Topics) -> None:
        self.connected = False
        self._transport = transport
        self._topics = topics
        self.limits = SenderLimits(topics)
        transport.admits = self.limits.admits
        self._stop = threading.Event()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._background: threading.Thread | None = None
        self._link_trouble = ""

    def stop(self) -> None:
        """Make `pump` raise Interrupted; safe from a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """End the background thread, without waiting for its current work."""
        self._waiting.put(None)

    def send(self, device: str, message: FromCoordinator) -> None:
        """Raises BadPayload for a message that is too large."""
        self._transport.publish(self._topics.to_device(device), encode(message), qos=1)

    def pump(self, until: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Handle events until `until()` holds (True) or the deadline passes (False)."""
        inbox = self._transport.inbox
        while not until():
            if self._stop.is_set():
                raise Interrupted
            if time.monotonic() >= deadline:
                return False
            try:
                self._on_event(inbox.get(timeout=TICK_S))
                for _ in range(EVENTS_AT_ONCE):
                    self._on_event(inbox.get_nowait())
            except queue.Empty:
                pass
            self.handler.on_tick()
        return True

    def in_background(self, work: Callable[[], Outcome]) -> Outcome:
        """Run long work in a thread while devices are served; Ctrl-C does not wait for it."""
        future = self.begin(work)
        self.pump(future.done)
        return future.result()

    def begin(self, work: Callable[[], Outcome]) -> Future[Outcome]:
        """Run long work in the background thread, after all earlier work."""
        future: Future[Outcome] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                future.set_exception(error)
            self._transport.inbox.put(Wake())  # otherwise the answer would wait for the next event or tick

        if self._background is None:
            self._background = threading.Thread(target=self._work, name="server-step", daemon=True)
            self._background.start()
        self._waiting.put(run)
        return future

    def _work(self) -> None:
        """One thread for all work: each new thread would have its own heap and its own pool of torch threads."""
        while work := self._waiting.get():
            work()

    def _on_event(self, event: object) -> None:
        match event:
            case Connected():
                self.connected = True
                self._link_trouble = ""
                self.handler.on_link(up=True, trouble="")
            case Disconnected(reason=reason):
                self.connected = False
                news, self._link_trouble = reason if reason != self._link_trouble else "", reason
                self.handler.on_link(up=False, trouble=news)
            case BulkReceived(topic=topic, payload=payload):
                self._on_received(topic, payload)
            case Received(topic=topic, payload=payload):
                self.limits.note_handled(payload)
                if topic == self._topics.coordinator_state:
                    self._on_coordinator(payload)
                else:
                    self._on_received(topic, payload)

    def _on_coordinator(self, payload: bytes) -> None:
        try:
            message = decode(payload)
        except (BadPayload, PeerRefused) as error:
            log.warning("message dropped", extra={"reason": f"a coordinator's state: {error}"})
            return
        if isinstance(message, CoordinatorState):
            self.handler.on_coordinator(message)

    def _on_received(self, topic: str, payload: bytes) -> None:
        device = self._topics.device_of(topic)
        if not is_name(device):  # a broker without access rules forwards anything; no device could be answered
            log.warning("message dropped", extra={"reason": f"{device[:64]!r} cannot be the name of a device"})
            return
        if "/up/b/" in topic:
            self.handler.on_chunk(device, topic, payload)
            return
        try:
            message = decode(payload)
        except PeerRefused as error:
            # the version is the first byte, so even an unknown one can be answered
            self.handler.on_unreadable(device, "hello", str(error))
            self.send(device, Refused("", f"{error}; install the same version on both sides", final=True))
        except BadPayload as error:
            self.handler.on_unreadable(device, "message", str(error))
            if instance := unread_hello(payload):
                self.send(device, Refused(instance, f"its hello: {error}", final=True))
        else:
            self.handler.on_message(device, message)
