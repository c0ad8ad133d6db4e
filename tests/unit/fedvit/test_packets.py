"""Reading MQTT for bulk: nothing that a broker sends does more harm than BadPayload."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvit.errors import BadPayload
from fedvit.transport import packets

LARGEST = 4096


def read(raw: bytes) -> packets.Packet | None:
    return packets.read_packet(memoryview(raw), 0, len(raw), LARGEST)


def test_packets_as_the_standard_writes_them() -> None:
    # connect as the standard writes it: MQTT 3.1.1, section 3.1: name, level 4, flags (clean session, user name,
    # password), keep alive, then texts
    assert packets.connect("c", 30, None, None) == b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x1e\x00\x01c"
    with_password = packets.connect("c", 30, "u", "pw")
    assert with_password == b"\x10\x14\x00\x04MQTT\x04\xc2\x00\x1e\x00\x01c\x00\x01u\x00\x02pw"
    assert packets.subscribe(258, "a/b") == b"\x82\x08\x01\x02\x00\x03a/b\x00"
    assert packets.unsubscribe(258, "a/b") == b"\xa2\x07\x01\x02\x00\x03a/b"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=50), st.binary(max_size=300))
def test_what_is_published_is_read_again(topic: str, payload: bytes) -> None:
    raw = packets.publish_head(topic, len(payload)) + payload
    packet = read(raw + b"next")
    assert packet is not None
    assert packet.end == len(raw)
    name, body = packets.parse_publish(memoryview(raw), packet)
    assert (name, bytes(body)) == (topic.encode(), payload)
    assert all(read(raw[:cut]) is None for cut in range(1, len(raw)))


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_any_bytes_are_packets_or_refused(raw: bytes) -> None:
    """Reading always comes to an end, within what came."""
    view, start = memoryview(raw), 0
    try:
        while packet := packets.read_packet(view, start, len(raw), LARGEST):
            assert start < packet.end <= len(raw)
            if packet.kind == packets.PUBLISH:
                packets.parse_publish(view, packet)
            elif packet.kind == packets.SUBACK:
                packets.packet_id(view, packet)
            start = packet.end
    except BadPayload:
        pass


@pytest.mark.parametrize("raw", [b"\x30\xff\xff\xff\xff\x01", b"\x30\x80\x20", b"\x30\xff\xff\xff\x7f"])
def test_a_packet_larger_than_agreed_is_refused_before_it_is_read(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        read(raw)
