"""A plain MQTT client without fedvit's protocol."""

import socket
import ssl
from collections.abc import Sequence
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fedvit.transport.address import Address
from fedvit.transport.base import Will
from tests.support.waiting import wait_until

FOR_EVER = 2**32 - 1
"""Expiry interval of a session in MQTT 5 that never expires."""


class Client:
    """Connects at once; `outcome` has the results of connecting, `seen` the received messages.

    `persistent` requests a session that outlives the connection, `retain_will` a retained last will.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        filters: Sequence[str] = (),
        *,
        version: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311,
        persistent: bool = False,
        will: Will | None = None,
        retain_will: bool = False,
        qos: int = 1,
    ) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self.outcome: list[str] = []
        self.granted: list[str] = []
        self._subscribed = 0
        v5 = version == MQTTProtocolVersion.MQTTv5
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if v5 else not persistent,
            protocol=version,
            reconnect_on_failure=False,
        )
        self._client.on_connect = lambda *arguments: self.outcome.append(str(arguments[3]))
        self._client.on_disconnect = lambda *arguments: self.outcome.append(f"disconnected: {arguments[3]}")
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = lambda _client, _data, message: self.seen.append(
            (message.topic, bytes(message.payload))
        )
        if address.user is not None:
            self._client.username_pw_set(address.user, address.password)
        if address.tls:
            self._client.tls_set_context(make_context(address))
        if will is not None:
            self._client.will_set(will.topic, will.payload, 1, retain_will)
        options: dict[str, Any] = {}
        if v5:
            options = {"clean_start": not persistent, "properties": Properties(PacketTypes.CONNECT)}  # type: ignore[no-untyped-call]
            options["properties"].SessionExpiryInterval = FOR_EVER if persistent else 0
        try:
            self._client.connect(address.host, address.port, **options)
        except OSError as error:
            self.outcome.append(f"failed: {error}")
            return
        self._client.loop_start()
        wait_until(lambda: self.outcome, "an answer of the broker")
        if self.connected and filters:
            self.subscribe(filters, qos)

    def subscribe(self, filters: Sequence[str], qos: int = 1) -> None:
        """Return when the broker has answered, or ended the connection."""
        before = self._subscribed
        self._client.subscribe([(name, qos) for name in filters])
        wait_until(lambda: self._subscribed > before or not self.connected, "the subscriptions")

    def _on_subscribe(self, _client: Any, _data: Any, _id: int, reasons: list[Any], _more: Any) -> None:
        self.granted = [str(reason) for reason in reasons]
        self._subscribed += 1

    @property
    def payloads(self) -> set[bytes]:
        return {payload for _, payload in self.seen}

    @property
    def has_connected(self) -> bool:
        """Tell whether the broker ever let it in."""
        return "Success" in self.outcome

    @property
    def connected(self) -> bool:
        return self.outcome[-1:] == ["Success"]

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> bool:
        """Return True when the broker has acknowledged the message, False when it ended the connection."""
        sent = self._client.publish(topic, payload, qos, retain)
        if sent.rc != paho.MQTT_ERR_SUCCESS:
            return False
        wait_until(lambda: sent.is_published() or not self.connected, "an acknowledgement")
        return self.connected

    def vanish(self) -> None:
        """Drop the connection without DISCONNECT, so that the broker publishes the last will."""
        if isinstance(open_socket := self._client.socket(), socket.socket):
            open_socket.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_context(address: Address) -> ssl.SSLContext:
    """Make a TLS context as any client would configure it."""
    context = ssl.create_default_context(cafile=address.ca_file)
    if address.ca_file is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if address.cert_file is not None:
        context.load_cert_chain(address.cert_file, address.key_file)
    return context
