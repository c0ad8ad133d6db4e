"""Bookkeeping of one blob on its way: which chunks go next, which are missing. Pure: no clock, no socket.

The receiver rules. Its `Want` is the full picture: what is missing, and the highest send number it has
seen. Within one connection a broker delivers in order, so a missing chunk that was sent before a chunk
that arrived is lost and sent again; one that was sent after it is still under way and counts against the
window. So nothing is sent twice by a clock, and no broker ever holds more than the window.
"""

import struct
from collections import deque
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from fedvit.errors import BadPayload
from fedvit.wire.messages import Manifest, Want

CHUNK_BYTES = 126_976
"""Payload of a chunk on every broker: one size fits AWS IoT's 128 kB with 4 kB spare."""
WINDOW_CHUNKS = 64
"""At most this many chunks ahead of the slowest receiver: 8 MiB, far below any broker's queue limit."""
LANE_CHUNKS = 16
"""The same for a receiver that is served apart from the others: 2 MiB, as there may be many of them."""
ACK_EVERY_CHUNKS = 16
MAX_RANGES = 128
"""Ranges that one Want carries; what is missing beyond them is asked for in a later one."""

_HEADER = struct.Struct(">4sBBHIIQ32sII")
CHUNK_MESSAGE_BYTES = _HEADER.size + CHUNK_BYTES
"""Payload of the largest message that is ever sent."""
_MAGIC = b"fvbc"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a blob as it travels: 64 bytes of header, then the bytes."""

    digest: str
    index: int
    count: int
    size: int  # of the whole blob
    seq: int  # counts the sender's chunks of this transfer from 1, repairs included
    payload: bytes | memoryview

    def head(self) -> bytes:
        """The header alone, for whoever sends the bytes from where they lie."""
        return _HEADER.pack(
            _MAGIC, _VERSION, 0, 0, self.index, self.count, self.size,
            bytes.fromhex(self.digest.partition(":")[2]), len(self.payload), self.seq,
        )  # fmt: skip

    def encode(self) -> bytes:
        return self.head() + self.payload


def decode_chunk(raw: bytes | memoryview, digest_name: str = "blake3") -> Chunk:
    """The chunk in `raw`; its payload shares the memory of a memoryview.

    Raises BadPayload when `raw` is no chunk of a version that is known, or was cut.
    """
    if len(raw) < _HEADER.size or raw[:4] != _MAGIC or raw[4] != _VERSION:
        raise BadPayload(f"{len(raw)} bytes on a chunk topic are no chunk of version {_VERSION}")
    _, _, _, _, index, count, size, digest, length, seq = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size :]
    if len(payload) != length:
        raise BadPayload(f"chunk {index} says {length} bytes, {len(payload)} came")
    return Chunk(f"{digest_name}:{digest.hex()}", index, count, size, seq, payload)


def missing_ranges(have: bytes | bytearray, limit: int = MAX_RANGES) -> tuple[tuple[int, int], ...]:
    """The holes, zeros among one byte a chunk, as (first, count); the first `limit` of them.

    >>> missing_ranges(bytes([0, 0, 1, 0, 1]))
    ((0, 2), (3, 1))
    """
    ranges: list[tuple[int, int]] = []
    end = 0
    while len(ranges) < limit and (first := have.find(0, end)) >= 0:
        end = have.find(1, first)
        if end < 0:
            end = len(have)
        ranges.append((first, end - first))
    return tuple(ranges)


class Incoming:
    """A receiver's half: which chunks are here. `have`, one byte a chunk, is what an earlier attempt left."""

    def __init__(self, manifest: Manifest, have: bytes = b"") -> None:
        self.manifest = manifest
        self.last_seq = 0  # of the chunk that came last
        self._have = bytearray(have or manifest.chunks)
        self._left = self._have.count(0)
        self._since_want = 0

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def received_chunks(self) -> int:
        return self.manifest.chunks - self._left

    def accept(self, chunk: Chunk) -> bool:
        """Note an arrived chunk; False when its bytes are already here. Raises BadPayload if it does not fit."""
        manifest = self.manifest
        if (chunk.count, chunk.size) != (manifest.chunks, manifest.size):
            raise BadPayload(
                f"a chunk of a blob of {chunk.size} bytes in {chunk.count} chunks, "
                f"expected {manifest.size} in {manifest.chunks}"
            )
        start = chunk.index * manifest.chunk
        if chunk.index >= manifest.chunks or len(chunk.payload) != min(manifest.chunk, manifest.size - start):
            raise BadPayload(f"chunk {chunk.index} of {manifest.chunks} has {len(chunk.payload)} bytes")
        # not the highest ever: a sender that was started again counts from 1, and what it sent is under way
        self.last_seq = chunk.seq
        self._since_want += 1
        if self._have[chunk.index]:
            return False
        self._have[chunk.index] = 1
        self._left -= 1
        return True

    def want_is_due(self, *, idle: bool = False) -> bool:
        """Whether enough came since the last Want to tell the sender; anything at all, when no more comes."""
        return self._since_want >= (1 if idle else ACK_EVERY_CHUNKS)

    def want(self, *, stalled: bool = False, apart: bool = False) -> Want:
        self._since_want = 0
        return Want(self.manifest.digest, missing_ranges(self._have), self.last_seq, stalled, apart)

    def restart(self) -> None:
        """Forget everything: the whole did not have its digest."""
        self._have = bytearray(self.manifest.chunks)
        self._left = self.manifest.chunks

    def moved(self) -> None:
        """The rest comes from another count of the sender's."""
        self.last_seq = 0


class _Taker:
    """What the sender knows of one receiver."""

    def __init__(self, joined_seq: int) -> None:
        self.floor_seq = joined_seq  # chunks sent up to here either arrived or are lost
        self.to_send: deque[int] = deque()  # missing and not under way, ascending
        self.under_way = 0


class Outgoing:
    """A sender's half: one blob, any number of receivers on one topic."""

    def __init__(self, manifest: Manifest, window: int = WINDOW_CHUNKS) -> None:
        self.manifest = manifest
        self.sent_chunks = 0  # repairs included
        self._window = window
        self._takers: dict[str, _Taker] = {}
        self._sent_seq = np.zeros(manifest.chunks, np.int64)
        self._seq = 0

    @property
    def takers(self) -> tuple[str, ...]:
        return tuple(self._takers)

    @property
    def has_work(self) -> bool:
        return any(taker.to_send for taker in self._takers.values())

    @property
    def under_way(self) -> int:
        """Chunks ahead of the slowest receiver."""
        return max((taker.under_way for taker in self._takers.values()), default=0)

    def update(self, taker: str, want: Want) -> None:
        """A receiver's Want arrived. Raises BadPayload when it asks for chunks that do not exist."""
        missing, end = np.zeros(self.manifest.chunks, np.bool_), 0
        for first, count in want.missing:
            if first < end or count < 1 or first + count > self.manifest.chunks:  # ascending: none is counted twice
                raise BadPayload(
                    f"{taker} wants chunks {first} to {first + count - 1} of a blob of {self.manifest.chunks} chunks"
                    + (f", after those up to {end - 1}" if end else "")
                )
            missing[first : first + count] = True
            end = first + count
        known = self._takers.setdefault(taker, _Taker(self._seq))
        known.floor_seq = self._seq if want.stalled else max(known.floor_seq, min(want.last_seq, self._seq))
        to_send = np.flatnonzero(missing & (self._sent_seq <= known.floor_seq))
        known.to_send = deque(to_send.tolist())
        known.under_way = int(missing.sum()) - len(to_send)

    def drop(self, taker: str) -> None:
        """The receiver has everything, or is gone."""
        self._takers.pop(taker, None)

    def held_up_by(self) -> list[str]:
        """Receivers that alone keep the window full.

        All share one pace, so a slow one does not show by its rate but by its backlog: the time that a chunk
        needs to be heard of. Four times that of the median is a quarter of its speed. What a receiver has and
        did not acknowledge yet says nothing.
        """
        if len(self._takers) < 2:
            return []
        backlog = {name: max(0, taker.under_way - ACK_EVERY_CHUNKS) for name, taker in self._takers.items()}
        limit = max(4 * median_low(backlog.values()), self._window // 2)
        return [name for name, chunks in backlog.items() if chunks > limit]

    def next_chunk(self) -> tuple[int, int] | None:
        """(index, send number) of the chunk to send now; None when the window is full or nobody misses one."""
        waiting = [taker for taker in self._takers.values() if taker.to_send]
        if not waiting or self.under_way >= self._window:
            return None
        index = min(taker.to_send[0] for taker in waiting)
        self._seq += 1
        self._sent_seq[index] = self._seq
        self.sent_chunks += 1
        for taker in waiting:
            if taker.to_send[0] == index:
                taker.to_send.popleft()
                taker.under_way += 1
        return index, self._seq
