"""The connections of a transport to an MQTT broker, one after the other, with paho.

Problems of paho that are solved here:

- A client that lost its link keeps QoS 1 messages and sends them after reconnecting, beyond any window.
  So each connection has a client of its own: messages from before a loss are dropped with it.
- An exception in a callback ends paho's thread while `is_connected()` stays true. The thread is ours (`mqtt_loop`),
  and callbacks only put events into the inbox.
- Reconnecting has no jitter, a failed attempt no reason. The first is in `backoff`, the second in `mqtt_loop`.
- TCP_NODELAY is never set; with the broker's delayed acknowledgement that costs 40 ms per message.

A renewed certificate may be one that the broker refuses, for example because the clock was wrong when it was issued. So
its predecessor is tried after it, until the broker has accepted it.
"""

import functools
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from fedvit.transport.address import Address, tls_context
from fedvit.transport.backoff import Backoff
from fedvit.transport.base import Acknowledged, Connected, Disconnected, Received, Transport, Will, WillMaker
from fedvit.transport.mqtt_link import MqttLink
from fedvit.transport.mqtt_loop import FAREWELL_S, LoopMember
from fedvit.transport.pace import Pace
from fedvit.transport.packets import MAX_PACKET_BYTES
from fedvit.wire.limits import BrokerLimits

log = logging.getLogger(__name__)

KEEPALIVE_S = 30
VERSION_S = 5.0
"""After this time without an answer to version 5, version 3.1.1 is tried."""


def _never_raises(callback: Callable[..., None]) -> Callable[..., None]:
    """Log an exception of a callback: paho's thread would die of it."""

    @functools.wraps(callback)
    def guard(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("MQTT callback failed", extra={"callback": callback.__name__})

    return guard


class MqttConnector(LoopMember):
    """Connects a transport to its broker, again after each loss, and puts what happens into the transport's inbox.

    Of `versions`, the one that the broker supports is kept. Raises ConfigError when the address names certificates that
    cannot be read.
    """

    def __init__(
        self, transport: Transport, address: Address, client_id: str, versions: Sequence[MQTTProtocolVersion],
        return_spread_s: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._transport = transport
        self.address = address
        self._client_id = client_id
        self._versions = deque(versions)  # the first is tried next
        self._certificate = address.cert_file  # of the current connection or attempt
        self._tries_next_certificate = True
        if address.tls:
            tls_context(address)  # says now what is wrong with its files
        self.will: Will | WillMaker | None = None
        self.backoff = Backoff(return_spread_s)
        self.pace = Pace()
        self.limits = BrokerLimits()
        self.max_packet_bytes = MAX_PACKET_BYTES  # or what the broker said, if that is less
        self.reports_acknowledged = False
        self._up_at: float | None = None
        self.lock = threading.Lock()
        self.filters: dict[str, int] = {}  # topic filter -> QoS
        self.link: MqttLink | None = None

    def begin(self) -> Client:
        version = self._versions[0]
        self._certificate = self.address.cert_file
        if self._tries_next_certificate and _is_file(self.address.next_cert_file):
            self._certificate = self.address.next_cert_file
        self.client = self._make_client(version)
        self.link = MqttLink(self.client, version, self.pace, self.limits.max_inflight)
        return self.client

    def is_over(self) -> bool:
        """Also when the last messages of a closed link are acknowledged, and when another version is tried."""
        link = self.link
        if link is None:
            return False
        now = time.monotonic()
        if self.closed_at is not None:
            waits = link.up and (link.waits or link.count_unacknowledged() or link.client.want_write())
            return not waits or now - self.closed_at > FAREWELL_S
        may_be_other = link.version == MQTTProtocolVersion.MQTTv5 and len(self._versions) > 1
        # some brokers of 3.1.1 wait for the rest of a CONNECT that they misread
        link.unknown_version |= may_be_other and not link.answered and now - link.began_at > VERSION_S
        return link.unknown_version or link.is_deaf or link.is_left

    def publish_due(self) -> float | None:
        link = self.link
        return link.publish_due() if link is not None and link.up else None

    def end(self, reason: str) -> float | None:
        link, self.link, self.client = self.link, None, None
        was_accepted = link is not None and link.answered
        if link is not None:
            if link.connected and not link.answered and not link.refused:
                self._versions.rotate()  # some brokers close without a word instead
            reason = link.ended or reason
            link.up = link.answered = False
        up_at, self._up_at = self._up_at, None
        if self.closed_at is not None:
            return None
        if link is not None and link.version == MQTTProtocolVersion.MQTTv5 and self._versions[0] != link.version:
            return 0.0  # try the older version at once
        is_next = self._certificate is not None and self._certificate == self.address.next_cert_file
        self._tries_next_certificate = was_accepted or not is_next
        if not self._tries_next_certificate:
            return 0.0  # try the former certificate at once
        self._transport.inbox.put(Disconnected(reason, refused=link is not None and link.refused))
        return self.backoff.wait_s(None if up_at is None else time.monotonic() - up_at)

    def _make_client(self, version: MQTTProtocolVersion) -> Client:
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
            client.tls_set_context(self.tls_context())
        if (will := self._transport.begin_connection(self.will)) is not None:
            client.will_set(will.topic, will.payload, 1)
        client.max_inflight_messages_set(self.limits.max_inflight)
        client.on_socket_open = _never_raises(self._on_socket_open)
        client.on_connect = _never_raises(self._on_connect)
        client.on_disconnect = _never_raises(self._on_disconnect)
        client.on_subscribe = _never_raises(self._on_subscribe)
        client.on_publish = _never_raises(self._on_publish)
        client.on_message = _never_raises(self._on_message)
        client.connect_async(self.address.host, self.address.port, KEEPALIVE_S)
        return client

    def leave(self, reason: str) -> bool:
        """End the connection in its thread, and connect again; False if there is none."""
        link = self.link
        if link is None or not link.up:
            return False
        link.is_left, link.ended = True, reason
        return True

    def tls_context(self) -> ssl.SSLContext:
        """Read the certificate anew for each connection, as it is renewed while programs run."""
        accepted = self._certificate if _is_file(self._certificate) else self.address.cert_file
        return tls_context(replace(self.address, cert_file=accepted))

    def _on_socket_open(self, client: Client, userdata: object, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (link := self.link) is not None:
            link.connected = True

    def _on_connect(
        self, client: Client, userdata: object, flags: object, reason: ReasonCode, properties: Properties | None
    ) -> None:
        link = self.link
        if link is None:
            return
        if reason.is_failure:
            link.unknown_version = reason.getName() == "Unsupported protocol version"
            link.refused = not link.unknown_version
            words = "not authorised" if reason.getName() == "Not authorized" else reason.getName().lower()
            link.ended = f"broker refused: {words}"
            return
        opened = client.socket()
        secured = opened if isinstance(opened, ssl.SSLSocket) else None
        self._transport.broker_certificate = secured.getpeercert(binary_form=True) if secured else None
        self._transport.announced_packet_bytes = getattr(properties, "MaximumPacketSize", None)
        self.max_packet_bytes = min(self._transport.announced_packet_bytes or MAX_PACKET_BYTES, MAX_PACKET_BYTES)
        with self.lock:
            link.answered = True
            filters = [(topic_filter, SubscribeOptions(qos)) for topic_filter, qos in self.filters.items()]
        at_once = self.limits.topics_per_subscribe
        for first in range(0, len(filters), at_once):
            some = filters[first : first + at_once]
            v5 = self._versions[0] == MQTTProtocolVersion.MQTTv5
            _, packet_id = client.subscribe(some if v5 else [(topic, options.QoS) for topic, options in some])
            if packet_id is not None:
                link.awaited.add(packet_id)
        self._up_if_subscribed(link)

    def _on_subscribe(
        self, client: Client, userdata: object, packet_id: int, reasons: list[ReasonCode], properties: object
    ) -> None:
        if (link := self.link) is not None:
            if any(reason.is_failure for reason in reasons):
                link.is_deaf, link.ended = True, f"{self.address}: the broker refused a subscription"
                return
            link.awaited.discard(packet_id)
            self._up_if_subscribed(link)

    def _on_publish(
        self, client: Client, userdata: object, packet_id: int, reason: ReasonCode, properties: object
    ) -> None:
        refusal = reason.getName().lower() if reason.is_failure else None
        if refusal:
            log.warning("the broker refused a message", extra={"reason": refusal})
        if self.reports_acknowledged:
            self._transport.inbox.put(Acknowledged(refusal))

    def _up_if_subscribed(self, link: MqttLink) -> None:
        if not link.up and not link.awaited and self.closed_at is None:
            link.up = True
            self._up_at = time.monotonic()
            self._transport.inbox.put(Connected(self._certificate))
            while link.early:
                self._transport.inbox.put(link.early.pop(0))

    def _on_disconnect(
        self, client: Client, userdata: object, flags: object, reason: ReasonCode, properties: object
    ) -> None:
        link = self.link
        if link is not None and link.ended is None:
            if reason.getName() == "Keep alive timeout":
                link.ended = f"{self.address}: the broker stopped answering"
            elif reason.is_failure and reason.getName() != "Unspecified error":
                link.ended = f"{self.address}: {reason.getName().lower()}"
            elif not link.answered:
                refused = "; is the certificate of this side revoked or expired?" if self.address.cert_file else ""
                link.ended = f"{self.address}: closed without an MQTT answer{refused}"

    def _on_message(self, client: Client, userdata: object, message: MQTTMessage) -> None:
        link = self.link
        if link is None or self.closed_at is not None:
            return
        received = Received(message.topic, bytes(message.payload))
        self._transport.count_received(len(received.payload))
        if not self._transport.admits(*received):
            return
        if link.up:
            self._transport.inbox.put(received)
        else:
            link.early.append(received)


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()
