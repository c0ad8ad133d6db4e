"""Blobs through an object store: a real server, and chunks wherever it cannot be used.

Usually the server speaks S3; `make test-stores` holds the same over a server that speaks Azure.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.config import BlobsConfig
from coordinator.rounds import object_store, store_access
from coordinator.rounds.object_store import ObjectStore
from fedvit.blobs import BlobStore
from fedvit.partials import PartialBlob
from fedvit.transport import blob_receiver
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.transport.urls import is_at
from fedvit.wire.messages import AnyMessage, BlobAck, BlobNack, BlobPut, BlobUrl, Manifest
from fedvit.wire.transfer import CHUNK_BYTES
from tests.support.peers import Peer, blob, drive, settle
from tests.support.s3_server import S3Server, status_of
from tests.support.stores import ACCOUNT_KEY, AnyServer, s3_server, set_keys, store_server, usual_stores
from tests.support.waiting import WAIT_S, wait_until

SIZE = 20 * CHUNK_BYTES + 1000


class Fleet:
    """A coordinator with an object store, and its devices, over a broker in memory."""

    def __init__(self, folder: Path, server: AnyServer, **config: Any) -> None:
        self.server = server
        self.folder = folder
        self.broker = MemoryBroker()
        self.origin = server.endpoint
        blobs = BlobStore(folder / "coordinator")
        self.store = ObjectStore(server.config(**config), "run", blobs)
        self.lines: list[str] = []
        self.coordinator = self._peer("coordinator", self.store)
        self.peers = [self.coordinator]

    def _peer(self, name: str, places: ObjectStore | None = None) -> Peer:
        return Peer("", name, MemoryTransport(SimpleQueue(), self.broker, name), self.folder, places)

    def device(self, name: str = "device") -> Peer:
        device = self._peer(name)
        device.exchange.store_origin = self.origin
        self.peers.append(device)
        settle(self.peers)
        return device

    def without_route(self) -> Peer:
        """A device for which nobody answers at the store's address."""
        device = self.device()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        device.exchange.store_origin = f"http://127.0.0.1:{port}"

        def elsewhere(url: str) -> str:
            return url.replace(self.server.endpoint, device.exchange.store_origin)

        def change(message: AnyMessage) -> AnyMessage:
            if isinstance(message, BlobUrl):
                return msgspec.structs.replace(message, url=elsewhere(message.url))
            if isinstance(message, BlobNack) and message.put:
                put = msgspec.structs.replace(message.put, url=elsewhere(message.put.url))
                return msgspec.structs.replace(message, put=put)
            return message

        device.change = change
        return device

    def drive(self, until: Callable[[], bool]) -> None:
        def look() -> bool:
            self.lines += self.store.take_lines()
            return until()

        drive(self.peers, look)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """All peers run in another thread meanwhile, so that one of them may block."""
        over = threading.Event()
        thread = threading.Thread(target=self.drive, args=(over.is_set,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def send_down(self, *devices: Peer, size: int = SIZE) -> bytes:
        """Give a blob to devices, and start to fetch it."""
        content = blob(size, seed=1)
        manifest = self.coordinator.blobs.put(content)
        for device in devices:
            device.fetch(manifest, self.coordinator)
        return content

    def send_up(self, device: Peer, size: int = SIZE) -> bytes:
        content = blob(size, seed=2)
        self.coordinator.fetch(device.blobs.put(content), device)
        return content


MakeFleet = Callable[..., Fleet]


@pytest.fixture(scope="module", params=usual_stores())
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """One server of each kind for tests that do nothing to it."""
    with store_server(request.param, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def server(running: AnyServer) -> AnyServer:
    running.prefix = secrets.token_hex(4)
    return running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    """A server that the test may kill."""
    with s3_server(tmp_path) as server:
        yield server


@pytest.fixture
def make_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFleet]:
    set_keys(monkeypatch)
    monkeypatch.setattr(object_store, "SLOW_S", WAIT_S)  # a busy machine may take long
    made: list[Fleet] = []

    def make(server: AnyServer, **config: Any) -> Fleet:
        made.append(Fleet(tmp_path, server, **config))
        return made[-1]

    yield make
    for fleet in made:
        fleet.store.close()


def hold_up(monkeypatch: pytest.MonkeyPatch, folder: str, chunks: int) -> tuple[threading.Event, list[int]]:
    """The disk of one peer takes no more than so many chunks before the event is set; and which chunks it wrote."""
    event, written, write = threading.Event(), list[int](), PartialBlob.write

    def slow(partial: PartialBlob, index: int, payload: Any) -> None:
        if f"/{folder}/" in str(partial._final):
            written.append(index)
            if len(written) > chunks:
                assert event.wait(WAIT_S)
        write(partial, index, payload)

    monkeypatch.setattr(PartialBlob, "write", slow)
    return event, written


# --- to devices ---------------------------------------------------------------------------------------


def test_blob_is_put_once_and_fetched_by_all_devices(
    make_fleet: MakeFleet, server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices' clocks are a year off."""
    fleet = make_fleet(server)
    devices = [fleet.device("one"), fleet.device("two")]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 365 * 86400)
    content = fleet.send_down(*devices)
    fleet.drive(lambda: all(device.has_ended for device in devices))
    assert all(device.got(content) for device in devices)
    assert fleet.coordinator.sent_chunks < 1, "only URLs go over MQTT"
    [name] = server.objects()
    assert name == f"{server.prefix}/run/blobs/{devices[0].finished[0][0].digest.partition(':')[2]}"
    assert fleet.lines == []


def test_small_blob_goes_over_mqtt(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server, min_bytes=SIZE + 1)
    device = fleet.device()
    content, up = fleet.send_down(device), fleet.send_up(device)
    fleet.drive(lambda: device.has_ended and fleet.coordinator.has_ended)
    assert device.got(content)
    assert fleet.coordinator.got(up)
    assert server.objects() == []


def test_device_of_an_older_version_gets_chunks(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    device.exchange.store_origin = ""  # it does not know the field of the welcome
    content, up = fleet.send_down(device), fleet.send_up(device)
    fleet.drive(lambda: device.has_ended and fleet.coordinator.has_ended)
    assert device.got(content)
    assert fleet.coordinator.got(up)
    assert device.urls == []


def test_download_continues_where_the_store_was_killed(
    make_fleet: MakeFleet, own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob is too large for MQTT, so the device waits for the store, which says so once."""
    fleet = make_fleet(own_server, fallback_bytes=0)
    monkeypatch.setattr(store_access, "RETRY_S", 0.1)
    device = fleet.device()
    event, written = hold_up(monkeypatch, "device", 5)
    content = fleet.send_down(device, size=30_000_000)
    with fleet.driven():
        wait_until(lambda: len(written) > 5)
        own_server.kill()
        event.set()
        wait_until(lambda: bool(fleet.lines))
        assert "larger ones wait for it" in fleet.lines[0]
        assert not device.has_ended
        own_server.start()
        wait_until(lambda: device.has_ended)
    assert device.got(content)
    assert sorted(written) == list(range(device.finished[0][0].chunks)), "no chunk came twice"
    assert fleet.coordinator.sent_chunks < 1
    assert len(fleet.lines) == 2
    assert "can be used again" in fleet.lines[1]


def test_expired_url_is_renewed(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server, url_valid_s=1)
    device = fleet.device()

    def expire(message: AnyMessage) -> AnyMessage:
        """The first URL comes late."""
        if isinstance(message, BlobUrl) and not device.urls:
            wait_until(lambda: status_of(message.url) != 200, pause_s=0.1)
            fleet.store._valid = timedelta(hours=1)
        return message

    device.change = expire
    content = fleet.send_down(device)
    fleet.drive(lambda: device.has_ended)
    assert device.got(content)
    assert len(device.urls) == 2
    assert fleet.coordinator.sent_chunks < 1


def test_device_without_a_route_gets_chunks(make_fleet: MakeFleet, server: AnyServer) -> None:
    """Others use the store; it is not said to be in trouble. Blobs of any size come by chunks then."""
    fleet = make_fleet(server, fallback_bytes=0)
    device = fleet.without_route()
    content, up = fleet.send_down(device), fleet.send_up(device)
    fleet.drive(lambda: device.has_ended and fleet.coordinator.has_ended)
    assert device.got(content)
    assert fleet.coordinator.got(up)
    assert fleet.coordinator.sent_chunks > 20
    assert fleet.lines == []


def test_url_of_another_host_is_refused(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    device.exchange.store_origin = "http://store.example:9000"
    content = fleet.send_down(device)
    fleet.drive(lambda: device.has_ended)
    assert device.got(content)
    assert device.refused == ["coordinator names a URL of another host than http://store.example:9000"]


def test_url_opens_one_object_for_reading(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    fleet.send_down(device)
    fleet.drive(lambda: device.has_ended)
    url = device.urls[0]
    [name] = server.objects()
    server.write(f"{name}2", b"of another device")
    parts = urlsplit(url)
    assert status_of(url) == 200
    assert status_of(parts._replace(path=f"{parts.path}2").geturl()) == 403
    assert status_of(url, "PUT", b"other bytes") == 403
    assert status_of(url, "DELETE") == 403


def test_damaged_object_is_not_accepted(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    one, two = fleet.device("one"), fleet.device("two")
    content = fleet.send_down(one)
    fleet.drive(lambda: one.has_ended)
    [name] = server.objects()
    server.write(name, bytes(SIZE))
    fleet.send_down(two)
    fleet.drive(lambda: two.has_ended)
    assert two.got(content), "its chunks came over MQTT"


# --- from devices -------------------------------------------------------------------------------------


def test_upload_goes_through_the_store_in_pieces(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    content = fleet.send_up(device)
    fleet.drive(lambda: fleet.coordinator.has_ended)
    assert fleet.coordinator.got(content)
    assert device.sent_chunks < 1
    fleet.store.close()
    pieces = [name for name in server.objects() if "probe" not in name]  # a slow answer makes the coordinator look
    assert pieces == [], "pieces are removed when they have been read"


def test_upload_continues_where_the_store_was_killed(
    make_fleet: MakeFleet, own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(own_server, fallback_bytes=0)
    monkeypatch.setattr(store_access, "RETRY_S", 0.1)
    device = fleet.device()
    event, written = hold_up(monkeypatch, "coordinator", 5)
    # several pieces: some are still to be read when the store is killed, however fast it was
    content = fleet.send_up(device, size=100 * CHUNK_BYTES)
    with fleet.driven():
        wait_until(lambda: len(written) > 5)
        own_server.kill()
        event.set()
        wait_until(lambda: bool(fleet.lines))
        own_server.start()
        wait_until(lambda: fleet.coordinator.has_ended)
    assert fleet.coordinator.got(content)
    assert device.sent_chunks < 1
    assert sorted(written) == list(range(fleet.coordinator.finished[0][0].chunks)), "no chunk was read twice"


def test_piece_of_a_wrong_size_is_not_read(make_fleet: MakeFleet, server: AnyServer) -> None:
    """The device puts more than it was asked for. Its blob comes by chunks, and what it put is removed."""
    fleet = make_fleet(server)
    device = fleet.device()

    def too_much(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, BlobNack) and message.put:
            assert status_of(message.put.url, "PUT", bytes(SIZE)) in (200, 201)
            piece = message.put
            device._send("coordinator", BlobPut(message.digest, piece.first, piece.count, stored=True))
            return None
        return message

    device.change = too_much
    content = fleet.send_up(device)
    fleet.drive(lambda: fleet.coordinator.has_ended)
    assert fleet.coordinator.got(content)
    assert fleet.lines == []
    fleet.store.close()
    assert [Path(name).name for name in server.objects()] == ["probe"]


def test_pieces_that_were_not_asked_for_are_ignored(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    content = fleet.send_up(device)
    [digest] = [digest for digest, _ in fleet.coordinator.exchange._receiver.transfers]
    for first, count in ((0, 0), (0, 2_000_000), (7, 1)):
        fleet.coordinator.exchange.on_put("device", BlobPut(digest, first, count, stored=True))
        fleet.coordinator.exchange.on_put("mallory", BlobPut(digest, first, count, stored=True))
    fleet.drive(lambda: fleet.coordinator.has_ended)
    assert fleet.coordinator.got(content)


# --- stores of other makers ---------------------------------------------------------------------------


def google_key(folder: Path) -> str:
    """The file of a service account, with a key of its own."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    values = {"type": "service_account", "client_email": "fleet@example", "private_key_id": "1"}
    file = folder / "google.json"
    file.write_bytes(msgspec.json.encode({**values, "private_key": key.decode()}))
    return str(file)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (BlobsConfig(url="gs://models/fleet"), "https://storage.googleapis.com/models/fleet/run/uploads/device/"),
        (
            BlobsConfig(url="gs://models/fleet", endpoint="http://nas:9000/"),
            "http://nas:9000/models/fleet/run/uploads/device/",
        ),
        (
            BlobsConfig(url="az://berlin/models/fleet"),
            "https://berlin.blob.core.windows.net/models/fleet/run/uploads/device/",
        ),
        (
            BlobsConfig(url="az://berlin/models", endpoint="http://nas:9000"),
            "http://nas:9000/berlin/models/run/uploads/device/",
        ),
    ],
)
def test_urls_are_signed_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: BlobsConfig, start: str
) -> None:
    """Of an upload, at the host that the devices were told."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", google_key(tmp_path))
    store = ObjectStore(config, "run", BlobStore(tmp_path))
    url = store.upload_url("device", Manifest("blake3:" + "0" * 64, SIZE, CHUNK_BYTES), 0)
    assert store.take_lines() == []
    assert url is not None
    assert url.startswith(start)
    assert "sig" in urlsplit(url).query.lower()
    assert is_at(url, config.origin)


@pytest.mark.parametrize(
    ("url", "keys", "reason"),
    [
        ("gs://models", {"GOOGLE_SERVICE_ACCOUNT": "/no/file"}, "Unable to open service account file from /no/file"),
        ("az://berlin/models", {"AZURE_STORAGE_ACCOUNT_KEY": "###"}, "Invalid Access Key"),
    ],
)
def test_key_that_cannot_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, keys: dict[str, str], reason: str
) -> None:
    set_keys(monkeypatch, **keys)
    store = ObjectStore(BlobsConfig(url=url), "run", BlobStore(tmp_path))
    assert store.upload_url("device", Manifest("blake3:" + "0" * 64, SIZE, CHUNK_BYTES), 0) is None
    [line] = store.take_lines()
    assert line.startswith(f"object store {url} cannot be used: ")
    assert reason in line


# --- a store that cannot be used ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "config", "keys", "reason"),
    [
        ((), {}, {"AWS_ACCESS_KEY_ID": "another-access-key"}, "InvalidAccessKeyId: The Access Key Id you provided"),
        ((), {}, {"AWS_SECRET_ACCESS_KEY": "another-secret-key"}, "SignatureDoesNotMatch: The request signature"),
        ((), {"url": "s3://no-such-bucket/x"}, {}, "NoSuchBucket: The specified bucket does not exist"),
        (("--read-only",), {}, {}, "InternalError: Internal Error"),
    ],
    ids=["access key", "secret key", "bucket", "read-only"],
)
def test_store_that_refuses_is_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    config: dict[str, str],
    keys: dict[str, str],
    reason: str,
) -> None:
    set_keys(monkeypatch, **keys)
    monkeypatch.setattr(object_store, "SLOW_S", WAIT_S)
    with s3_server(tmp_path, *flags) as server:
        fleet = Fleet(tmp_path, server, **config)
        device = fleet.device()
        content, up = fleet.send_down(device), fleet.send_up(device)
        fleet.drive(lambda: device.has_ended and fleet.coordinator.has_ended)
        fleet.store.close()
    assert device.got(content)
    assert fleet.coordinator.got(up)
    [line] = [*fleet.lines, *fleet.store.take_lines()]
    where = config.get("url", "s3://models/fleet")
    assert line.startswith(f"object store {where} cannot be used: ")
    assert reason in line
    assert line.endswith("; blobs up to 67.1 MB go over MQTT, larger ones wait for it")


def test_store_that_does_not_answer_is_not_waited_for(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "SLOW_S", 0.2)
    monkeypatch.setattr(blob_receiver, "STALL_S", 0.3)

    class Silent(S3Server):
        def __init__(self, port: int) -> None:
            self.endpoint = f"http://127.0.0.1:{port}"
            self.prefix = "fleet"

    with socket.create_server(("127.0.0.1", 0)) as listening:  # it accepts, and says nothing
        fleet = make_fleet(Silent(listening.getsockname()[1]))
        device = fleet.device()
        content = fleet.send_down(device)
        fleet.drive(lambda: device.has_ended)
    assert device.got(content)


def test_peers_that_wait_for_the_store_are_known(make_fleet: MakeFleet, own_server: S3Server) -> None:
    """Their deadlines do not run meanwhile."""
    own_server.kill()
    fleet = make_fleet(own_server, fallback_bytes=0)
    device = fleet.device()
    fleet.send_down(device)
    digest = next(digest for digest, _ in device.exchange._receiver.transfers)
    fleet.drive(lambda: bool(fleet.lines))
    assert "no answer from it" in fleet.lines[0]
    assert fleet.coordinator.exchange.is_awaited(digest)
    assert not device.has_ended


def test_objects_that_are_not_needed_are_removed(make_fleet: MakeFleet, server: AnyServer) -> None:
    fleet = make_fleet(server)
    device = fleet.device()
    fleet.send_down(device)
    fleet.drive(lambda: device.has_ended)
    digest = device.finished[0][0].digest
    fleet.store.prune({digest})
    fleet.store.close()
    assert len(server.objects()) == 1
    fleet.store.prune(set())
    fleet.store.close()
    assert server.objects() == []


def test_ack_ends_an_upload(make_fleet: MakeFleet, server: AnyServer) -> None:
    """What the coordinator has from elsewhere needs no further piece."""
    fleet = make_fleet(server)
    device = fleet.device()
    device.exchange._url_sender.putting.add("blake3:x")
    device.exchange.on_ack("coordinator", BlobAck("blake3:x"))
    assert not device.exchange._url_sender.putting
