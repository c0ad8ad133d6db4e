"""Many MQTT connections of one process on one thread, for hosts of many virtual devices.

`MqttTransport` has a thread of its own, which is right for a device; five hundred threads that wait are not. Here one
thread waits for all sockets at once and drives paho's clients by its `loop_read`, `loop_write`, `loop_misc`.
What a link promises, and how it comes back, is the same.
"""

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from queue import SimpleQueue

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion

from fedvit.errors import ConfigError
from fedvit.transport.base import Disconnected, Will, WillMaker
from fedvit.transport.mqtt import (
    FAREWELL_S,
    Address,
    MqttTransport,
    _Link,
    describe_error,
)

log = logging.getLogger(__name__)

MISC_EVERY_S = 1.0
"""Interval between checks of keepalives; a select ends after this time at the latest."""
READS_AT_ONCE = 16
"""Messages that are read from one connection before the next connection is served."""


class MqttLoop:
    """The thread behind any number of `SharedMqttTransport`; it starts with the first, and ends with `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._is_woken = False  # it has been asked to look at `_changed`, and has not begun to
        self._changed: deque[SharedMqttTransport] = deque()  # something is to be done for them now
        self._due: list[tuple[float, int, SharedMqttTransport]] = []  # heap: when to connect
        self._number = itertools.count()
        self._members: set[SharedMqttTransport] = set()
        self._thread: threading.Thread | None = None
        self._over = False
        self.farewell_s = FAREWELL_S + 0.5
        """Longest wait for the disconnect of all links: a silent broker is waited for once, not per link."""

    def close(self) -> None:
        """End the thread; its transports should be closed before."""
        self._over = True
        self.wake()
        if self._thread is not None:
            self._thread.join(FAREWELL_S)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    # --- from any thread --------------------------------------------------------------------------------

    def add(self, transport: "SharedMqttTransport") -> None:
        with self._lock:
            self._members.add(transport)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
                self._thread.start()
        self.look_after(transport)

    def has(self, transport: "SharedMqttTransport") -> bool:
        return transport in self._members

    def look_after(self, transport: "SharedMqttTransport") -> None:
        """Serve a transport soon: it has data to write, or was opened or closed."""
        self._changed.append(transport)
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
                    self._guarded(key.data, ready)
            while self._changed:
                self._guarded(self._changed.popleft(), selectors.EVENT_WRITE)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._connect(heapq.heappop(self._due)[2])
            if now - looked_at >= MISC_EVERY_S:
                looked_at = now
                for transport in list(self._members):
                    self._guarded(transport, 0)

    def _patience_s(self) -> float:
        if self._changed:
            return 0.0
        until = self._due[0][0] if self._due else float("inf")
        return max(0.0, min(MISC_EVERY_S, until - time.monotonic()))

    def _guarded(self, transport: "SharedMqttTransport", ready: int) -> None:
        """An error on one connection ends that connection, never the thread."""
        try:
            self._serve(transport, ready)
        except (OSError, ValueError) as error:
            self._lost(transport, f"{transport.address}: {describe_error(error)}")
        except Exception as error:
            log.exception("MQTT link failed", extra={"broker": str(transport.address)})
            self._lost(transport, f"{transport.address}: {describe_error(error)}")

    def _serve(self, transport: "SharedMqttTransport", ready: int) -> None:
        link = transport._link
        if link is None:
            if transport not in self._members:
                return
            if transport.is_closing:
                self._forget(transport)
            elif not transport.waits:
                self._connect(transport)
            return
        client = link.client
        ended = MQTT_ERR_SUCCESS
        if ready & selectors.EVENT_READ:
            ended = self._read(client)
        if not ended and client.socket() is not None and client.want_write():
            ended = client.loop_write()
        if not ended and not ready:
            ended = client.loop_misc()
        if ended or client.socket() is None:
            self._lost(transport, link.ended or f"{transport.address}: connection lost")
            return
        if transport.farewell_is_over():
            client.disconnect()
            client.loop_write()
            self._lost(transport, "closed")
            return
        self._watch(transport, client)

    def _read(self, client: Client) -> MQTTErrorCode:
        for _ in range(READS_AT_ONCE):
            ended = client.loop_read()
            if ended or client.socket() is None:
                return ended
            if not _more_to_read(client):
                break
        return MQTT_ERR_SUCCESS

    def _connect(self, transport: "SharedMqttTransport") -> None:
        """Start a connection; the broker's answer arrives like any message."""
        transport.waits = False
        if transport.is_closing:
            self._forget(transport)
            return
        try:
            link = transport._link = _Link(transport._new_client(transport._versions[0]))
        except ConfigError as error:
            self._lost(transport, str(error))
            return
        link.client.on_socket_register_write = lambda *_: self.look_after(transport)
        link.client.on_socket_close = lambda _client, _data, closing: self._unregister(closing)
        try:
            link.client.reconnect()
            self._watch(transport, link.client)
        except (OSError, ValueError) as error:
            self._lost(transport, f"{transport.address}: {describe_error(error)}")
        except Exception as error:
            log.exception("MQTT link failed", extra={"broker": str(transport.address)})
            self._lost(transport, f"{transport.address}: {describe_error(error)}")

    def _lost(self, transport: "SharedMqttTransport", reason: str) -> None:
        """Report a lost link, and reconnect after a while, as `MqttTransport` does."""
        link, transport._link = transport._link, None
        if link is not None:
            link.up = link.answered = False
            if (left := link.client.socket()) is not None:
                self._unregister(left)
                link.client._sock_close()  # paho closes it only where it was the one to notice
        if transport.is_closing:
            self._forget(transport)
            return
        transport.inbox.put(Disconnected(reason))
        transport.waits = True
        heapq.heappush(self._due, (time.monotonic() + transport._retry_s(), next(self._number), transport))

    def _forget(self, transport: "SharedMqttTransport") -> None:
        self._members.discard(transport)
        transport.gone.set()

    def _watch(self, transport: "SharedMqttTransport", client: Client) -> None:
        """Register the client's socket: always for reading, and for writing after an incomplete send."""
        watched = client.socket()
        if watched is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.want_write() else 0)
        known = self._selector.get_map().get(watched)
        if known is None:
            self._selector.register(watched, events, transport)
        elif known.events != events:
            self._selector.modify(watched, events, transport)

    def _unregister(self, closing: object) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(closing)  # type: ignore[arg-type]  # paho's word for a socket is wider


class SharedMqttTransport(MqttTransport):
    """One link of many on a `MqttLoop`, which is closed after them."""

    def __init__(
        self,
        inbox: SimpleQueue[object],
        address: Address,
        client_id: str,
        loop: MqttLoop,
        *,
        return_spread_s: float = 0.0,
    ) -> None:
        versions = (MQTTProtocolVersion.MQTTv311,)
        super().__init__(inbox, address, client_id, versions=versions, return_spread_s=return_spread_s)
        self.waits = False  # for its next try to connect
        self.gone = threading.Event()  # closed, and its socket with it
        self._loop = loop
        self._closed_at: float | None = None

    @property
    def is_closing(self) -> bool:
        return self._closed_at is not None

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._will = will
        self._loop.add(self)

    def close(self) -> None:
        if self._closed_at is None:
            self._closed_at = time.monotonic()
            self._closing.set()
            self._bulk.close()
            self._loop.look_after(self)
            if self._loop.has(self) and not self.gone.wait(self._loop.farewell_s):
                self._loop.farewell_s = 0.0

    def farewell_is_over(self) -> bool:
        """Whether the link can be closed: its last message was acknowledged, or the time for that is over."""
        if self._closed_at is None:
            return False
        link = self._link
        acknowledged = link is None or not link.up or not link.unacknowledged()
        return acknowledged or time.monotonic() - self._closed_at > FAREWELL_S


def _more_to_read(client: Client) -> bool:
    """Whether TLS holds decrypted bytes, which select does not report."""
    pending = getattr(client.socket(), "pending", None)
    return bool(pending and pending())
