"""The part of MQTT 3.1.1 that bulk needs, as bytes: QoS 0 alone. Pure: no socket, no clock.

For any input, reading raises only BadPayload, and needs no more memory than one packet of the agreed size.
"""

import struct
from typing import NamedTuple

from fedvit.errors import BadPayload

MAX_PACKET_BYTES = 1024 * 1024
CONNACK, PUBLISH, SUBACK = 0x20, 0x30, 0x90
PING = b"\xc0\x00"
DISCONNECT = b"\xe0\x00"
REFUSALS = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "server unavailable",
    4: "bad user name or password",
    5: "not authorised",
}
"""The broker's answers to CONNECT, in words (MQTT 3.1.1, table 3.1)."""
FAILURE = 0x80
"""A SUBACK's answer for a filter that was refused."""


class Packet(NamedTuple):
    """The position of a packet in the buffer."""

    kind: int  # the upper half of its first byte
    flags: int
    start: int  # of what follows the fixed header
    end: int


def connect(client_id: str, keepalive_s: int, user: str | None, password: str | None) -> bytes:
    """A clean session without a will."""
    flags = 0x02 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    body = _text("MQTT") + bytes([4, flags]) + struct.pack(">H", keepalive_s) + _text(client_id)
    return _packet(0x10, body + b"".join(_text(part) for part in (user, password) if part is not None))


def subscribe(packet_id: int, topic: str) -> bytes:
    return _packet(0x82, struct.pack(">H", packet_id) + _text(topic) + b"\0")


def unsubscribe(packet_id: int, topic: str) -> bytes:
    return _packet(0xA2, struct.pack(">H", packet_id) + _text(topic))


def publish_head(topic: str, payload_bytes: int) -> bytes:
    """All of a PUBLISH at QoS 0 but its payload."""
    name = topic.encode()
    return b"\x30" + length(2 + len(name) + payload_bytes) + struct.pack(">H", len(name)) + name


def length(size: int) -> bytes:
    """A packet's remaining length: seven bits a byte.

    >>> length(127).hex(), length(128).hex(), length(268_435_455).hex()
    ('7f', '8001', 'ffffff7f')
    """
    coded = bytearray()
    while True:
        size, low = divmod(size, 128)
        coded.append(low | (0x80 if size else 0))
        if not size:
            return bytes(coded)


def read_packet(buffer: memoryview, start: int, end: int, largest: int) -> Packet | None:
    """The packet that begins at `start`, None while it is not whole.

    Raises BadPayload for one of more than `largest` bytes, and for a length that is none.
    """
    size, position = 0, start + 1
    for shift in (0, 7, 14, 21):
        if position >= end:
            return None
        size |= (buffer[position] & 0x7F) << shift
        position += 1
        if buffer[position - 1] < 0x80:
            break
    else:
        raise BadPayload("FV2301", "the broker sent a packet whose length cannot be read")
    if position - start + size > largest:
        raise BadPayload("FV2301", f"the broker sent a packet of {size} bytes, at most {largest} were expected")
    if position + size > end:
        return None
    return Packet(buffer[start] & 0xF0, buffer[start] & 0x0F, position, position + size)


def parse_publish(buffer: memoryview, packet: Packet) -> tuple[bytes, memoryview]:
    """Topic and payload of a PUBLISH at any QoS. Raises BadPayload when it is cut."""
    view = buffer[packet.start : packet.end]
    if len(view) >= 2:
        payload = 2 + (view[0] << 8 | view[1])
        topic = bytes(view[2:payload])
        payload += 2 if packet.flags & 0x06 else 0
        if payload <= len(view):
            return topic, view[payload:]
    raise BadPayload("FV2301", f"the broker sent a message of {len(view)} bytes that is cut")


def packet_id(buffer: memoryview, packet: Packet) -> int:
    """Return the request that a SUBACK or UNSUBACK answers. Raises BadPayload if it is cut."""
    if packet.end - packet.start < 2:
        raise BadPayload("FV2301", "the broker sent an answer that is cut")
    return buffer[packet.start] << 8 | buffer[packet.start + 1]


def _packet(first: int, body: bytes) -> bytes:
    return bytes([first]) + length(len(body)) + body


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">H", len(raw)) + raw
