"""Limits of what one device may send to the coordinator, applied before a message is queued or decoded.

The sender's name is read from the topic, for which a deployment's broker vouches. The limits are several times what the
fastest honest device sends, so that its messages are never dropped. A device that exceeds them for some seconds floods
the coordinator: it gets strikes, and after the last one it is shut out.
"""

import threading
import time
from typing import NamedTuple

from fedvit.quantities import format_bytes
from fedvit.wire.messages import peek_tag
from fedvit.wire.topics import Topics, is_name


class Limit(NamedTuple):
    """A token bucket: `burst` at once, then `per_s` in each second."""

    per_s: float
    burst: float


LIMITS = {
    # one per connection or change of the images; retries are a second apart
    "hello": Limit(10, 60),
    # requests for chunks: one for 2 MB, so that these are 2 GB/s
    "transfer": Limit(1000, 4000),
    # results and progress: four for each round, so that these are 125 rounds a second
    "other": Limit(500, 2000),
    # 60 results a second with the largest upload inside the message
    "bytes": Limit(4 << 20, 8 << 20),
}
WAITING_BYTES = 64 << 20
"""While more waits in the queue, nobody's limits are renewed: the queue grows by the bursts at most."""
STRIKE_MESSAGES = 500
STRIKE_BYTES = 8 << 20
"""A device gets a strike when so much of it was dropped since its last one ..."""
STRIKE_EVERY_S = 1.0
"""... at most one in this time."""
STRIKES = 3
"""The last strike shuts a device out."""
MAX_SENDERS = 20_000
"""Without access rules anybody can invent names; senders with unused limits are forgotten above this number."""

_TRANSFER_TAGS = frozenset({b"want", b"put", b"done"})
_OTHER_TAGS = frozenset({b"progress", b"result", b"failed", b"declined", b"device", b"modelreport"})
_SUM_TAGS = frozenset({b"sumkeys", b"sumshares", b"summasked", b"sumreveal", b"sumrefused"})


class Flood(NamedTuple):
    """A strike of a device that sends more than its limits; `is_last`: it is to be shut out."""

    device: str
    reason: str
    is_last: bool


class _Sender:
    def __init__(self, now: float) -> None:
        self.tokens = {kind: limit.burst for kind, limit in LIMITS.items()}
        self.renewed_at = now
        self.struck_at = now - STRIKE_EVERY_S
        self.dropped = 0
        self.dropped_bytes = 0
        self.strikes = 0

    def renew(self, now: float) -> None:
        elapsed_s, self.renewed_at = now - self.renewed_at, now
        for kind, limit in LIMITS.items():
            self.tokens[kind] = min(limit.burst, self.tokens[kind] + elapsed_s * limit.per_s)

    def is_idle(self) -> bool:
        return not self.strikes and all(self.tokens[kind] == limit.burst for kind, limit in LIMITS.items())


class SenderLimits:
    """The limits of all devices of one link. `admits` is called in the network's thread, the rest in the program's."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._senders: dict[str, _Sender] = {}
        self._banned: set[str] = set()
        self._floods: list[Flood] = []
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    def admits(self, topic: str, payload: bytes) -> bool:
        """Count a message that arrived; False if it exceeds its sender's limits, and is to be dropped."""
        if topic == self._topics.coordinator_state:
            return self._admit(len(payload))
        device = self._topics.device_of(topic)
        if not is_name(device):
            device = ""  # together, as their names are chosen freely
        now, kind = time.monotonic(), _kind_of(payload)
        with self._lock:
            if device in self._banned:
                return False
            sender = self._senders.get(device) or self._add(device, now)
            if self._waiting_bytes < WAITING_BYTES:
                sender.renew(now)
            if sender.tokens[kind] < 1 or sender.tokens["bytes"] < len(payload):
                self._drop(device, sender, len(payload), now)
                return False
            sender.tokens[kind] -= 1
            sender.tokens["bytes"] -= len(payload)
        return self._admit(len(payload))

    def note_handled(self, payload: bytes) -> None:
        """An admitted message has left the queue."""
        with self._lock:
            self._waiting_bytes -= len(payload)

    def take_floods(self) -> list[Flood]:
        """Return the strikes since the last call."""
        with self._lock:
            floods, self._floods = self._floods, []
        return floods

    def ban(self, device: str) -> None:
        """Drop everything from a device from now on."""
        with self._lock:
            self._banned.add(device)
            self._senders.pop(device, None)

    def _admit(self, size_bytes: int) -> bool:
        with self._lock:
            self._waiting_bytes += size_bytes
        return True

    def _add(self, device: str, now: float) -> _Sender:
        if len(self._senders) >= MAX_SENDERS:
            for sender in self._senders.values():
                sender.renew(now)
            self._senders = {name: sender for name, sender in self._senders.items() if not sender.is_idle()}
        sender = self._senders[device] = _Sender(now)
        return sender

    def _drop(self, device: str, sender: _Sender, size_bytes: int, now: float) -> None:
        sender.dropped += 1
        sender.dropped_bytes += size_bytes
        is_much = sender.dropped >= STRIKE_MESSAGES or sender.dropped_bytes >= STRIKE_BYTES
        if not is_much or now - sender.struck_at < STRIKE_EVERY_S:
            return
        sender.strikes += 1
        reason = f"it floods the coordinator: {sender.dropped} messages of {format_bytes(sender.dropped_bytes)} dropped"
        self._floods.append(Flood(device, reason, is_last=sender.strikes >= STRIKES))
        sender.dropped = sender.dropped_bytes = 0
        sender.struck_at = now
        if sender.strikes >= STRIKES:
            sender.strikes = 0  # a device that joins again begins anew


def _kind_of(payload: bytes) -> str:
    tag = peek_tag(payload)
    return "transfer" if tag in _TRANSFER_TAGS else "other" if tag in _OTHER_TAGS or tag in _SUM_TAGS else "hello"
