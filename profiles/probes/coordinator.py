"""Checks whether a coordinator serves the federation, with the device's own connection settings."""

import secrets
import time
from queue import Empty, SimpleQueue

from fedvit.errors import BadPayload, LinkDown, PeerRefused
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import CoordinatorState, DeviceState, decode, encode
from fedvit.wire.topics import Topics

ANSWER_S = 5.0
ASK_EVERY_S = 1.0
CONNECT_S = 10.0


def find_coordinator(
    address: Address, topics: Topics, device: str, timeout_s: float = ANSWER_S
) -> CoordinatorState | None:
    """The state of the federation's coordinator, without joining; None without an answer in time.

    Raises LinkDown, with the reason, when the broker cannot be reached.
    """
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, address, f"{device}-{secrets.token_hex(4)}")
    transport.subscribe(topics.to_device(device), 1)
    transport.open()
    connected, until = False, time.monotonic() + CONNECT_S
    try:
        while (left_s := until - time.monotonic()) > 0:
            try:
                event = inbox.get(timeout=min(left_s, ASK_EVERY_S) if connected else left_s)
            except Empty:
                event = None
            match event:
                case Connected():
                    connected, until = True, time.monotonic() + timeout_s
                case Disconnected(reason=reason):
                    raise LinkDown("FV1209", reason)
                case Received(payload=payload) if (state := _state(payload)) is not None:
                    return state
            if connected:  # repeated, as its link to the broker may be interrupted
                question = DeviceState(secrets.token_hex(8), online=True)
                transport.publish(topics.device_state(device), encode(question), qos=1)
        return None
    finally:
        transport.close()


def _state(payload: bytes) -> CoordinatorState | None:
    try:
        message = decode(payload)
    except (BadPayload, PeerRefused):
        return None
    return message if isinstance(message, CoordinatorState) and message.alive else None
