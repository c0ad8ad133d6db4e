"""What virtual devices share: a blob is there as long as one of them keeps it, and comes once for all."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from fedvit.blobs import BlobStore
from fedvit.transport.base import Received
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import BlobNack, Manifest, TransferMessage
from fedvit.wire.transfer import CHUNK_BYTES
from fleet.shared import Fetches, SharedBlobs, SharingExchange

CONTENT = bytes(range(256)) * 2000  # 5 chunks


class TestSharedBlobs:
    def test_a_blob_goes_with_the_last_that_keeps_it(self, tmp_path: Path) -> None:
        shared = SharedBlobs(tmp_path)
        first, second = shared.view(), shared.view()
        digest = first.put(b"of both").digest
        first.prune({digest})
        second.prune({digest})
        assert first.prune(set()) == 0
        assert second.has(digest)
        assert second.prune(set()) == len(b"of both")
        assert not first.has(digest)

    def test_blob_is_kept_from_put_until_keep_only(self, tmp_path: Path) -> None:
        """Two devices make equal results; one has settled its own while the other has not sent it yet."""
        shared = SharedBlobs(tmp_path)
        first, second = shared.view(), shared.view()
        digest = first.put(b"equal").digest
        assert second.put(b"equal").digest == digest
        first.prune(set())
        assert second.get(digest) == b"equal"

    def test_a_device_keeps_what_came_to_it_and_not_what_came_to_another(self, tmp_path: Path) -> None:
        """What a device counts as received must not depend on devices that share its folder."""
        shared = SharedBlobs(tmp_path)
        first, second = shared.view(), shared.view()
        digest = first.put(CONTENT).digest
        assert first.keeps(digest)
        assert second.has(digest)
        assert not second.keeps(digest)
        second.put(CONTENT)
        assert second.keeps(digest)

    def test_what_an_earlier_process_left_stays_until_all_have_spoken(self, tmp_path: Path) -> None:
        """A result that was not acknowledged is still here, and so is the backbone; the rest goes."""
        before = BlobStore(tmp_path)
        wanted, unwanted = before.put(b"unsent result").digest, before.put(b"of an earlier round").digest
        (tmp_path / "ab").mkdir(exist_ok=True)
        (tmp_path / "ab" / "half.1.2.part").write_bytes(b"half")
        shared = SharedBlobs(tmp_path)
        first, second = shared.view(), shared.view()
        assert not list(tmp_path.glob("*/*.part"))
        assert first.keeps(wanted)
        first.prune(set())
        assert not first.keeps(wanted)
        assert second.keeps(wanted)
        assert second.has(wanted)
        assert second.has(unwanted)
        second.prune({wanted})
        assert second.has(wanted)
        assert not second.has(unwanted)


class Stage:
    """A server, and two devices of one process that fetch from it, driven by hand."""

    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.messages: list[tuple[str, TransferMessage]] = []
        self.finished: list[tuple[str, Exception | None]] = []
        self.server_blobs = BlobStore(folder / "server")
        self.inboxes: dict[str, SimpleQueue[object]] = {}
        self.exchanges: dict[str, BlobExchange] = {}
        self.connect("server", BlobExchange, self.server_blobs, lambda peer, message: None)
        self.shared, fetches = SharedBlobs(folder / "host"), Fetches()
        for name in ("a", "b"):

            def tell(peer: str, message: TransferMessage, name: str = name) -> None:
                self.messages.append((name, message))

            self.connect(name, fetches.exchange, self.shared.view(), tell)

    def connect(
        self,
        name: str,
        make: Callable[..., BlobExchange],
        blobs: BlobStore,
        tell: Callable[[str, TransferMessage], None],
    ) -> None:
        inbox: SimpleQueue[object] = SimpleQueue()
        transport = MemoryTransport(inbox, self.broker, name)
        transport.open()
        self.inboxes[name] = inbox
        self.exchanges[name] = make(
            transport, blobs, send=tell, topics=ChunkTopics(lambda digest: "chunks"), may_read=lambda peer, digest: True
        )

    def fetch(self, name: str, manifest: Manifest) -> None:
        self.exchanges[name].fetch(
            manifest, "server", "chunks", lambda manifest, error: self.finished.append((name, error))
        )

    def serve(self) -> None:
        """Deliver the devices' messages to the server, and its chunks to them."""
        for name, message in self.messages:
            if isinstance(message, BlobNack):
                self.exchanges["server"].on_nack(name, message)
            else:
                self.exchanges["server"].on_done(name, message)
        self.messages.clear()
        for name in ("a", "b"):
            while not self.inboxes[name].empty():
                if isinstance(event := self.inboxes[name].get(), Received):
                    self.exchanges[name].heard(event.topic, event.payload)
            self.exchanges[name].tick()

    def ask_rows(self) -> list[str]:
        return [name for name, message in self.messages if isinstance(message, BlobNack)]


class TestFetches:
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Stage:
        return Stage(tmp_path)

    def test_one_fetches_and_all_have_it(self, stage: Stage) -> None:
        manifest = stage.server_blobs.put(CONTENT)
        stage.fetch("a", manifest)
        stage.fetch("b", manifest)
        assert stage.ask_rows() == ["a"]
        assert not stage.finished
        stage.serve()
        assert sorted(stage.finished) == [("a", None), ("b", None)]
        assert stage.shared.view().get(manifest.digest) == CONTENT
        assert stage.exchanges["server"]._receiver._transport.sent_bytes < len(CONTENT) + 5 * CHUNK_BYTES // 100

    def test_another_takes_over_from_one_that_gives_up(self, stage: Stage) -> None:
        manifest = stage.server_blobs.put(CONTENT)
        stage.fetch("a", manifest)
        stage.fetch("b", manifest)
        stage.exchanges["a"].cancel()
        assert stage.ask_rows() == ["a", "b"]
        stage.serve()
        assert stage.finished == [("b", None)]

    def test_one_that_waited_and_gave_up_is_left_alone(self, stage: Stage) -> None:
        manifest = stage.server_blobs.put(CONTENT)
        stage.fetch("a", manifest)
        stage.fetch("b", manifest)
        stage.exchanges["b"].cancel("server")
        stage.serve()
        assert stage.finished == [("a", None)]
        for name in ("a", "b"):
            exchange = stage.exchanges[name]
            assert isinstance(exchange, SharingExchange)
            assert not exchange._fetches.waiting
