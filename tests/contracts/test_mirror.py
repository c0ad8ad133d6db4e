"""The mirror of a run: what one coordinator put there, another fetches onto a disk of its own. Real stores."""

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.compute.integrity import DamagedBlob, VerifiedBlobs
from coordinator.rounds import store_access
from coordinator.rounds.object_store import ObjectStore
from coordinator.rounds.store_access import StoreAccess
from fedvit.errors import LinkDown
from fedvit.wire.messages import Manifest
from fedvit.wire.transfer import CHUNK_BYTES
from tests.support.peers import blob
from tests.support.stores import AnyServer, set_keys, store_server, usual_stores
from tests.support.waiting import WAIT_S, wait_until

SIZE = 9_000_000
"""More than is read at once."""
CONTENTS = [blob(SIZE, seed=1), blob(5000, seed=2), b"small"]


@pytest.fixture(scope="module", params=[*usual_stores(), "folder"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    with store_server(request.param, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def server(running: AnyServer) -> AnyServer:
    running.prefix = secrets.token_hex(4)
    return running


MakeHost = Callable[..., ObjectStore]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Makes the object store of a coordinator on a machine of its own."""
    set_keys(monkeypatch)
    monkeypatch.setattr(store_access, "RETRY_S", 0.1)
    made: list[ObjectStore] = []

    def make(server: AnyServer, name: str, **config: Any) -> ObjectStore:
        made.append(ObjectStore(server.config(mirror=True, **config), "run", VerifiedBlobs(tmp_path / name)))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store: ObjectStore, *contents: bytes) -> list[str]:
    """Put blobs onto a host's disk, and into the mirror."""
    digests = [store.blobs.put(content).digest for content in contents]
    store.mirror.put(digests)
    return digests


def name_of(server: AnyServer, digest: str) -> str:
    return f"{server.prefix}/run/blobs/{digest.partition(':')[2]}"


def test_blobs_are_fetched_onto_another_disk(host: MakeHost, server: AnyServer) -> None:
    leader, standby = host(server, "leader"), host(server, "standby")
    digests = put(leader, *CONTENTS)
    leader.mirror.put(digests)  # again, which costs nothing
    standby.mirror.fetch()
    assert [standby.blobs.get(digest) for digest in digests] == CONTENTS
    assert server.objects() == sorted(name_of(server, digest) for digest in digests)
    assert leader.take_lines() == standby.take_lines() == []


def test_run_that_was_not_mirrored_yet_fetches_nothing(host: MakeHost, server: AnyServer) -> None:
    store = host(server, "leader")
    store.mirror.fetch()
    assert not list(store.blobs.folder.glob("*/*"))


def test_run_that_had_no_mirror_before_gets_one(host: MakeHost, server: AnyServer) -> None:
    store = host(server, "leader")
    damaged, intact = (store.blobs.put(content).digest for content in CONTENTS[1:])
    store.blobs.path(damaged).write_bytes(bytes(5000))
    unfinished = store.blobs.path("blake3:" + "0" * 64).with_suffix(".part")
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"of an upload")
    store.mirror.put_all()
    assert server.objects() == [name_of(server, intact)]


def test_damaged_file_is_replaced_from_the_mirror(host: MakeHost, server: AnyServer) -> None:
    store = host(server, "leader")
    [digest] = put(store, CONTENTS[0])
    store.blobs.path(digest).write_bytes(bytes(SIZE))
    store.forget(digest)  # as the exchange says; the mirror keeps its copy
    store.mirror.fetch()
    assert store.blobs.get(digest) == CONTENTS[0]


def test_damaged_file_is_not_mirrored(host: MakeHost, server: AnyServer) -> None:
    store = host(server, "leader")
    digest = store.blobs.put(CONTENTS[1]).digest
    store.blobs.path(digest).write_bytes(bytes(5000))
    with pytest.raises(DamagedBlob):
        store.mirror.put([digest])
    assert server.objects() == []


def test_damaged_object_is_removed_and_put_again(host: MakeHost, server: AnyServer) -> None:
    leader, standby = host(server, "leader"), host(server, "standby")
    damaged, intact = put(leader, *CONTENTS[1:])
    server.write(name_of(server, damaged), bytes(5000))
    standby.mirror.fetch()
    assert standby.blobs.has(intact)
    assert not standby.blobs.has(damaged)
    assert server.objects() == [name_of(server, intact)]
    put(standby, CONTENTS[1])
    assert name_of(server, damaged) in server.objects()


def test_pruning_leaves_what_a_later_leader_has_put(host: MakeHost, server: AnyServer) -> None:
    former, later = host(server, "former"), host(server, "later")
    needed, _unneeded = put(former, *CONTENTS[1:])
    later.mirror.fetch()
    [new] = put(later, b"of the next round")
    former.prune({needed})
    former.close()
    assert server.objects() == sorted(name_of(server, digest) for digest in (needed, new))
    later.prune({new})  # it knows what the former leader has put
    later.close()
    assert server.objects() == [name_of(server, new)]


def test_blob_that_is_needed_again_is_put_again(
    host: MakeHost, server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being removed at that moment: the removal goes first."""
    store, goes_on, delete = host(server, "leader"), threading.Event(), StoreAccess.delete

    def late(self: StoreAccess, name: str) -> None:
        assert goes_on.wait(WAIT_S)
        delete(self, name)

    monkeypatch.setattr(StoreAccess, "delete", late)
    digests = put(store, *CONTENTS[1:])
    store.prune(set())
    monkeypatch.setattr(
        store._access.threads.closed, "wait", lambda _: goes_on.set()
    )  # when it has found that it has to try again
    store.mirror.put(digests)
    goes_on.set()
    store.close()
    assert server.objects() == sorted(name_of(server, digest) for digest in digests)


def test_results_are_mirrored_as_files(host: MakeHost, server: AnyServer, tmp_path: Path) -> None:
    store, folder = host(server, "leader"), tmp_path / "run"
    (folder / "generated").mkdir(parents=True)
    for name in ("model.safetensors", "generated/device-0.safetensors"):
        (folder / name).write_bytes(name.encode())
    store.mirror.put_files(folder, ["model.safetensors", "generated/device-0.safetensors"])
    results = [
        f"{server.prefix}/run/results/{name}" for name in ("generated/device-0.safetensors", "model.safetensors")
    ]
    assert server.objects() == results


# --- a store that cannot be used ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_run_waits_for_its_mirror(host: MakeHost, tmp_path: Path, kind: str) -> None:
    with store_server(kind, tmp_path / "store") as server:
        store = host(server, "leader")
        server.kill()
        digest = store.blobs.put(CONTENTS[1]).digest
        waiting = threading.Thread(target=store.mirror.put, args=([digest],))
        waiting.start()
        lines: list[str] = []
        wait_until(lambda: lines, meanwhile=lambda: lines.extend(store.take_lines()))
        assert waiting.is_alive()
        assert lines[0].startswith(f"object store {store._config.url} cannot be used: ")
        assert lines[0].endswith("; the run waits for it")
        server.start()
        server.config()
        waiting.join()
        assert server.objects() == [name_of(server, digest)]
        assert store.take_lines() == [f"object store {store._config.url} can be used again"]


def test_end_of_the_run_ends_the_wait(host: MakeHost, tmp_path: Path) -> None:
    with store_server("s3", tmp_path / "store") as server:
        server.kill()
        store = host(server, "leader")
        digest = store.blobs.put(b"blob").digest
        raised: list[Exception] = []

        def mirror() -> None:
            try:
                store.mirror.put([digest])
            except LinkDown as error:
                raised.append(error)

        waiting = threading.Thread(target=mirror)
        waiting.start()
        wait_until(store.take_lines)
        store.close()
        waiting.join()
        assert str(store._config.url) in str(raised[0])


def test_devices_get_no_urls_of_a_folder(host: MakeHost, tmp_path: Path) -> None:
    with store_server("folder", tmp_path) as server:
        store = host(server, "leader", min_bytes=1)
        assert store._config.origin == ""
        assert not store.takes(Manifest("blake3:" + "0" * 64, SIZE, CHUNK_BYTES))
