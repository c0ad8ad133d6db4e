"""The coordinator's one thread: takes what arrives, one event after another, until something holds.

So the course of a run reads from top to bottom, and nothing of its state needs a lock.
"""

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from fedvit.errors import BadPayload, PeerRefused
from fedvit.transport.base import Connected, Disconnected, Received, Transport, Wake
from fedvit.wire.messages import AnyMessage, CoordinatorState, FromCoordinator, Refused, decode, encode, unread_hello
from fedvit.wire.topics import Topics, is_name

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

TICK_S = 0.1
EVENTS_AT_ONCE = 500
"""After so many, deadlines and Ctrl-C are looked at, however fast a device sends."""


class Interrupted(Exception):
    """The operator asked to stop; the run can be resumed."""


class Inbox:
    """What comes over the transport, and the way back.

    `on_message(device, message)` and `on_chunk(topic, payload)` take what was read, `refuse(device, kind, reason)` what
    cannot be read. `on_link(up)` hears of the link, and `each_tick` is called several times a second.
    """

    def __init__(
        self,
        transport: Transport,
        topics: Topics,
        *,
        on_message: Callable[[str, AnyMessage], None],
        on_chunk: Callable[[str, bytes], None],
        on_link: Callable[[bool], None],
        refuse: Callable[[str, str, str], None],
        each_tick: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.epoch = 0
        self.connected = False
        self._transport = transport
        self._topics = topics
        self._on_message = on_message
        self._on_chunk = on_chunk
        self._on_link = on_link
        self._refuse = refuse
        self._each_tick = each_tick
        self._say = say
        self._stop = threading.Event()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._background: threading.Thread | None = None
        self._link_trouble = ""

    def stop(self) -> None:
        """Make `pump` raise Interrupted; safe from a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Nothing more will be done in the background; what is being done is not waited for."""
        self._waiting.put(None)

    def tell(self, device: str, message: FromCoordinator) -> None:
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
            self._each_tick()
        return True

    def in_background(self, work: Callable[[], Outcome]) -> Outcome:
        """Run something long in a thread while devices stay served; Ctrl-C does not wait for it."""
        future: Future[Outcome] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                future.set_exception(error)
            self._transport.inbox.put(Wake())  # else the answer would wait for the next event or tick

        if self._background is None:
            self._background = threading.Thread(target=self._work, name="server-step", daemon=True)
            self._background.start()
        self._waiting.put(run)
        self.pump(future.done)
        return future.result()

    def _work(self) -> None:
        """One thread for all of it: each new one would bring a heap and a pool of torch's threads of its own."""
        while work := self._waiting.get():
            work()

    def _on_event(self, event: object) -> None:
        match event:
            case Connected():
                self.connected = True
                self._link_trouble = ""
                # a new epoch makes every device say hello: while we were away we heard no last will
                self.epoch = self._transport.shared_epoch or secrets.randbits(48) + 1
                state = encode(CoordinatorState(self.epoch, alive=True))
                self._transport.publish(self._topics.coordinator_state, state, qos=1)
                self._on_link(True)
            case Disconnected(reason=reason):
                if reason != self._link_trouble:
                    self._say(f"broker: {reason}; trying again")
                    self._link_trouble = reason
                self.connected = False
                self._on_link(False)
            case Received(topic=topic, payload=payload):
                self._on_received(topic, payload)

    def _on_received(self, topic: str, payload: bytes) -> None:
        device = self._topics.device_of(topic)
        if not is_name(device):  # a broker without access rules lets anything through; nobody could be answered
            log.warning("message dropped", extra={"reason": f"{device[:64]!r} cannot be the name of a device"})
            return
        if "/up/b/" in topic:
            self._on_chunk(topic, payload)
            return
        try:
            message = decode(payload)
        except PeerRefused as error:
            # the version is the first byte, so even an unknown one can be answered
            self._refuse(device, "hello", str(error))
            self.tell(device, Refused("", f"{error}; install the same version on both sides", final=True))
        except BadPayload as error:
            self._refuse(device, "message", str(error))
            if instance := unread_hello(payload):
                self.tell(device, Refused(instance, f"its hello: {error}", final=True))
        else:
            self._on_message(device, message)
