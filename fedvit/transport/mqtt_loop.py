"""One thread for any number of MQTT connections: a device has one, a host of virtual devices hundreds.

The thread waits for all sockets at once and drives paho's clients by `loop_read`, `loop_write` and `loop_misc`.
"""

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client
from paho.mqtt.enums import MQTTErrorCode

from fedvit.errors import ConfigError
from fedvit.transport.address import Address, describe_error

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Longest wait for the acknowledgement of the last messages when a connection is closed."""
MISC_EVERY_S = 1.0
"""Interval between checks of keepalives; a select ends after this time at the latest."""
READS_AT_ONCE = 16
"""Messages that are read from one connection before the next connection is served."""


class LoopMember(ABC):
    """A connection as its loop sees it. All methods are called in the loop's thread."""

    address: Address
    client: Client | None = None  # of the connection, or of the attempt to connect

    def __init__(self) -> None:
        self.closed_at: float | None = None  # on the monotonic clock
        self.waits = False  # for its next attempt
        self.paced = False  # it is served again when more may be published
        self.gone = threading.Event()  # closed, and its socket with it

    @abstractmethod
    def begin(self) -> Client:
        """A new client for an attempt to connect. Raises ConfigError and OSError."""

    @abstractmethod
    def is_over(self) -> bool:
        """True if this side ends the connection."""

    @abstractmethod
    def publish_due(self) -> float | None:
        """Publish what had to wait. Seconds until more may be published; None if nothing waits."""

    @abstractmethod
    def end(self, reason: str) -> float | None:
        """The connection, or the attempt, has ended: seconds until the next attempt, None after `close`."""


class MqttLoop:
    """The thread behind connections; it starts with the first of them, and ends with `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._is_woken = False  # it has been asked to look at `_changed`, and has not begun to
        self._changed: deque[LoopMember] = deque()  # something is to be done for them now
        # heap: when to do what
        self._due: list[tuple[float, int, Callable[[LoopMember], None], LoopMember]] = []
        self._number = itertools.count()
        self._members: set[LoopMember] = set()
        self._thread: threading.Thread | None = None
        self._over = False
        self._farewell_s = FAREWELL_S + 0.5  # for all links: a silent broker is waited for once, not per link

    def close(self) -> None:
        """End the thread; its connections should be closed before."""
        self._over = True
        self.wake()
        if self._thread is None:
            self._release()
        else:
            self._thread.join(FAREWELL_S if self._farewell_s else 0.0)

    def _release(self) -> None:
        for held in (self._selector, self._woken, self._waker):
            held.close()

    # --- from any thread --------------------------------------------------------------------------------

    def add(self, member: LoopMember) -> None:
        with self._lock:
            self._members.add(member)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
                self._thread.start()
        self.look_after(member)

    def remove(self, member: LoopMember) -> None:
        """Disconnect a member whose `closed_at` is set, after its last messages were acknowledged."""
        self.look_after(member)
        if member in self._members and not member.gone.wait(self._farewell_s):
            self._farewell_s = 0.0

    def look_after(self, member: LoopMember) -> None:
        """Serve a member soon: it has data to write, or was opened or closed."""
        self._changed.append(member)
        self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # full: it will wake anyway
                self._waker.send(b"\0")

    # --- the network thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._over:
            for key, ready in self._selector.select(self._patience_s()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(65536)
                    self._is_woken = False  # before it looks
                else:
                    self._serve_safely(key.data, ready)
            for _ in range(len(self._changed)):
                self._serve_safely(self._changed.popleft(), selectors.EVENT_READ | selectors.EVENT_WRITE)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, act, member = heapq.heappop(self._due)
                act(member)
            if now - looked_at >= MISC_EVERY_S:
                looked_at = now
                for member in list(self._members):
                    self._serve_safely(member, 0)
        self._release()

    def _patience_s(self) -> float:
        if self._changed:
            return 0.0
        until = self._due[0][0] if self._due else float("inf")
        return max(0.0, min(MISC_EVERY_S, until - time.monotonic()))

    def _serve_safely(self, member: LoopMember, ready: int) -> None:
        """An error on one connection ends that connection, never the thread."""
        try:
            self._serve(member, ready)
        except Exception as error:  # noqa: BLE001 - logged where it is unexpected
            self._fail(member, error)

    def _fail(self, member: LoopMember, error: Exception) -> None:
        if not isinstance(error, OSError | ValueError):
            log.error("MQTT link failed", extra={"broker": str(member.address)}, exc_info=error)
        self._lose(member, f"{member.address}: {describe_error(error)}")

    def _serve(self, member: LoopMember, ready: int) -> None:
        client = member.client
        if client is None:
            if member not in self._members:
                return
            if member.closed_at is not None:
                self._forget(member)
            elif not member.waits:
                self._connect(member)
            return
        ended = MQTT_ERR_SUCCESS
        if ready & selectors.EVENT_READ:
            ended = self._read(member, client)
        if not ended and not member.paced and (wait_s := member.publish_due()) is not None:
            member.paced = True
            self._after(wait_s, self._publish_more, member)
        if not ended and client.socket() is not None and client.want_write():
            ended = client.loop_write()
        if not ended and not ready:
            ended = client.loop_misc()
        if ended or client.socket() is None:
            self._lose(member, f"{member.address}: connection lost")
        elif member.is_over():
            client.disconnect()
            client.loop_write()
            self._lose(member, "closed")
        else:
            self._watch(member, client)

    def _read(self, member: LoopMember, client: Client) -> MQTTErrorCode:
        for _ in range(READS_AT_ONCE):
            ended = client.loop_read()
            if ended or client.socket() is None or not _more_to_read(client):
                return ended
        self.look_after(member)
        return MQTT_ERR_SUCCESS

    def _connect(self, member: LoopMember) -> None:
        """Start a connection; the broker's answer arrives like any message."""
        member.waits = False
        if member.closed_at is not None:
            self._forget(member)
            return
        try:
            client = member.begin()
            client.on_socket_register_write = lambda *_: self.look_after(member)
            client.on_socket_close = lambda _client, _data, closing: self._unregister(closing)
            client.reconnect()
            self._watch(member, client)
        except ConfigError as error:
            self._lose(member, str(error))
        except Exception as error:  # noqa: BLE001 - logged where it is unexpected
            self._fail(member, error)

    def _lose(self, member: LoopMember, reason: str) -> None:
        """Close a link, and try again after a while."""
        client = member.client
        wait_s = member.end(reason)
        if client is not None and (left := client.socket()) is not None:
            self._unregister(left)
            client._sock_close()  # paho closes it only where it was the one to notice
        if wait_s is None:
            self._forget(member)
            return
        member.waits = True
        self._after(wait_s, self._connect, member)

    def _after(self, wait_s: float, act: Callable[[LoopMember], None], member: LoopMember) -> None:
        heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._number), act, member))

    def _publish_more(self, member: LoopMember) -> None:
        member.paced = False
        if not member.waits:
            self._serve_safely(member, selectors.EVENT_WRITE)

    def _forget(self, member: LoopMember) -> None:
        self._members.discard(member)
        member.gone.set()

    def _watch(self, member: LoopMember, client: Client) -> None:
        """Register the client's socket: always for reading, and for writing after an incomplete send."""
        watched = client.socket()
        if watched is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.want_write() else 0)
        known = self._selector.get_map().get(watched)
        if known is None:
            self._selector.register(watched, events, member)
        elif known.events != events:
            self._selector.modify(watched, events, member)

    def _unregister(self, closing: object) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(closing)  # type: ignore[arg-type]  # paho's word for a socket is wider


def _more_to_read(client: Client) -> bool:
    """Return whether TLS holds decrypted bytes, which select does not report."""
    pending = getattr(client.socket(), "pending", None)
    return bool(pending and pending())
