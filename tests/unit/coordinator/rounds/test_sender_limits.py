"""Limits of what one device may send: honest ones never reach them, and a flood ends with the last strike."""

import pytest

from coordinator.rounds import sender_limits
from coordinator.rounds.sender_limits import LIMITS, STRIKES, SenderLimits
from fedvit.wire.messages import (
    BlobNack,
    CoordinatorState,
    Hello,
    Progress,
    encode,
)
from fedvit.wire.topics import Topics
from tests.support.corpus import PROFILE

TOPICS = Topics("home")
LARGE_HELLO = encode(Hello("i", "0.1", PROFILE, tuple("x" * 250 + str(number) for number in range(230)), 10, 5))
NACK = encode(BlobNack("blake3:" + "ab" * 32, ((0, 1),), 1))
PROGRESS = encode(Progress("run", 1, "train", 1, 2, 0.5))


@pytest.fixture
def limits() -> SenderLimits:
    return SenderLimits(TOPICS)


def admitted(limits: SenderLimits, device: str, payload: bytes, count: int) -> int:
    return sum(limits.admits(TOPICS.from_device(device), payload) for _ in range(count))


def test_bursts_of_honest_devices_are_admitted(limits: SenderLimits) -> None:
    """A whole fleet returns at once, then downloads a large blob on a fast link, and reports progress."""
    for number in range(50):
        device = f"pi-{number}"
        for payload, count in ((LARGE_HELLO, 5), (NACK, 500), (PROGRESS, 200)):
            assert admitted(limits, device, payload, count) == count
    assert limits.take_floods() == []


def test_each_kind_of_message_has_its_own_limit(limits: SenderLimits) -> None:
    assert admitted(limits, "mallory", LARGE_HELLO, 1000) < 2 * LIMITS["hello"].burst
    assert admitted(limits, "mallory", NACK, 10) == 10
    assert admitted(limits, "honest", LARGE_HELLO, 10) == 10, "others are not affected"


@pytest.mark.parametrize("payload", [bytes(60_000), b"\x01\xdd\0\0\0\1\xd9\5hello" + bytes(60_000), b"", b"\1"])
def test_messages_of_unknown_form_count_as_hellos(limits: SenderLimits, payload: bytes) -> None:
    assert admitted(limits, "mallory", payload, 1000) < 2 * LIMITS["hello"].burst


def test_a_flood_gets_strikes_and_the_last_one_shuts_out(limits: SenderLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_limits, "STRIKE_EVERY_S", 0.0)
    admitted(limits, "mallory", LARGE_HELLO, 3000)
    floods = limits.take_floods()[:STRIKES]
    assert [(flood.device, flood.is_last) for flood in floods] == [("mallory", False)] * (STRIKES - 1) + [
        ("mallory", True)
    ]
    limits.ban("mallory")
    assert admitted(limits, "mallory", NACK, 10) == 0
    assert admitted(limits, "honest", NACK, 10) == 10


def test_what_is_not_handled_grows_by_the_bursts_alone(limits: SenderLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is busy: limits are renewed when it has caught up."""
    monkeypatch.setattr(sender_limits, "WAITING_BYTES", len(PROGRESS))
    monkeypatch.setitem(LIMITS, "other", sender_limits.Limit(1e9, 10))
    assert admitted(limits, "pi", PROGRESS, 1) == 1
    assert admitted(limits, "pi", PROGRESS, 1000) == 9
    for _ in range(10):
        limits.note_handled(PROGRESS)
    assert admitted(limits, "pi", PROGRESS, 1) == 1


def test_invented_names_are_forgotten(limits: SenderLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_limits, "MAX_SENDERS", 10)
    monkeypatch.setitem(LIMITS, "other", sender_limits.Limit(1e9, 10))
    monkeypatch.setitem(LIMITS, "bytes", sender_limits.Limit(1e12, 1e6))
    for number in range(1000):
        admitted(limits, f"pi-{number}", PROGRESS, 1)
        admitted(limits, f"not a name {number}", PROGRESS, 1)
    assert len(limits._senders) < 30


def test_the_coordinators_own_state_has_no_limit(limits: SenderLimits) -> None:
    raw = encode(CoordinatorState(1, alive=True))
    assert all(limits.admits(TOPICS.coordinator_state, raw) for _ in range(5000))
