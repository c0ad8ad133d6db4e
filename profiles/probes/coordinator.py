"""Whether a coordinator serves the federation, asked over the connection settings that a device has anyway."""

import secrets
import time
from queue import Empty, SimpleQueue

from fedvit.errors import BadPayload, LinkDown, PeerRefused
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.transport.mqtt import Address, MqttTransport
from fedvit.wire.messages import CoordinatorState, DeviceState, decode, encode
from fedvit.wire.topics import Topics

ANSWER_S = 5.0
CONNECT_S = 10.0


def find_coordinator(
    address: Address, topics: Topics, device: str, timeout_s: float = ANSWER_S
) -> CoordinatorState | None:
    """What the federation's coordinator says of itself to a device that does not join; None: nobody answers in time.

    Raises LinkDown, with the reason, when the broker cannot be reached.
    """
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, address, f"{device}-{secrets.token_hex(4)}")
    transport.subscribe(topics.to_device(device), 1)
    transport.open()
    until = time.monotonic() + CONNECT_S
    try:
        while True:
            try:
                event = inbox.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return None
            match event:
                case Connected():
                    question = DeviceState(secrets.token_hex(8), online=True)
                    transport.publish(topics.device_state(device), encode(question), qos=1)
                    until = time.monotonic() + timeout_s
                case Disconnected(reason=reason):
                    raise LinkDown(reason)
                case Received(payload=payload):
                    if (state := _state(payload)) is not None:
                        return state
    finally:
        transport.close()


def _state(payload: bytes) -> CoordinatorState | None:
    try:
        message = decode(payload)
    except (BadPayload, PeerRefused):
        return None
    return message if isinstance(message, CoordinatorState) and message.alive else None
