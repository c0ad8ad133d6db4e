"""Input from outside is bounded and checked before anything is made of it."""

import dataclasses
from pathlib import Path
from queue import SimpleQueue
from random import Random

import msgspec
import numpy as np
import onnxruntime
import pytest

from export.bundle.measure import open_session as open_bundle_session
from fedvit.blobs import BlobStore, digest_of
from fedvit.engine import open_session
from fedvit.errors import BadPayload
from fedvit.onnx_file import check_self_contained
from fedvit.tensors import map_tensors, unpack
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import (
    MAX_BLOB_CHUNKS,
    MAX_MESSAGE_BYTES,
    AnyMessage,
    BlobNack,
    Hello,
    Manifest,
    Refused,
    Result,
    Task,
    decode,
    encode,
)
from fedvit.wire.outgoing import Outgoing
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import Chunk
from tests.support.codes import has_code
from tests.support.corpus import PROFILE, USE
from tests.support.disguised_graphs import disguise, make_model
from tests.support.mutations import damage_chunk

DIGEST = "blake3:" + "ab" * 32
MANIFEST = Manifest(DIGEST, 300_000, 126_976)
TASK = Task("i", 1, "run", 1, "train", 0, DIGEST, {"model": DIGEST}, (MANIFEST,), 60.0)


# --- claims -------------------------------------------------------------------------------------------


def encode_unchecked(message: AnyMessage) -> bytes:
    """Encode a message as a peer that checks nothing."""
    return b"\x01" + msgspec.msgpack.encode(message)


def encode_change(message: AnyMessage, **values: object) -> bytes:
    return encode_unchecked(msgspec.structs.replace(message, **values))


HELLO = Hello("i", "0.1", PROFILE, ("a", "b"), 10, 5)
RESULT = Result("run", 1, "train", 10, {"loss": 0.5}, USE, MANIFEST)


@pytest.mark.parametrize(
    "raw",
    {
        "a name of 1 MB": encode_change(HELLO, instance="x" * 60_000),
        "a host whose name fills a message": encode_change(
            HELLO, profile=msgspec.structs.replace(PROFILE, host="x" * 60_000)
        ),
        "a class whose name fills a message": encode_change(HELLO, classes=("\0" * 60_000,)),
        "no core": encode_change(HELLO, profile=msgspec.structs.replace(PROFILE, cores=0)),
        "an infinite time": encode_change(RESULT, use=msgspec.structs.replace(USE, train_s=float("inf"))),
        "a time that is no number": encode_change(RESULT, use=msgspec.structs.replace(USE, train_s=float("nan"))),
        "a negative memory": encode_change(RESULT, use=msgspec.structs.replace(USE, peak_rss_bytes=-1)),
        "more labels than a device may have": encode_change(HELLO, labels={f"l{number}": "x" for number in range(17)}),
        "a label that begins a line of the service's output": encode_change(HELLO, labels={"site": "a\nrun r failed"}),
        "a label whose text fills a message": encode_change(HELLO, labels={"site": "x" * 60_000}),
        "a program's name of 60 kB": encode_change(RESULT, program="x" * 60_000),
        "no time between two messages of progress": encode_change(TASK, progress_s=0.0),
        "thousands of metrics": encode_change(RESULT, metrics={f"m{number}": 1.0 for number in range(2000)}),
        "a deadline that never comes": encode_change(TASK, deadline_s=float("nan")),
        "too long": encode_unchecked(HELLO) + bytes(MAX_MESSAGE_BYTES),
    }.items(),
    ids=lambda item: item[0],
)
def test_nonsense_is_refused_with_the_message(raw: tuple[str, bytes]) -> None:
    with pytest.raises(BadPayload):
        decode(raw[1])


@pytest.mark.parametrize(("size", "chunk"), [(2**62, 1024), (2**40, 1024), (MAX_BLOB_CHUNKS * 1024 + 1, 1024)])
def test_no_claim_allocates(size: int, chunk: int) -> None:
    """A receiver keeps a byte for each chunk of what is announced."""
    raw = encode_unchecked(RESULT).replace(
        msgspec.msgpack.encode(MANIFEST), msgspec.msgpack.encode([DIGEST, size, chunk])
    )
    with pytest.raises(BadPayload, check=has_code("FV2301", "chunks")):
        decode(raw)


@pytest.mark.parametrize("chunk", [2**20 + 1, 2**32, 2**63])
def test_no_chunk_is_larger_than_a_message(chunk: int) -> None:
    """Blobs under construction note the size of a chunk in 32 bits."""
    raw = encode_unchecked(RESULT).replace(
        msgspec.msgpack.encode(MANIFEST), msgspec.msgpack.encode([DIGEST, 2**40, chunk])
    )
    with pytest.raises(BadPayload, check=has_code("FV2301", "1048576")):
        decode(raw)


def test_chunks_are_asked_for_once() -> None:
    """20,000 ranges over all chunks of a large blob would be a minute's work for a message of 60 kB."""
    outgoing = Outgoing(Manifest(DIGEST, 10**9, 1024))
    everything = (0, outgoing.manifest.chunks)
    with pytest.raises(BadPayload, check=has_code("FV2302", "976562")):
        outgoing.update("mallory", BlobNack(DIGEST, (everything, everything)))


def test_a_refusal_of_the_longest_names_is_still_one_message() -> None:
    longest = "\0" * 255  # four characters each when it is quoted
    reason = (
        f"a device with id {'x' * 64!r} is online already (on {longest!r}); {longest!r} is not among {[longest] * 10}"
    )
    assert len(encode(Refused("i" * 64, reason, final=True))) < MAX_MESSAGE_BYTES


def topic_of(device: str) -> str:
    return Topics("home").upload(device, DIGEST)


def test_chunks_of_nobody_are_dropped(tmp_path: Path) -> None:
    """Whatever comes on a chunk topic, nothing is written that was not asked for."""
    transport = MemoryTransport(SimpleQueue(), MemoryBroker(), "x")
    exchange = BlobExchange(
        transport, BlobStore(tmp_path), send=lambda *_: None, topics=ChunkTopics(str), may_read=lambda *_: False
    )
    valid, random = Chunk(DIGEST, 0, 3, 300_000, 1, bytes(100)).encode(), Random(1)
    for _ in range(500):
        exchange.heard(topic_of("anybody"), damage_chunk(random, valid, valid))
    assert list(tmp_path.iterdir()) == []


def test_chunks_on_the_topic_of_another_device_are_dropped(tmp_path: Path) -> None:
    """A broker guards topics, not what is said on them: chunks count for the one whose topic they come on."""
    transport = MemoryTransport(SimpleQueue(), MemoryBroker(), "x")
    exchange = BlobExchange(
        transport, BlobStore(tmp_path), send=lambda *_: None, topics=ChunkTopics(str), may_read=lambda *_: False
    )
    content = bytes(range(200))
    digest = digest_of(content)
    ended: list[Exception | None] = []
    exchange.fetch(Manifest(digest, 200, 1024), "honest", topic_of("honest"), lambda _, error: ended.append(error))
    chunk = Chunk(digest, 0, 1, 200, 1, content)
    for said in (chunk, dataclasses.replace(chunk, payload=bytes(200))):
        exchange.heard(topic_of("mallory"), said.encode())
        exchange.tick()
        assert ended == []
    exchange.heard(topic_of("honest"), chunk.encode())
    exchange.tick()
    assert ended == [None]
    assert BlobStore(tmp_path).get(digest) == content


# --- tensors and graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        b'{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"v":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[18446744073709551600,18446744073709551615]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
        b'{"w":{"dtype":"O","shape":[4],"data_offsets":[0,16]}}',
        b"[" * 5000,
    ],
)
@pytest.mark.parametrize("claimed", [None, 2**63, 10**9])
def test_tensor_files_that_lie(header: bytes, claimed: int | None, tmp_path: Path) -> None:
    raw = (claimed or len(header)).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(BadPayload):
        unpack(raw)
    with pytest.raises(BadPayload):
        map_tensors(tmp_path / "file")


@pytest.mark.parametrize("where", ["graph", "node"])
@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "beside.bin"])
def test_a_graph_that_reads_another_file_is_refused(where: str, location: str, tmp_path: Path) -> None:
    (tmp_path / "beside.bin").write_bytes(bytes(16))
    (tmp_path / "graph.onnx").write_bytes(make_model(location, where=where))
    with pytest.raises(BadPayload, check=has_code("FV2306", "graph.onnx")):
        open_session(tmp_path / "graph.onnx", 1)


def test_a_graph_that_hides_another_file_from_the_check_is_refused(tmp_path: Path) -> None:
    """The engine would read it: without the check it does."""
    (tmp_path / "beside.bin").write_bytes(np.float32([1, 2, 3, 4]).tobytes())
    graph = tmp_path / "graph.onnx"
    graph.write_bytes(disguise("beside.bin"))
    [y] = onnxruntime.InferenceSession(str(graph)).run(None, {"x": np.ones(4, np.float32)})
    assert y.tolist() == [2, 3, 4, 5]
    with pytest.raises(BadPayload, check=has_code("FV2306", "536870925")):
        open_session(graph, 1)


@pytest.mark.parametrize("given", ["path", "bytes"])
@pytest.mark.parametrize("location", ["absolute", "../secret.bin", "link.bin"])
def test_the_engine_itself_reads_no_file_outside_of_the_graphs_folder(
    location: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second wall, from onnxruntime 1.25 on: behind the check, and for what was never checked."""
    secret, home = tmp_path / "secret.bin", tmp_path / "home"
    secret.write_bytes(bytes(16))
    home.mkdir()
    (home / "link.bin").symlink_to(secret)
    graph = home / "graph.onnx"
    graph.write_bytes(make_model(str(secret) if location == "absolute" else location))
    monkeypatch.chdir(home)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with pytest.raises(Exception, match="External data path validation failed"):
        onnxruntime.InferenceSession(str(graph) if given == "path" else graph.read_bytes(), options)


@pytest.mark.parametrize("raw", [make_model("beside.bin"), disguise("beside.bin")], ids=["plain", "disguised"])
def test_a_bundle_that_reads_another_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    """Both what a bundle is made of, a run's graph, and its files, which `predict --bundle` opens."""
    (tmp_path / "model.onnx").write_bytes(raw)
    for source in (raw, tmp_path / "model.onnx"):
        with pytest.raises(BadPayload, check=has_code("FV2306")):
            open_bundle_session(source, 1)


@pytest.mark.parametrize("where", ["graph", "node"])
def test_a_graph_with_its_weights_inside_is_opened(where: str, tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(make_model(None, where=where))
    [y] = open_session(tmp_path / "graph.onnx", 1).run(None, {"x": np.ones(4, np.float32)})
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("raw", [b"", b"\x0b", b"ORTM" * 20, b"\xff" * 40, b"\x3a\xff\xff\xff\x0f"])
def test_what_is_no_onnx_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(raw)
    with pytest.raises(BadPayload):
        check_self_contained(tmp_path / "graph.onnx")
