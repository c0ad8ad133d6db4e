"""Blobs arrive, once, whole and verified, over every transport and through every accident."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from bench.wire import Side
from coordinator.rounds.sender_limits import SenderLimits
from coordinator.security.broker import Broker
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import BadPayload, StorageFailed
from fedvit.partials import PartialBlob
from fedvit.transport import blob_receiver, chunk_sender, packets
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import BlobNack, Manifest
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import CHUNK_BYTES, WINDOW_CHUNKS
from tests.support.brokers import mosquitto
from tests.support.codes import has_code
from tests.support.peers import Peer, blob, drive, settle
from tests.support.waiting import WAIT_S
from tests.support.worlds import MqttWorld, World

BIG = 20_000_000
"""158 chunks: more than two windows."""


Peers = Callable[[str], Peer]


def make_peers(world: World, folder: Path) -> Peers:
    return lambda name: Peer(world.prefix, name, world.new_transport(name), folder)


@pytest.fixture
def peer(world: World, tmp_path: Path) -> Peers:
    return make_peers(world, tmp_path)


@pytest.fixture
def mqtt_peer(mqtt_world: MqttWorld, tmp_path: Path) -> Peers:
    return make_peers(mqtt_world, tmp_path)


# --- every transport ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, BIG])
def test_a_blob_reaches_one_receiver_and_is_sent_once(peer: Peers, size: int) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    content = blob(size)
    receiver.fetch(sender.blobs.put(content), sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert sender.transport.sent_bytes < 1.01 * size + 1000
    assert not receiver.partial_files()


def test_a_blob_on_a_fast_link_is_no_flood(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    limits = SenderLimits(Topics("home"))
    receiver.transport.admits = limits.admits
    settle(peers)
    content = blob(BIG)
    receiver.fetch(sender.blobs.put(content), sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert limits.take_floods() == []


def test_three_receivers_of_one_broadcast_cost_about_one_sending(peer: Peers) -> None:
    sender, *receivers = peers = [peer("sender"), peer("r1"), peer("r2"), peer("r3")]
    settle(peers)
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    for receiver in receivers:
        receiver.fetch(manifest, sender)
    drive(peers, lambda: all(receiver.has_ended for receiver in receivers))
    assert all(receiver.got(content) for receiver in receivers)
    assert sender.sent_chunks < 1.1 * manifest.chunks


def test_receivers_that_were_expected_are_sent_a_small_blob_once(peer: Peers) -> None:
    """The first BlobNack must not start a broadcast that the second one then asks for again."""
    sender, *receivers = peers = [peer("sender"), peer("r1"), peer("r2"), peer("r3")]
    settle(peers)
    sender.receivers = 3
    manifest = sender.blobs.put(blob(3 * CHUNK_BYTES))
    for receiver in receivers:
        receiver.fetch(manifest, sender)
    drive(peers, lambda: all(receiver.has_ended for receiver in receivers))
    assert round(sender.sent_chunks) == 3  # plus headers and control messages


def test_a_late_joiner_is_sent_what_it_missed(peer: Peers) -> None:
    sender, early, late = peers = [peer("sender"), peer("early"), peer("late")]
    settle(peers)
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    early.fetch(manifest, sender)
    drive(peers, lambda: early.transport.received_bytes > BIG / 3)
    late.fetch(manifest, sender)
    drive(peers, lambda: early.has_ended and late.has_ended)
    assert early.got(content)
    assert late.got(content)
    assert sender.sent_chunks < 2.1 * manifest.chunks


def test_both_directions_at_once(peer: Peers) -> None:
    coordinator, device = peers = [peer("coordinator"), peer("device")]
    settle(peers)
    down, up = blob(5_000_000, seed=1), blob(5_000_000, seed=2)
    device.fetch(coordinator.blobs.put(down), coordinator)
    coordinator.fetch(device.blobs.put(up), device)
    drive(peers, lambda: device.has_ended and coordinator.has_ended)
    assert device.got(down)
    assert coordinator.got(up)


def test_a_blob_that_is_already_here_is_not_sent(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    content = blob(1000)
    manifest = sender.blobs.put(content)
    receiver.blobs.put(content)
    receiver.fetch(manifest, sender)
    assert receiver.got(content)
    assert sender.transport.sent_bytes == 0


def test_two_requests_for_one_blob_end_with_one_transfer(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    manifest = sender.blobs.put(blob(3_000_000))
    receiver.fetch(manifest, sender)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: len(receiver.finished) == 2)
    assert receiver.finished == [(manifest, None)] * 2
    assert sender.sent_chunks < 1.1 * manifest.chunks


def test_large_blob_that_is_being_synced_keeps_no_other_waiting(peer: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes as long for the large one as the small one needs to arrive."""
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    arrived, commit = threading.Event(), PartialBlob.commit

    def slow(partial: PartialBlob) -> None:
        if len(partial.have) > 1:
            assert arrived.wait(WAIT_S), "the small one did not arrive"
        commit(partial)

    monkeypatch.setattr(PartialBlob, "commit", slow)
    large, small = blob(BIG // 10, seed=1), blob(1000, seed=2)
    manifest = sender.blobs.put(large)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.chunks_here(manifest) == manifest.chunks)
    receiver.fetch(sender.blobs.put(small), sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(small)
    arrived.set()
    receiver.finished.clear()
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(large)


def test_a_sender_that_sends_nothing_keeps_no_other_senders_blob_away(peer: Peers) -> None:
    """It offered the same bytes first. When it goes, and when it stays, the other's blob comes."""
    mute, sender, receiver = peers = [peer("mute"), peer("sender"), peer("receiver")]
    settle(peers)
    manifest = sender.blobs.put(blob(3_000_000))
    receiver.fetch(manifest, mute)
    receiver.fetch(manifest, sender)
    drive([sender, receiver], lambda: receiver.has_ended)
    assert receiver.finished == [(manifest, None)]
    receiver.exchange.cancel("mute")
    assert not receiver.partial_files()


def test_a_wrong_digest_ends_in_an_error_after_some_attempts(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    right, wrong = blob(3 * CHUNK_BYTES, seed=1), blob(3 * CHUNK_BYTES, seed=2)
    manifest = sender.blobs.put(right)
    sender.blobs.path(manifest.digest).write_bytes(wrong)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.has_ended)
    [(_, error)] = receiver.finished
    assert isinstance(error, BadPayload)
    assert digest_of(wrong) in str(error)
    assert not receiver.blobs.has(manifest.digest)
    assert not receiver.partial_files()
    assert sender.sent_chunks < 1.1 * (1 + blob_receiver.MAX_RESTARTS) * manifest.chunks


def test_a_peer_that_may_not_read_a_blob_is_refused(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    manifest = sender.blobs.put(blob(1000))
    sender.readable = False
    receiver.fetch(manifest, sender)
    drive(peers, lambda: bool(sender.refused))
    assert "receiver asks for blob" in sender.refused[0]
    assert sender.transport.sent_bytes == 0
    assert not receiver.has_ended


@pytest.mark.parametrize("manifest", [Manifest(digest_of(b"nobody has it"), 5, CHUNK_BYTES), Manifest("x:y", 5, 1024)])
def test_a_blob_that_is_not_here_is_refused(peer: Peers, manifest: Manifest) -> None:
    sender = peer("sender")
    settle([sender])
    with pytest.raises(BadPayload):
        sender.exchange.on_nack("receiver", BlobNack(manifest.digest, ((0, 1),)))


def test_a_request_for_chunks_that_do_not_exist_leaves_nothing_behind(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    content = blob(1000)
    manifest = sender.blobs.put(content)
    with pytest.raises(BadPayload, check=has_code("FV2302", "0 to 8")):
        sender.exchange.on_nack("stranger", BlobNack(manifest.digest, ((0, 9),)))
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Lets files of this process grow no further: a disk that is full, also for root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [1_000_001, 24 * CHUNK_BYTES - 10])
def test_a_full_disk_ends_in_an_error_and_the_sender_stops(
    peer: Peers, largest_file: Callable[[int], None], room: int
) -> None:
    """Each limit lies within a chunk, so that its write is cut; the second within the last chunk."""
    sender, receiver, other = peers = [peer("sender"), peer("receiver"), peer("other")]
    settle(peers)
    manifest, small = sender.blobs.put(blob(24 * CHUNK_BYTES)), sender.blobs.put(b"small")
    largest_file(room)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.has_ended)
    [(_, error)] = receiver.finished
    assert isinstance(error, StorageFailed)
    assert "File too large" in str(error)
    assert not receiver.partial_files()
    other.fetch(small, sender)
    drive(peers, lambda: other.has_ended)
    assert other.got(b"small")


def test_a_disk_from_which_nothing_can_be_deleted_ends_in_the_error_of_the_write(
    peer: Peers, largest_file: Callable[[int], None]
) -> None:
    """A card has failed, and the system lets nobody write to it any more. A folder stands for it here."""
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    manifest = sender.blobs.put(blob(24 * CHUNK_BYTES))
    receiver.fetch(manifest, sender)
    [notes] = receiver.blobs.folder.rglob("*.map")
    notes.unlink()
    notes.mkdir()
    largest_file(1_000_001)
    drive(peers, lambda: receiver.has_ended)
    [(_, error)] = receiver.finished
    assert isinstance(error, StorageFailed)
    assert "File too large" in str(error)


def test_a_folder_that_cannot_be_written_ends_in_an_error(peer: Peers) -> None:
    sender, receiver = peers = [peer("sender"), peer("receiver")]
    settle(peers)
    manifest = sender.blobs.put(b"content")
    blocked = receiver.blobs.path(manifest.digest).parent
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder should be")
    receiver.fetch(manifest, sender)
    [(_, error)] = receiver.finished
    assert isinstance(error, StorageFailed)


# --- MQTT ---------------------------------------------------------------------------------------------


def test_a_transfer_survives_the_death_of_the_broker(mqtt_world: MqttWorld, mqtt_peer: Peers) -> None:
    sender, *receivers = peers = [mqtt_peer("sender"), mqtt_peer("r1"), mqtt_peer("r2")]
    settle(peers)
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    for receiver in receivers:
        receiver.fetch(manifest, sender)
    drive(peers, lambda: all(receiver.transport.received_bytes > BIG / 4 for receiver in receivers))
    assert not any(receiver.has_ended for receiver in receivers)
    mqtt_world.kill_broker()
    mqtt_world.bring_broker_back()
    drive(peers, lambda: all(receiver.has_ended for receiver in receivers))
    assert all(receiver.got(content) for receiver in receivers)
    # lost is at most what was under way; the receivers do not come back at the same moment
    assert sender.sent_chunks < manifest.chunks + 3 * WINDOW_CHUNKS


def test_a_bulk_link_that_is_lost_alone_comes_back_alone(mqtt_world: MqttWorld, mqtt_peer: Peers) -> None:
    """Somebody takes over the client id of the receiver's second connection; the first never notices."""
    sender, receiver = peers = [mqtt_peer("sender"), mqtt_peer("receiver")]
    settle(peers)
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.transport.received_bytes > BIG / 4)
    name = mqtt_world.prefix.rstrip("/") + "receiver.b"
    address = mqtt_world.address()
    with socket.create_connection((address.host, address.port)) as thief:
        thief.sendall(packets.connect(name, 30, None, None))
        assert thief.recv(4) == bytes([packets.CONNACK, 2, 0, 0])
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert receiver.disconnections == sender.disconnections == 0
    assert sender.sent_chunks < manifest.chunks + 2 * WINDOW_CHUNKS


class Ends:
    """A sender and a receiver in processes of their own, around one folder; both can be killed and started again."""

    def __init__(self, broker: Broker, folder: Path, size: int) -> None:
        store = BlobStore(folder / "sender")
        self.manifest = store.put(blob(size))
        self.warm = store.put(b"warm")
        given = [msgspec.structs.asdict(manifest) for manifest in (self.warm, self.manifest)]
        address = f"mqtt://{broker.address}"
        self.options = {"folder": str(folder), "broker": address, "manifests": given, "receivers": 1}
        self.received = BlobStore(folder / "r0")
        self.sides: list[Side] = []

    def start(self, role: str, report_third: bool = True) -> Side:
        side = Side("ours", role, name="r0", report_third=report_third, **self.options)
        self.sides.append(side)
        side.await_ready()
        return side

    def kill(self) -> None:
        for side in self.sides:
            side.kill()

    def sent_chunks(self, sender: Side) -> float:
        sender.end_input()
        return float(sender.answer()["sent_bytes"]) / CHUNK_BYTES


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with mosquitto(tmp_path / "broker") as broker:
        both = Ends(broker, tmp_path, 2 * BIG)
        yield both
        both.kill()


def test_a_receiver_that_was_killed_asks_only_for_what_is_missing(ends: Ends) -> None:
    sender, receiver = ends.start("sender"), ends.start("receiver")
    receiver.go()
    assert receiver.answer() == {"third": True}
    receiver.process.kill()
    receiver.process.wait()
    again = ends.start("receiver", report_third=False)  # on a busy machine less than a third may be missing
    again.go()
    assert "at" in again.answer()
    assert ends.received.has(ends.manifest.digest)
    assert not list(ends.received.folder.rglob("*.part"))
    assert ends.sent_chunks(sender) <= 1.01 * ends.manifest.chunks + WINDOW_CHUNKS + 1


def test_a_sender_that_was_killed_goes_on_where_the_receiver_is(ends: Ends) -> None:
    sender, receiver = ends.start("sender"), ends.start("receiver")
    receiver.go()
    assert receiver.answer() == {"third": True}
    sender.process.kill()
    sender.process.wait()
    again = ends.start("sender")
    while "at" not in receiver.answer():
        pass
    assert ends.received.has(ends.manifest.digest)
    assert ends.sent_chunks(again) <= ends.manifest.chunks * 2 / 3 + 1


# --- memory: accidents that a network does not have on demand -------------------------------------------


def memory_peers(broker: MemoryBroker, folder: Path, *names: str) -> list[Peer]:
    return [Peer("", name, MemoryTransport(SimpleQueue(), broker, name), folder) for name in names]


def test_small_blobs_are_not_held_open_while_they_are_sent(tmp_path: Path) -> None:
    """A hundred devices with a blob of their own each: none of them is open, and one of two chunks is."""
    [sender] = memory_peers(MemoryBroker(), tmp_path, "sender")
    for number in range(100):
        manifest = sender.blobs.put(number.to_bytes() * 31_000)
        sender.exchange.on_nack(f"device-{number}", BlobNack(manifest.digest, ((0, 1),)))
    assert open_files(tmp_path) == []
    large = sender.blobs.put(b"x" * (CHUNK_BYTES + 1))
    sender.exchange.on_nack("device", BlobNack(large.digest, ((0, 2),)))
    assert open_files(tmp_path) == [str(sender.blobs.path(large.digest))]


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, closed by now
            opened.append(str(link.readlink()))
    return [path for path in opened if path.startswith(str(folder))]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lost_chunks_are_sent_again_and_only_those(tmp_path: Path, seed: int) -> None:
    sender, *receivers = peers = memory_peers(MemoryBroker(loss=0.05, seed=seed), tmp_path, "sender", "r1", "r2")
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    for receiver in receivers:
        receiver.fetch(manifest, sender)
    drive(peers, lambda: all(receiver.has_ended for receiver in receivers))
    assert all(receiver.got(content) for receiver in receivers)
    # each of two receivers loses one chunk in 20; the luck of the draw may double it
    assert sender.sent_chunks < 1.2 * manifest.chunks


def test_a_receiver_that_fell_silent_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sender, "SILENT_S", 0.5)
    sender, alive, silent = memory_peers(MemoryBroker(), tmp_path, "sender", "alive", "silent")
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    alive.fetch(manifest, sender)
    silent.fetch(manifest, sender)
    drive([sender, alive], lambda: alive.has_ended)
    assert alive.got(content)


def test_who_asks_and_falls_silent_does_not_use_up_what_others_may_have_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows are all that may be under way of all blobs; a device asks for two such, and says nothing more."""
    monkeypatch.setattr(chunk_sender, "SILENT_S", 1e9)
    sender, alive = memory_peers(MemoryBroker(), tmp_path, "sender", "alive")
    settle([sender, alive])
    for seed in (1, 2):
        held = sender.blobs.put(blob(WINDOW_CHUNKS * CHUNK_BYTES, seed))
        sender.exchange.on_nack("mallory", BlobNack(held.digest, ((0, held.chunks),)))
    drive([sender], lambda: sender.sent_chunks >= 2 * WINDOW_CHUNKS)
    content = blob(BIG)
    alive.fetch(sender.blobs.put(content), sender)
    drive([sender, alive], lambda: alive.has_ended)
    assert alive.got(content)


def test_requests_that_piled_up_at_a_busy_sender_are_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_receiver, "STALL_S", 0.2)
    sender, receiver = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "receiver")
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.transport.received_bytes > BIG / 4)
    waited_until = time.monotonic() + 1.5  # of silence: the receiver says three times that it stalled
    drive([receiver], lambda: time.monotonic() > waited_until)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert sender.sent_chunks < 1.1 * manifest.chunks


def test_a_link_that_is_only_slow_is_given_more_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes longer than the first stall, but nothing is lost, so nothing is sent again."""
    monkeypatch.setattr(blob_receiver, "STALL_S", 0.1)
    sender, receiver = memory_peers(MemoryBroker(), tmp_path, "sender", "receiver")
    receiver.events_per_step = 1
    content = blob(12 * CHUNK_BYTES)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    while not receiver.has_ended:
        next_at = time.monotonic() + 0.15
        drive([sender], lambda due=next_at: time.monotonic() > due)
        receiver.step()
    assert receiver.got(content)
    assert sender.sent_chunks < 1.1 * manifest.chunks


def test_a_sender_that_was_started_again_sends_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks count from 1 again; those must not pass for chunks that were lost long ago."""
    monkeypatch.setattr(blob_receiver, "STALL_S", 0.5)
    broker = MemoryBroker()
    sender, receiver = memory_peers(broker, tmp_path, "sender", "receiver")
    content = blob(2 * BIG)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    drive([sender, receiver], lambda: receiver.transport.received_bytes > BIG)
    sender.transport.close()
    [again] = memory_peers(broker, tmp_path, "sender")
    drive([again, receiver], lambda: receiver.has_ended)
    assert receiver.got(content)
    assert sender.sent_chunks + again.sent_chunks < manifest.chunks + 1.1 * WINDOW_CHUNKS


def test_a_dropped_peer_is_neither_sent_to_nor_waited_for(tmp_path: Path) -> None:
    sender, receiver = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "receiver")
    manifest = sender.blobs.put(blob(BIG))
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.transport.received_bytes > BIG / 4)
    receiver.exchange.drop_peer("sender")
    sender.step()
    sender.exchange.drop_peer("receiver")
    before = sender.transport.sent_bytes
    quiet_at = time.monotonic() + 0.3
    drive(peers, lambda: time.monotonic() > quiet_at)
    assert sender.transport.sent_bytes == before
    assert len(receiver.partial_files()) == 1  # it is gone on with, if it comes again
    assert not receiver.has_ended


def test_what_an_earlier_attempt_left_is_not_sent_again(tmp_path: Path) -> None:
    sender, receiver = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "receiver")
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.transport.received_bytes > BIG / 2)
    receiver.exchange.cancel()
    drive(peers, lambda: not receiver.step())
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert sender.sent_chunks < manifest.chunks + 1.1 * WINDOW_CHUNKS
    assert not receiver.partial_files()


def test_a_damaged_rest_of_an_earlier_attempt_costs_one_repeat(tmp_path: Path) -> None:
    sender, receiver = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "receiver")
    content = blob(BIG)
    manifest = sender.blobs.put(content)
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.transport.received_bytes > BIG / 2)
    receiver.exchange.cancel()
    [partial] = receiver.partial_files()
    with open(partial, "r+b") as file:
        file.write(b"damage")
    receiver.fetch(manifest, sender)
    drive(peers, lambda: receiver.has_ended)
    assert receiver.got(content)
    assert sender.sent_chunks < 2.1 * manifest.chunks + WINDOW_CHUNKS


def test_a_slow_receiver_is_served_apart_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one topic nobody gets further than a window ahead of the slowest."""
    monkeypatch.setattr(chunk_sender, "LAGGARD_S", 0.2)
    sender, fast, slow = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "fast", "slow")
    sender.receivers = 2
    slow.events_per_step = 1
    content = blob(2 * BIG)
    manifest = sender.blobs.put(content)
    for receiver in (fast, slow):
        receiver.fetch(manifest, sender)
    while not fast.has_ended:
        next_at = time.monotonic() + 0.01
        drive([sender, fast], lambda due=next_at: time.monotonic() > due)
        slow.step()
    assert fast.got(content)
    assert slow.chunks_here(manifest) < manifest.chunks / 2
    slow.events_per_step = 1_000_000
    drive(peers, lambda: slow.has_ended)
    assert slow.got(content)
    assert sender.sent_chunks < 2.1 * manifest.chunks


def test_receivers_of_one_speed_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sender, "LAGGARD_S", 0.0)
    monkeypatch.setattr(chunk_sender, "GATHER_S", WAIT_S)  # a busy machine would send before all have asked
    sender, *receivers = peers = memory_peers(MemoryBroker(), tmp_path, "sender", "r1", "r2", "r3")
    sender.receivers = 3
    content = blob(2 * BIG)
    manifest = sender.blobs.put(content)
    for receiver in receivers:
        receiver.fetch(manifest, sender)
    drive(peers, lambda: all(receiver.has_ended for receiver in receivers))
    assert all(receiver.got(content) for receiver in receivers)
    assert sender.sent_chunks < 1.1 * manifest.chunks
