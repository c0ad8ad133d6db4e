"""Bookkeeping of one blob on its way: which chunks go next, which are missing. Pure: no clock, no socket.

The receiver controls the transfer. Its `BlobNack` is complete: what is missing, and the highest send number it has
seen. Within one connection a broker delivers in order, so a missing chunk that was sent before a chunk
that arrived is lost and sent again; one that was sent after it is still under way and counts against the
window. So nothing is sent twice by a clock, and no broker ever holds more than the window.
"""

import struct
from dataclasses import dataclass

from fedvit.errors import BadPayload
from fedvit.wire.messages import BlobNack, Manifest

CHUNK_BYTES = 126_976
"""Payload of a chunk: one size fits nearly all brokers, AWS IoT's 128 kB with 4 kB spare; less where the broker takes
less."""
WINDOW_CHUNKS = 64
"""At most this many chunks ahead of the slowest receiver: 8 MiB, far below any broker's queue limit."""
DEDICATED_WINDOW_CHUNKS = 16
"""The same on a dedicated topic: 2 MiB, as there may be many of them."""
ACK_EVERY_CHUNKS = 16
MAX_RANGES = 128
"""Ranges that one BlobNack carries; what is missing beyond them is asked for in a later one."""

_HEADER = struct.Struct(">4sBBHIIQ32sII")
CHUNK_HEAD_BYTES = _HEADER.size
CHUNK_MESSAGE_BYTES = CHUNK_HEAD_BYTES + CHUNK_BYTES
"""Payload of the largest message that is ever sent."""


def chunk_bytes_within(max_payload_bytes: int) -> int:
    """Payload of a chunk at a broker that takes messages of this size."""
    return min(CHUNK_BYTES, max_payload_bytes - CHUNK_HEAD_BYTES)


_MAGIC = b"fvbc"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a blob: 64 bytes of header, then the bytes."""

    digest: str
    index: int
    count: int
    size: int  # of the whole blob
    seq: int  # counts the sender's chunks of this transfer from 1, repairs included
    payload: bytes | memoryview

    def head(self) -> bytes:
        """The header alone, for senders that do not copy the payload."""
        return _HEADER.pack(
            _MAGIC, _VERSION, 0, 0, self.index, self.count, self.size,
            bytes.fromhex(self.digest.partition(":")[2]), len(self.payload), self.seq,
        )  # fmt: skip

    def encode(self) -> bytes:
        return self.head() + self.payload


def decode_chunk(raw: bytes | memoryview, digest_name: str = "blake3") -> Chunk:
    """The chunk in `raw`; its payload shares the memory of a memoryview.

    Raises BadPayload when `raw` is not a chunk of this version, or was cut.
    """
    if len(raw) < _HEADER.size or raw[:4] != _MAGIC or raw[4] != _VERSION:
        raise BadPayload("FV2302", f"{len(raw)} bytes on a chunk topic are not a chunk of version {_VERSION}")
    _, _, _, _, index, count, size, digest, length, seq = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size :]
    if len(payload) != length:
        raise BadPayload("FV2302", f"chunk {index} says {length} bytes, {len(payload)} came")
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
                "FV2302",
                f"a chunk of a blob of {chunk.size} bytes in {chunk.count} chunks, "
                f"expected {manifest.size} in {manifest.chunks}",
            )
        start = chunk.index * manifest.chunk
        if chunk.index >= manifest.chunks or len(chunk.payload) != min(manifest.chunk, manifest.size - start):
            raise BadPayload("FV2302", f"chunk {chunk.index} of {manifest.chunks} has {len(chunk.payload)} bytes")
        # not the highest ever: a sender that was started again counts from 1, and what it sent is under way
        self.last_seq = chunk.seq
        self._since_want += 1
        if self._have[chunk.index]:
            return False
        self._have[chunk.index] = 1
        self._left -= 1
        return True

    def nack_is_due(self, *, idle: bool = False) -> bool:
        """Return whether enough came since the last BlobNack to tell the sender; anything, if no more comes."""
        return self._since_want >= (1 if idle else ACK_EVERY_CHUNKS)

    def nack(self, *, stalled: bool = False, apart: bool = False) -> BlobNack:
        self._since_want = 0
        return BlobNack(self.manifest.digest, missing_ranges(self._have), self.last_seq, stalled, apart)

    def restart(self) -> None:
        """Forget everything: the whole did not have its digest."""
        self._have = bytearray(self.manifest.chunks)
        self._left = self.manifest.chunks

    def switch_topic(self) -> None:
        """The remaining chunks come on another topic, with another count of the sender."""
        self.last_seq = 0
