"""The bookkeeping of a blob over any lossy link that keeps the order, as a broker's topic does."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvit.errors import BadPayload
from fedvit.wire.messages import BlobNack, Manifest
from fedvit.wire.outgoing import Outgoing
from fedvit.wire.transfer import (
    ACK_EVERY_CHUNKS,
    MAX_RANGES,
    WINDOW_CHUNKS,
    Chunk,
    Incoming,
    decode_chunk,
    missing_ranges,
)

DIGEST = "blake3:" + "ab" * 32
CHUNK = 1024


def manifest_of(chunks: int) -> Manifest:
    return Manifest(DIGEST, chunks * CHUNK, CHUNK)


def chunk(manifest: Manifest, index: int, seq: int) -> Chunk:
    return Chunk(DIGEST, index, manifest.chunks, manifest.size, seq, bytes(CHUNK))


class Receiver:
    """A receiver, its way from the sender and its way back; both keep the order."""

    def __init__(self, manifest: Manifest) -> None:
        self.incoming = Incoming(manifest)
        self.chunks: deque[tuple[int, int]] = deque()
        self.wants: deque[BlobNack | None] = deque()  # None: done

    def deliver(self, manifest: Manifest) -> bool:
        """One chunk arrives."""
        if not self.chunks:
            return False
        was_complete = self.incoming.complete
        index, seq = self.chunks.popleft()
        self.incoming.accept(chunk(manifest, index, seq))
        if self.incoming.complete:
            if not was_complete:
                self.wants.append(None)
        elif self.incoming.nack_is_due():
            self.wants.append(self.incoming.nack())
        return True


class Simulation:
    """A sender and its receivers; whatever can happen next is chosen from outside."""

    def __init__(self, chunks: int, receivers: int) -> None:
        self.manifest = manifest_of(chunks)
        self.outgoing = Outgoing(self.manifest)
        self.receivers = {f"r{number}": Receiver(self.manifest) for number in range(receivers)}
        self.losses = 0
        self.sent: list[int] = []

    def start(self, name: str) -> None:
        receiver = self.receivers[name]
        receiver.wants.append(receiver.incoming.nack())

    def acts(self, name: str, lost: Iterator[bool]) -> list[Callable[[], bool]]:
        return [lambda: self.sends(lost), lambda: self.hears(name), lambda: self.receivers[name].deliver(self.manifest)]

    def sends(self, lost: Iterator[bool]) -> bool:
        step = self.outgoing.next_chunk()
        if step is None:
            return False
        self.sent.append(step[0])
        for receiver in self.receivers.values():
            if next(lost):
                self.losses += 1
            else:
                receiver.chunks.append(step)
        return True

    def hears(self, name: str) -> bool:
        receiver = self.receivers[name]
        if not receiver.wants:
            return False
        want = receiver.wants.popleft()
        if want is None:
            self.outgoing.drop(name)
        else:
            self.outgoing.update(name, want)
        return True

    def stalls(self, name: str) -> bool:
        """A receiver that misses something while nothing is under way says so."""
        receiver = self.receivers[name]
        if receiver.incoming.complete or receiver.chunks or receiver.wants:
            return False
        receiver.wants.append(receiver.incoming.nack(stalled=True))
        return True

    def run(self, choices: Iterator[int], lost: Iterator[bool], *, max_steps: int) -> None:
        names = list(self.receivers)
        for _ in range(max_steps):
            if all(receiver.incoming.complete for receiver in self.receivers.values()):
                return
            choice = next(choices)
            first = choice % len(names)
            acts = [act for name in names[first:] + names[:first] for act in self.acts(name, lost)]
            first = choice % 3
            if not any(act() for act in acts[first:] + acts[:first]):
                # silence everywhere: what is missing was lost, and somebody says so
                assert any(self.stalls(name) for name in names)
        raise AssertionError("the transfer did not come to an end")


def endless(values: list[int]) -> Iterator[int]:
    """The values, then a fixed round of everything."""
    yield from values
    number = 0
    while True:
        number += 1
        yield number * 7 + number // 3


def losing(pattern: list[bool]) -> Iterator[bool]:
    """The pattern, then nothing is lost any more."""
    yield from pattern
    while True:
        yield False


sizes = st.integers(1, 3 * WINDOW_CHUNKS)
choices = st.lists(st.integers(0, 10_000), max_size=400)
patterns = st.lists(st.booleans(), max_size=200) | st.lists(st.integers(0, 9).map(lambda draw: draw == 0), max_size=400)


@settings(max_examples=150)
@given(sizes, choices, patterns)
def test_every_transfer_ends_and_each_loss_costs_one_chunk(chunks: int, order: list[int], lost: list[bool]) -> None:
    """One receiver: n chunks and one more for each that was lost, never one that was not needed."""
    simulation = Simulation(chunks, 1)
    simulation.start("r0")
    simulation.run(endless(order), losing(lost), max_steps=40 * (chunks + len(lost)) + 1000)
    assert simulation.outgoing.sent_chunks == chunks + simulation.losses


@settings(max_examples=60)
@given(sizes, choices, patterns, st.integers(2, 4))
def test_several_receivers_end_too(chunks: int, order: list[int], lost: list[bool], receivers: int) -> None:
    """All ask before the first chunk: again n chunks, and at most one more for each loss."""
    simulation = Simulation(chunks, receivers)
    for name in simulation.receivers:
        simulation.start(name)
        simulation.hears(name)
    simulation.run(endless(order), losing(lost), max_steps=60 * receivers * (chunks + len(lost)) + 1000)
    assert chunks <= simulation.outgoing.sent_chunks <= chunks + simulation.losses


@settings(max_examples=60)
@given(sizes, st.data())
def test_the_window_is_never_exceeded(chunks: int, data: st.DataObject) -> None:
    """What was sent and not yet heard of is at most a window, at every moment and for every delay."""
    simulation = Simulation(chunks, 1)
    simulation.start("r0")
    receiver = simulation.receivers["r0"]
    while not receiver.incoming.complete:
        simulation.hears("r0")
        while simulation.sends(losing([])):
            assert len(receiver.chunks) <= WINDOW_CHUNKS
        simulation.stalls("r0")
        for _ in range(min(len(receiver.chunks), data.draw(st.integers(1, 2 * ACK_EVERY_CHUNKS)))):
            receiver.deliver(simulation.manifest)
    assert simulation.sent == list(range(chunks))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 10_000))
def test_a_sender_that_was_started_again_sends_what_is_missing_once(chunks: int, had: int, last_seq: int) -> None:
    """It counts from 1 again, below what the receiver saw from its predecessor."""
    simulation = Simulation(chunks, 1)
    incoming = simulation.receivers["r0"].incoming
    for index in range(min(had, chunks)):
        incoming.accept(chunk(simulation.manifest, index, last_seq + index))
    missing = chunks - incoming.received_chunks
    simulation.start("r0")
    simulation.run(endless([]), losing([]), max_steps=40 * chunks + 1000)
    assert simulation.outgoing.sent_chunks == missing


@given(st.integers(2 * WINDOW_CHUNKS, 4 * WINDOW_CHUNKS), st.integers(0, WINDOW_CHUNKS))
def test_a_late_joiner_is_sent_the_beginning_and_shares_the_rest(chunks: int, before: int) -> None:
    """What was sent before it asked is lost to it, and is all that is sent twice."""
    simulation = Simulation(chunks, 2)
    simulation.start("r0")
    simulation.hears("r0")
    late = simulation.receivers["r1"]
    for _ in range(before):
        simulation.sends(losing([]))
        late.chunks.clear()
    simulation.start("r1")
    simulation.hears("r1")
    simulation.run(endless([]), losing([]), max_steps=200 * chunks)
    assert simulation.outgoing.sent_chunks == chunks + before


def test_a_loss_is_repaired_as_soon_as_later_chunks_show_it() -> None:
    """Of chunks 0 to 16 the first is lost: the sixteenth that arrives makes a BlobNack, and 0 goes before 17."""
    manifest = manifest_of(100)
    outgoing, incoming = Outgoing(manifest), Incoming(manifest)
    outgoing.update("r", incoming.nack())
    for _ in range(ACK_EVERY_CHUNKS + 1):
        index, seq = outgoing.next_chunk() or (0, 0)
        if index != 0:
            incoming.accept(chunk(manifest, index, seq))
    assert incoming.nack_is_due()
    outgoing.update("r", incoming.nack())
    assert [outgoing.next_chunk(), outgoing.next_chunk()] == [(0, 18), (17, 19)]


def calls_of(act: Callable[[], object]) -> int:
    """How many functions are called and generators resumed."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def calls_with(receivers: int) -> list[int]:
    """What one BlobNack, the looks at what can be sent, one chunk and one farewell cost, beside so many receivers."""
    manifest = manifest_of(100)
    outgoing, names = Outgoing(manifest), [f"r{number}" for number in range(receivers)]
    for name in names:
        outgoing.update(name, BlobNack(DIGEST, ((0, 100),)))
    for _ in range(ACK_EVERY_CHUNKS):
        outgoing.next_chunk()
    wanted = BlobNack(DIGEST, ((10, 90),), 10)
    return [
        calls_of(lambda: outgoing.update(names[0], wanted)),
        calls_of(lambda: (outgoing.has_work, outgoing.under_way, outgoing.receiver_count)),
        calls_of(outgoing.next_chunk),
        calls_of(lambda: outgoing.drop(names[0])),
    ]


def test_a_want_costs_the_same_however_many_other_receivers_there_are() -> None:
    """Else a fleet of 4,000 costs a thousand times as much as one of 100, and minutes for a model of ViT-B's size."""
    assert calls_with(200) == calls_with(5)


def test_an_idle_receiver_reports_less_than_a_full_batch_once() -> None:
    manifest = manifest_of(100)
    incoming = Incoming(manifest)
    assert not incoming.nack_is_due(idle=True)
    incoming.accept(chunk(manifest, 0, 1))
    assert not incoming.nack_is_due()
    assert incoming.nack_is_due(idle=True)
    incoming.nack()
    assert not incoming.nack_is_due(idle=True)


def test_a_duplicate_is_known() -> None:
    incoming = Incoming(manifest_of(2))
    assert incoming.accept(chunk(incoming.manifest, 0, 1))
    assert not incoming.accept(chunk(incoming.manifest, 0, 2))
    assert (incoming.received_chunks, incoming.complete) == (1, False)


@pytest.mark.parametrize(
    "wrong",
    [
        Chunk(DIGEST, 2, 2, 2 * CHUNK, 1, bytes(CHUNK)),  # no such chunk
        Chunk(DIGEST, 0, 3, 2 * CHUNK, 1, bytes(CHUNK)),  # another count
        Chunk(DIGEST, 0, 2, 2 * CHUNK + 1, 1, bytes(CHUNK)),  # another size
        Chunk(DIGEST, 0, 2, 2 * CHUNK, 1, bytes(CHUNK - 1)),  # cut
    ],
)
def test_a_chunk_that_does_not_fit_changes_nothing(wrong: Chunk) -> None:
    incoming = Incoming(manifest_of(2))
    with pytest.raises(BadPayload):
        incoming.accept(wrong)
    assert (incoming.received_chunks, incoming.last_seq) == (0, 0)


@pytest.mark.parametrize("missing", [(0, 3), (2, 1), (-1, 1), (0, 0), (0, -1)])
def test_a_want_for_chunks_that_do_not_exist_is_refused(missing: tuple[int, int]) -> None:
    outgoing = Outgoing(manifest_of(2))
    with pytest.raises(BadPayload):
        outgoing.update("r", BlobNack(DIGEST, (missing,)))
    assert outgoing.receiver_count == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=50))
def test_a_chunk_survives_its_encoding(index: int, seq: int, size: int, payload: bytes) -> None:
    sent = Chunk(DIGEST, index, 7, size, seq, payload)
    assert decode_chunk(sent.encode()) == sent
    assert len(sent.encode()) == 64 + len(payload)


@given(st.binary(max_size=200))
def test_anything_else_is_no_chunk(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        decode_chunk(raw)


@pytest.mark.parametrize("cut", [1, 60, 64, 69])
def test_a_cut_chunk_is_refused(cut: int) -> None:
    with pytest.raises(BadPayload):
        decode_chunk(Chunk(DIGEST, 0, 1, 6, 1, b"sample").encode()[:cut])


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_indices(indices: set[int]) -> None:
    ranges = missing_ranges(bytes(index not in indices for index in range(301)), limit=1000)
    assert {index for first, count in ranges for index in range(first, first + count)} == indices
    assert all(sum(before) < after[0] for before, after in pairwise(ranges))


def test_more_ranges_than_a_want_carries_are_cut_from_the_end() -> None:
    ranges = missing_ranges(bytes([0, 1]) * 2 * MAX_RANGES)
    assert ranges == tuple((2 * number, 1) for number in range(MAX_RANGES))
