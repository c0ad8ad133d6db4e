"""MQTT with paho, for any broker: version 5, or 3.1.1 if the broker does not support it.

Nothing depends on version 5, which reports limits in advance and reasons of refusals; ids, deadlines and
acknowledgements are in fedvit's own messages. Chunks go through `bulk`.

Problems of paho that are solved here:

- A client that lost its link keeps QoS 1 messages and sends them after reconnecting, beyond any window.
  So each connection has a client of its own: messages from before a loss are dropped with it.
- An exception in a callback ends paho's thread while `is_connected()` stays true. The thread is ours, and
  callbacks only put events into the inbox.
- Reconnecting has no jitter, a failed attempt no reason. The first is in `backoff`, the second in `_connection`.
- A message over the broker's limit is sent again for ever. The size is checked before publishing.
- TCP_NODELAY is never set; with the broker's delayed acknowledgement that costs 40 ms per message.
"""

import contextlib
import functools
import logging
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from paho.mqtt.client import (
    MQTT_ERR_SUCCESS,
    Client,
    MQTTMessage,
    MQTTMessageInfo,
)
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from fedvit.errors import BadPayload, ConfigError
from fedvit.transport.backoff import Backoff
from fedvit.transport.base import (
    Acknowledged,
    BulkSink,
    Connected,
    Disconnected,
    Received,
    Transport,
    Wake,
    Will,
    WillMaker,
)
from fedvit.transport.bulk import BulkLink

log = logging.getLogger(__name__)

KEEPALIVE_S = 30
MAX_PACKET_BYTES = 1024 * 1024
INFLIGHT_MESSAGES = 32
FILTERS_PER_SUBSCRIBE = 8
"""The limit of AWS IoT for one packet."""
BOTH_VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
VERSION_S = 5.0
"""After this time without an answer to version 5, version 3.1.1 is tried."""
FAREWELL_S = 2.0
_HEADER_BYTES = 9  # at most: fixed header 5, length of the topic 2, packet id 2


@dataclass(frozen=True)
class Address:
    """The address of a broker, with credentials. `ca_file` replaces the system's certificates.

    `cert_file` and `key_file` are this side's own certificate, for a broker that requires one.
    """

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def parse(cls, text: str, ca_file: Path | None = None) -> "Address":
        """Read HOST, HOST:PORT, mqtt://USER:PASSWORD@HOST:PORT or mqtts://... Raises ConfigError.

        >>> str(Address.parse("pi.local")), str(Address.parse("mqtts://fleet:secret@example.org"))
        ('pi.local:1883', 'example.org:8883')
        """
        try:
            parts = urlsplit(text if "://" in text else f"mqtt://{text}")
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError as error:  # also the UnicodeError of a name with an empty or overlong label
            raise _unusable(text, str(error)) from error
        if parts.scheme not in ("mqtt", "mqtts"):
            raise _unusable(text, f"{parts.scheme}:// is not supported, only mqtt:// and mqtts://")
        if not host or re.search(r"\s", host) or port == 0:
            raise _unusable(text, "no host" if not host else "host or port is not valid")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise _unusable(text, "nothing may follow the port")
        if parts.password and not parts.username:
            raise _unusable(text, "a password needs a user name")
        tls = parts.scheme == "mqtts"
        user, password = (unquote(part) if part else None for part in (parts.username, parts.password))
        return cls(host, port or (8883 if tls else 1883), user, password, tls, ca_file)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _unusable(text: str, why: str) -> ConfigError:
    shown = re.sub(r":[^:@/]*@", ":***@", text)
    return ConfigError(
        f"broker address {shown!r} cannot be used: {why}; "
        "expected HOST, HOST:PORT, mqtt://USER:PASSWORD@HOST:PORT or mqtts://..."
    )


NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def tls_context(address: Address) -> ssl.SSLContext:
    """The TLS settings of an mqtts:// connection. Raises ConfigError when a file of `address` cannot be read.

    A clock before the start of the authority in `ca_file` is wrong, as on every board without a battery until it has
    reached a time server. The validity times of certificates are not checked then; the chain to the authority and the
    broker's name always are.
    """
    ca_file, cert_file = address.ca_file, address.cert_file
    try:
        context = ssl.create_default_context(cafile=ca_file)
        named = context.get_ca_certs() if ca_file is not None else []
        known = [ssl.cert_time_to_seconds(str(authority["notBefore"])) for authority in named]
    except (OSError, ValueError) as error:  # the latter for a date that is none
        raise ConfigError(f"the certificates in {ca_file} cannot be used: {describe_error(error)}") from error
    if time.time() < max(known, default=0.0):
        context.verify_flags |= NO_CHECK_TIME
    if cert_file is not None:
        try:
            context.load_cert_chain(cert_file, address.key_file)
        except OSError as error:
            raise ConfigError(
                f"the certificate {cert_file} or its key cannot be used: {describe_error(error)}"
            ) from error
    return context


def describe_error(error: Exception) -> str:
    """The message of an error of sockets or TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    words = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return words[:1].lower() + words[1:]


def _never_raises(callback: Callable[..., None]) -> Callable[..., None]:
    """paho's thread dies of an exception in a callback."""

    @functools.wraps(callback)
    def guarded(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("MQTT callback failed", extra={"callback": callback.__name__})

    return guarded


class _Link:
    """One connection: a client of paho, and its messages."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.unknown_version = False  # the broker does not support the tried version
        self.refused = False  # for another reason
        self.answered = False  # the broker accepted the connection: subscriptions may be sent
        self.up = False  # and they are in place: messages may be sent
        self.awaited: set[int] = set()  # subscriptions that the broker has not confirmed
        self.early: list[Received] = []  # brokers send retained messages before they confirm
        self.ended: str | None = None
        self._lock = threading.Lock()
        # by QoS, as the broker acknowledges QoS 1 later than QoS 0 leaves this process
        self._handed_over: tuple[deque[tuple[MQTTMessageInfo, int]], ...] = (deque(), deque())
        self._pending_bytes = 0

    def publish(self, topic: str, payload: bytes, qos: int) -> bool:
        info = self.client.publish(topic, payload, qos)
        if info.rc != MQTT_ERR_SUCCESS:
            return False
        with self._lock:
            self._handed_over[qos].append((info, len(payload)))
            self._pending_bytes += len(payload)
            self._settle()
        return True

    def pending_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._pending_bytes

    def unacknowledged(self) -> int:
        with self._lock:
            self._settle()
            return len(self._handed_over[1])

    def _settle(self) -> None:
        for waiting in self._handed_over:
            while waiting and waiting[0][0].is_published():
                self._pending_bytes -= waiting.popleft()[1]


class MqttTransport(Transport):
    """A link to an MQTT broker that reconnects by itself, for ever.

    With `report_acknowledged` each acknowledgement of the broker arrives in the inbox, as Acknowledged. After the loss
    of a link the first attempt is made within about `return_spread_s` seconds, which spreads the load of a large fleet.

    Raises ConfigError when the address names certificates that cannot be read.
    """

    def __init__(
        self,
        inbox: SimpleQueue[object],
        address: Address,
        client_id: str,
        *,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        versions: Sequence[MQTTProtocolVersion] = BOTH_VERSIONS,
        report_acknowledged: bool = False,
        return_spread_s: float = 0.0,
    ) -> None:
        super().__init__(inbox)
        self._report_acknowledged = report_acknowledged
        self.address = address
        self._client_id = client_id
        self._most_packet_bytes = max_packet_bytes
        self._max_packet_bytes = max_packet_bytes  # or what the broker said, if that is less
        self._versions = deque(versions)  # the first is tried next
        if address.tls:
            tls_context(address)  # says now what is wrong with its files
        self._will: Will | WillMaker | None = None
        self._bulk = BulkLink(
            address,
            f"{client_id}.b",
            lambda: tls_context(address) if address.tls else None,
            largest_packet=max_packet_bytes,
            woken=lambda: inbox.put(Wake()),
            received=self._count_received,
            backoff=Backoff(return_spread_s),
        )
        self._backoff = Backoff(return_spread_s)
        self._up_at: float | None = None
        self._lock = threading.Lock()
        self._filters: dict[str, int] = {}
        self._link: _Link | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._will = will
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{self._client_id}", daemon=True)
        self._thread.start()

    def spread_return(self, seconds: float) -> None:
        self._backoff.spread_s = seconds

    def subscribe(self, topic_filter: str, qos: int) -> None:
        with self._lock:
            self._filters[topic_filter] = qos
            link = self._link
            if link is None or not link.answered:
                return  # goes out with the others when the broker has answered
        link.client.subscribe(topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        with self._lock:
            self._filters.pop(topic_filter, None)
            link = self._link
        if link is not None and link.answered:
            link.client.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        self._check_size(topic, len(payload))
        link = self._link
        if link is None or not link.up or self._closing.is_set() or not link.publish(topic, payload, qos):
            return False
        with self._lock:
            self.sent_bytes += len(payload)
        return True

    def listen(self, topic: str, sink: BulkSink) -> None:
        self._bulk.listen(topic, sink)

    def stop_listening(self, topic: str) -> None:
        self._bulk.stop_listening(topic)

    def bulk_up(self) -> bool:
        return self._bulk.up()

    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        sizes = [len(head) + len(body) for head, body in messages]
        self._check_size(topic, max(sizes, default=0))
        if not self._bulk.send(topic, messages):
            return False
        with self._lock:
            self.sent_bytes += sum(sizes)
        return True

    def pending_bytes(self) -> int:
        link = self._link
        return self._bulk.pending_bytes() + (0 if link is None else link.pending_bytes())

    def _check_size(self, topic: str, size: int) -> None:
        if size + len(topic.encode()) + _HEADER_BYTES > self._max_packet_bytes:
            raise BadPayload(
                f"a message of {size} bytes on {topic} exceeds the limit of {self._max_packet_bytes} bytes per packet"
            )

    def _count_received(self, size: int) -> None:
        with self._lock:
            self.received_bytes += size

    def close(self) -> None:
        self._closing.set()
        self._bulk.close()
        if self._thread is None:
            return
        deadline = time.monotonic() + FAREWELL_S
        link = self._link
        if link is not None:
            while link.up and link.unacknowledged() and time.monotonic() < deadline:
                time.sleep(0.005)
            link.client.disconnect()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.5)
        if self._thread.is_alive() and link is not None and isinstance(stuck := link.client.socket(), socket.socket):
            with contextlib.suppress(OSError):
                stuck.shutdown(socket.SHUT_RDWR)
            self._thread.join(0.5)

    # --- the network thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            reason = self._connection()
            if reason is None:
                continue
            if self._closing.is_set():
                return
            self.inbox.put(Disconnected(reason))
            self._closing.wait(self._retry_s())

    def _retry_s(self) -> float:
        """Seconds until the next attempt, now that a link or an attempt has ended."""
        up_at, self._up_at = self._up_at, None
        return self._backoff.wait_s(None if up_at is None else time.monotonic() - up_at)

    def _connection(self) -> str | None:
        """Connect and serve the link until it ends; returns the reason, None to try another version at once."""
        version = self._versions[0]
        v5 = version == MQTTProtocolVersion.MQTTv5 and len(self._versions) > 1
        try:
            link = _Link(self._new_client(version))
        except ConfigError as error:
            return str(error)
        except OSError as error:  # paho opens a pair of sockets of its own
            return f"{self.address}: {describe_error(error)}"
        self._link = link
        connected = False
        try:
            link.client.reconnect()
            connected = True
            ended = MQTT_ERR_SUCCESS
            if not self._closing.is_set():
                patience = time.monotonic() + VERSION_S
                while ended == MQTT_ERR_SUCCESS and not link.unknown_version:
                    ended = link.client.loop(1.0)
                    # some brokers of 3.1.1 wait for the rest of a CONNECT that they misread
                    link.unknown_version |= v5 and not link.answered and time.monotonic() > patience
        except (OSError, ValueError) as error:
            return f"{self.address}: {describe_error(error)}"
        except Exception as error:
            log.exception("MQTT link failed", extra={"broker": str(self.address)})
            return f"{self.address}: {describe_error(error)}"
        finally:
            if connected and not link.answered and not link.refused:
                self._versions.rotate()  # some brokers close without a word instead
            link.up = link.answered = False
            self._link = None
        if link.unknown_version and self._versions[0] != version:
            return None
        return link.ended or f"{self.address}: connection lost"

    def _new_client(self, version: MQTTProtocolVersion) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2,
            self._client_id,
            # version 5 begins without a session of itself, as each client here connects once
            clean_session=None if version == MQTTProtocolVersion.MQTTv5 else True,
            protocol=version,
            reconnect_on_failure=False,
        )
        if self.address.user is not None:
            client.username_pw_set(self.address.user, self.address.password)
        if self.address.tls:
            client.tls_set_context(tls_context(self.address))  # certificates are renewed while programs run
        if (will := self._begin_connection(self._will)) is not None:
            client.will_set(will.topic, will.payload, 1)
        client.max_inflight_messages_set(INFLIGHT_MESSAGES)
        client.on_socket_open = _never_raises(self._on_socket_open)
        client.on_connect = _never_raises(self._on_connect)
        client.on_disconnect = _never_raises(self._on_disconnect)
        client.on_subscribe = _never_raises(self._on_subscribe)
        client.on_publish = _never_raises(self._on_publish)
        client.on_message = _never_raises(self._on_message)
        # without it publish() writes to the socket from the caller's thread, into this thread's half-sent packet
        client.on_socket_register_write = lambda *_: None
        client.connect_async(self.address.host, self.address.port, KEEPALIVE_S)
        return client

    def _on_socket_open(self, client: Client, userdata: object, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _on_connect(
        self, client: Client, userdata: object, flags: object, reason: ReasonCode, properties: Properties | None
    ) -> None:
        link = self._link
        if link is None:
            return
        if reason.is_failure:
            link.unknown_version = reason.getName() == "Unsupported protocol version"
            link.refused = not link.unknown_version
            words = "not authorised" if reason.getName() == "Not authorized" else reason.getName().lower()
            link.ended = f"broker refused: {words}"
            return
        limit = getattr(properties, "MaximumPacketSize", self._most_packet_bytes)
        self._max_packet_bytes = min(limit, self._most_packet_bytes)
        with self._lock:
            link.answered = True
            filters = [(topic_filter, SubscribeOptions(qos)) for topic_filter, qos in self._filters.items()]
        for first in range(0, len(filters), FILTERS_PER_SUBSCRIBE):
            some = filters[first : first + FILTERS_PER_SUBSCRIBE]
            v5 = self._versions[0] == MQTTProtocolVersion.MQTTv5
            _, packet_id = client.subscribe(some if v5 else [(topic, options.QoS) for topic, options in some])
            if packet_id is not None:
                link.awaited.add(packet_id)
        self._up_if_subscribed(link)

    def _on_subscribe(
        self, client: Client, userdata: object, packet_id: int, reasons: list[ReasonCode], properties: object
    ) -> None:
        if any(reason.is_failure for reason in reasons):
            log.warning("the broker refused a subscription", extra={"broker": str(self.address)})
        if (link := self._link) is not None:
            link.awaited.discard(packet_id)
            self._up_if_subscribed(link)

    def _on_publish(
        self, client: Client, userdata: object, packet_id: int, reason: ReasonCode, properties: object
    ) -> None:
        refusal = reason.getName().lower() if reason.is_failure else None
        if refusal:
            log.warning("the broker refused a message", extra={"reason": refusal})
        if self._report_acknowledged:
            self.inbox.put(Acknowledged(refusal))

    def _up_if_subscribed(self, link: _Link) -> None:
        if not link.up and not link.awaited and not self._closing.is_set():
            link.up = True
            self._up_at = time.monotonic()
            self.inbox.put(Connected())
            while link.early:
                self.inbox.put(link.early.pop(0))

    def _on_disconnect(
        self, client: Client, userdata: object, flags: object, reason: ReasonCode, properties: object
    ) -> None:
        link = self._link
        if link is not None and link.ended is None:
            if reason.getName() == "Keep alive timeout":
                link.ended = f"{self.address}: the broker stopped answering"
            elif reason.is_failure and reason.getName() != "Unspecified error":
                link.ended = f"{self.address}: {reason.getName().lower()}"
            elif not link.answered:
                refused = "; is the certificate of this side revoked or expired?" if self.address.cert_file else ""
                link.ended = f"{self.address}: closed without an MQTT answer{refused}"

    def _on_message(self, client: Client, userdata: object, message: MQTTMessage) -> None:
        link = self._link
        if link is None or self._closing.is_set():
            return
        self._count_received(len(message.payload))
        received = Received(message.topic, bytes(message.payload))
        if link.up:
            self.inbox.put(received)
        else:
            link.early.append(received)
