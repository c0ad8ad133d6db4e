"""A second connection to the broker, for blobs' chunks alone: QoS 0, MQTT 3.1.1, without copies.

paho copies each payload two to four times, which is most of what a chunk costs; here chunks go from a mapped
file to the socket, and from one buffer into a file (docs/decisions/0013). With bulk on a connection of its own,
control messages never wait behind it. It is opened when the first blob moves, and closed when none has moved
for a while. Only order is guaranteed: lost chunks are requested again.
"""

import collections
import contextlib
import itertools
import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from fedvit.errors import BadPayload, ConfigError
from fedvit.transport import packets
from fedvit.transport.address import Address, describe_error
from fedvit.transport.backoff import Backoff
from fedvit.transport.base import BulkSink
from fedvit.transport.pace import Pace

log = logging.getLogger(__name__)

KEEPALIVE_S = 30
CONNECT_S = 10.0
IDLE_S = 30.0
"""The connection is closed this time after the last chunk."""
READ_BYTES = 256 * 1024
"""Bytes of one read: more would leave a small processor's cache before they are written to the file."""
PIECES = 32
"""Buffers in one call of sendmsg; a chunk is two."""
READS_IN_TURN = 8


class _Gone(Exception):
    """The connection ended; the message is the reason."""


class BulkLink:
    """Publishes and receives chunks on a connection that exists while chunks are transferred.

    `woken` is called, in the link's thread, when the connection is up; `received` with the size of what came.
    `backoff` says when a connection that was lost is tried again.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        tls: Callable[[], ssl.SSLContext | None],
        *,
        woken: Callable[[], None],
        received: Callable[[int], None],
        backoff: Backoff,
    ) -> None:
        self._address = address
        self._client_id = client_id
        self._tls = tls
        self._woken = woken
        self._received = received
        self._backoff = backoff
        self._lock = threading.Lock()
        self._sinks: dict[str, BulkSink] = {}
        self._by_name: dict[bytes, tuple[str, BulkSink]] = {}
        self._out: collections.deque[bytes | memoryview] = collections.deque()
        self._out_bytes = 0
        self._waiting_bytes = 0
        self._waiting: collections.deque[tuple[bytes, memoryview]] = collections.deque()  # until the pace permits more
        self.pace = Pace()
        self._packet_ids = itertools.cycle(range(1, 0x10000))
        self._asked: dict[int, str] = {}  # packet id -> topic of a subscription that is not confirmed
        self._up = False
        self._up_at: float | None = None
        self._used_at = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._asleep = False
        self._waker: socket.socket | None = None

    # --- from any thread ------------------------------------------------------------------------------

    def listen(self, topic: str, sink: BulkSink) -> None:
        with self._lock:
            self._sinks[topic] = sink
            self._by_name[topic.encode()] = topic, sink
            self._begin()
            if self._up:
                self._ask(topic)
        self._wake()

    def stop_listening(self, topic: str) -> None:
        with self._lock:
            self._used_at = time.monotonic()
            if self._sinks.pop(topic, None) is None:
                return
            del self._by_name[topic.encode()]
            if self._up:
                self._append(packets.unsubscribe(next(self._packet_ids), topic))
        self._wake()

    def up(self) -> bool:
        """Return whether chunks can be sent now; begin to connect if not."""
        with self._lock:
            self._begin()
            return self._up

    def send(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        """Queue messages of head and body; False while the link is down."""
        with self._lock:
            if not self._up:
                return False
            for head, body in messages:
                self._waiting.append((packets.publish_head(topic, len(head) + len(body)) + head, body))
                self._waiting_bytes += len(body)
            self._release()
        self._wake()
        return True

    def _release(self) -> float | None:
        """With the lock held: seconds until the pace permits the next message; None if none waits."""
        while self._waiting and self.pace.take():
            head, body = self._waiting.popleft()
            self._waiting_bytes -= len(body)
            self._append(head)
            self._append(body)
        return self.pace.wait_s() if self._waiting else None

    def pending_bytes(self) -> int:
        return self._out_bytes + self._waiting_bytes

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            thread = self._thread
        self._wake(always=True)
        if thread is not None:
            thread.join(1.0)

    def _begin(self) -> None:
        """With the lock held: there is a connection, or one is being made."""
        self._used_at = time.monotonic()
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name=f"bulk-{self._client_id}", daemon=True)
            self._thread.start()

    def _append(self, piece: bytes | memoryview) -> None:
        self._out.append(piece)
        self._out_bytes += len(piece)

    def _ask(self, topic: str) -> None:
        number = next(self._packet_ids)
        self._asked[number] = topic
        self._append(packets.subscribe(number, topic))

    def _wake(self, *, always: bool = False) -> None:
        waker = self._waker
        if waker is not None and (self._asleep or always):
            self._asleep = False
            with contextlib.suppress(OSError):  # the thread is awake or has ended
                waker.send(b"\0")

    # --- the link's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        trouble: str | None = None  # the reason that was logged last
        while not self._closing.is_set():
            self._up_at = None
            reason = self._connection()
            with self._lock:
                self._up = False
                self._out.clear()
                self._waiting.clear()
                self._out_bytes = self._waiting_bytes = 0
                self._asked.clear()
                if self._closing.is_set() or self._is_idle():
                    self._thread = None
                    return
            if reason is None:
                continue  # needed again meanwhile
            if self._up_at is not None or reason != trouble:  # logged once per outage
                log.info("bulk connection lost; trying again", extra={"reason": f"{self._address}: {reason}"})
            trouble = reason
            up_s = None if self._up_at is None else time.monotonic() - self._up_at
            self._closing.wait(self._backoff.wait_s(up_s))

    def _is_idle(self) -> bool:
        return not self._sinks and not self._out and not self._waiting and time.monotonic() - self._used_at > IDLE_S

    def _connection(self) -> str | None:
        """Serve one connection until it ends; returns the reason, None if it was not needed any more."""
        mine: socket.socket | None = None
        opened: socket.socket | None = None
        try:
            mine, self._waker = socket.socketpair()
            mine.setblocking(False)
            self._waker.setblocking(False)
            opened = self._connect()
            self._up_at = time.monotonic()
            with self._lock:
                self._up = True
                for topic in self._sinks:
                    self._ask(topic)
            self._woken()
            self._serve(opened, mine)
        except (_Gone, BadPayload, ConfigError, OSError, ValueError) as error:
            return describe_error(error)
        finally:
            waker, self._waker = self._waker, None
            for end in (opened, mine, waker):
                if end is not None:
                    end.close()
        return None

    def _connect(self) -> socket.socket:
        """A connection that the broker has accepted, not blocking."""
        address = self._address
        opened: socket.socket = socket.create_connection((address.host, address.port), CONNECT_S)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (tls := self._tls()) is not None:  # made again, as the certificate may have been renewed
                opened = tls.wrap_socket(opened, server_hostname=address.host)
            opened.sendall(packets.connect(self._client_id, KEEPALIVE_S, address.user, address.password))
            answer = b""
            while len(answer) < 4:
                piece = opened.recv(4 - len(answer))
                if not piece:
                    raise _Gone("closed without an MQTT answer")
                answer += piece
            if answer[0] != packets.CONNACK or answer[1] != 2:
                raise _Gone("the broker's reply is not a valid MQTT CONNACK")
            if answer[3]:
                raise _Gone(f"broker refused: {packets.REFUSALS.get(answer[3], 'unknown reason')}")
            opened.setblocking(False)
            return opened
        except BaseException:
            opened.close()
            raise

    def _serve(self, opened: socket.socket, mine: socket.socket) -> None:
        """Read, write, and keep the connection alive, until it is not needed any more. Raises if it is lost."""
        reader = _Reader(opened, self._on_packet)
        poller = select.poll()
        poller.register(mine, select.POLLIN)
        asked_at = heard_at = time.monotonic()
        while not self._closing.is_set():
            self._asleep = True
            with self._lock:
                wait_s = self._release()
            writing = bool(self._out)
            poller.register(opened, select.POLLIN | (select.POLLOUT if writing else 0))
            ready = dict(poller.poll(1000 if wait_s is None else math.ceil(1000 * wait_s)))
            self._asleep = False
            now = time.monotonic()
            if mine.fileno() in ready:
                mine.recv(4096)
            if ready.get(opened.fileno(), 0) & ~select.POLLOUT:
                heard_at = now
                reader.read()
            if self._out and self._write(opened) and self._out:
                heard_at = now  # the socket is full, and takes more: the broker reads
            if now - asked_at > KEEPALIVE_S / 2:  # also between chunks, which a broker does not answer
                asked_at = now
                with self._lock:
                    self._append(packets.PING)
            if now - heard_at > 1.5 * KEEPALIVE_S:
                raise _Gone("the broker stopped answering")
            with self._lock:
                if self._is_idle():
                    self._up = False
            if not self._up:
                break
        opened.settimeout(0.5)
        opened.sendall(packets.DISCONNECT)

    def _write(self, opened: socket.socket) -> bool:
        """Write as much as the socket accepts; whether any byte was sent."""
        any_sent = False
        while self._out:
            pieces = list(itertools.islice(self._out, PIECES))
            try:
                sent = opened.send(pieces[0]) if isinstance(opened, ssl.SSLSocket) else opened.sendmsg(pieces)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            any_sent = True
            with self._lock:
                self._out_bytes -= sent
                while self._out and sent >= len(self._out[0]):
                    sent -= len(self._out.popleft())
                if sent:
                    self._out[0] = memoryview(self._out[0])[sent:]
        return any_sent

    def _on_packet(self, buffer: memoryview, packet: packets.Packet) -> None:
        if packet.kind == packets.PUBLISH:
            name, payload = packets.parse_publish(buffer, packet)
            self._received(len(payload))
            if known := self._by_name.get(name):
                _call_safely(known[1].heard, known[0], payload)
        elif packet.kind == packets.SUBACK:
            with self._lock:
                topic = self._asked.pop(packets.packet_id(buffer, packet), None)
                sink = self._sinks.get(topic) if topic is not None else None
            if topic is None or sink is None:
                return
            if buffer[packet.end - 1] == packets.FAILURE:
                raise _Gone(
                    f"the broker refused a subscription to {topic}"
                )  # some do while their cluster elects a leader
            _call_safely(sink.listening, topic)


class _Reader:
    """Splits the bytes of a socket into packets, in one buffer that never grows."""

    def __init__(self, opened: socket.socket, heard: Callable[[memoryview, packets.Packet], None]) -> None:
        self._opened = opened
        self._heard = heard
        self._buffer = memoryview(bytearray(packets.MAX_PACKET_BYTES + READ_BYTES))
        self._filled = 0

    def read(self) -> None:
        """Read available bytes, up to some reads. Raises _Gone at the end of the stream, BadPayload for no MQTT."""
        for _ in range(READS_IN_TURN):
            free = self._buffer[self._filled : self._filled + READ_BYTES]
            try:
                count = self._opened.recv_into(free)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not count:
                raise _Gone("connection lost")
            self._filled += count
            self._cut()

    def _cut(self) -> None:
        start = 0
        while packet := packets.read_packet(self._buffer, start, self._filled, packets.MAX_PACKET_BYTES):
            self._heard(self._buffer, packet)
            start = packet.end
        if start:
            left = self._filled - start
            self._buffer[:left] = self._buffer[start : self._filled]
            self._filled = left


def _call_safely(act: Callable[..., None], *arguments: object) -> None:
    """Call a handler; its error must not end the link."""
    try:
        act(*arguments)
    except Exception:
        log.exception("bulk message failed")
