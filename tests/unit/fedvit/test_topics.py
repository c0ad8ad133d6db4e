import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from fedvit.errors import ConfigError
from fedvit.wire.topics import Topics, blob_level, check_name

DIGEST = "blake3:" + "0123456789abcdef" * 4
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", fullmatch=True)


def all_topics(topics: Topics, device: str) -> dict[str, str]:
    return {
        "coordinator_state": topics.coordinator_state,
        "broadcast": topics.broadcast(DIGEST),
        "to_device": topics.to_device(device),
        "from_device": topics.from_device(device),
        "upload": topics.upload(device, DIGEST),
        "device_state": topics.device_state(device),
    }


def test_the_tree() -> None:
    """As the module draws it; old devices and access lists of brokers rely on every level."""
    assert all_topics(Topics("home"), "pi-1") == {
        "coordinator_state": "fl1/home/srv/st",
        "broadcast": "fl1/home/all/b/0123456789abcdef",
        "to_device": "fl1/home/d/pi-1/dn/ctl",
        "from_device": "fl1/home/d/pi-1/up/ctl",
        "upload": "fl1/home/d/pi-1/up/b/0123456789abcdef",
        "device_state": "fl1/home/d/pi-1/st",
    }


@given(NAMES, NAMES)
def test_topics_fit_every_broker(federation: str, device: str) -> None:
    """AWS IoT allows 7 slashes and 256 bytes; the longest topic is fl1/F/d/D/up/b/B with 64 + 64 + 16 letters of
    names: 6 slashes, 157 bytes."""
    for topic in all_topics(Topics(federation), device).values():
        assert topic.count("/") <= 7
        assert len(topic.encode()) <= 256
        assert "+" not in topic
        assert "#" not in topic


@given(NAMES, NAMES, NAMES)
def test_topics_do_not_meet(federation: str, device: str, other: str) -> None:
    mine = all_topics(Topics(federation), device)
    assert len(set(mine.values())) == len(mine)
    if other != device:
        theirs = all_topics(Topics(federation), other)
        shared = {"coordinator_state", "broadcast"}
        assert {name for name in mine if mine[name] in theirs.values()} == shared
    if other != federation:
        assert not set(mine.values()) & set(all_topics(Topics(other), device).values())


@given(NAMES, NAMES)
def test_the_device_is_read_from_the_topic(federation: str, device: str) -> None:
    topics = Topics(federation)
    for topic in (topics.from_device(device), topics.device_state(device), topics.upload(device, DIGEST)):
        assert topics.device_of(topic) == device


@given(NAMES, NAMES, NAMES)
def test_what_the_coordinator_hears(federation: str, device: str, other: str) -> None:
    """Control and last wills of its own federation; no chunks, and not its own words."""
    topics = Topics(federation)

    def heard(topic: str) -> bool:
        return any(topic_matches_sub(wanted, topic) for wanted in topics.from_all_devices)

    assert {name for name, topic in all_topics(topics, device).items() if heard(topic)} == {
        "from_device",
        "device_state",
    }
    if other != federation:
        assert not any(heard(topic) for topic in all_topics(Topics(other), device).values())


def test_a_blob_is_known_by_16_digits_of_its_digest() -> None:
    assert blob_level(DIGEST) == "0123456789abcdef"


@pytest.mark.parametrize("name", ["a", "0", "pi-4", "Kitchen_2", "_", "a-", "x" * 64])
def test_good_names(name: str) -> None:
    assert check_name(name, "device id") == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "x" * 65, "x" * 100_000, "a/b", "+", "#", "a b", "a ", " a", "ä", "a.b", "$SYS", "１"),
        *("a\n", "\na", "a\r", "a\t", "\0", "a\0", "\x1b[2J", "a\x7f", "a\u200b", "a\u202e"),
        *("-", "--", "-rf", "--run", "-x", ".", "..", "../a"),
    ],
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_name(name, "device id")
    shown = name if len(name) < 100 else "x" * 80 + "..."
    assert (
        str(refused.value) == f"device id {shown!r} must be 1 to 64 letters, digits, '-' or '_', and not begin with '-'"
    )
