"""What comes from outside is bounded and checked before anything is made of it, and no code comes with it."""

import ast
import contextlib
import dataclasses
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from bench.fuzz.graphs import FORMS, fuzz_graphs, is_hostile, readings
from bench.fuzz.memory import fuzz_in_memory
from bench.fuzz.mutations import Mutator
from bench.fuzz.seeds import PROFILE, USE, from_coordinator, from_device
from export.bundle.measure import open_session as open_bundle_session
from fedvit.blobs import BlobStore, digest_of
from fedvit.engine import open_session
from fedvit.errors import BadPayload, FedvitError
from fedvit.onnx_file import check_self_contained
from fedvit.program import decode_program
from fedvit.protobuf import bytes_field, number_field
from fedvit.tensors import map_tensors, unpack
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
from fedvit.wire.transfer import Chunk, decode_chunk

ROOT = Path(__file__).parents[2]
DIGEST = "blake3:" + "ab" * 32
MANIFEST = Manifest(DIGEST, 300_000, 126_976)
TASK = Task("i", 1, "run", 1, "train", 0, DIGEST, {"model": DIGEST}, (MANIFEST,), 60.0)


# --- everything at once -------------------------------------------------------------------------------


def test_both_programs_bear_damaged_messages(graph_cache: Path) -> None:
    """No exception leaves a thread, nothing hangs or grows, and an honest round is done afterwards."""
    report = fuzz_in_memory(3000, 5, lambda line: None, cache=graph_cache)
    assert report.findings == []
    assert report.messages >= 2900  # but those that a device would have to obey
    device, coordinator = report.parts[1:]
    for part in (device, coordinator):  # the damage is of both kinds: some is seen at once, some gets to the handlers
        assert sum(count.accepted for count in part.counts.values()) > part.sent // 20
        assert sum(count.refused for count in part.counts.values()) > part.sent // 4
    assert {"train", "message", "hello"} <= coordinator.refusals.keys()


def test_no_graph_is_accepted_that_names_a_file_to_protobuf() -> None:
    """Hostile graphs in every form that a reader of protobuf may take for something else."""
    report = fuzz_graphs(1500, 3, lambda line: None)
    assert report.findings == []
    [graphs] = report.parts
    for form in FORMS:  # in each of them there is something to be found
        assert graphs.counts[f"{form}: hostile"].refused > 0
        assert graphs.counts[f"{form}: hostile"].accepted == 0
    assert sum(count.accepted for count in graphs.counts.values()) > 100


def test_the_fuzzer_of_graphs_knows_a_hidden_file_when_it_sees_one() -> None:
    """A reader drops the bit that hides it, and what both readers see of an honest graph is harmless."""
    assert any(is_hostile(read) for read in readings(disguised("beside.bin")))
    honest = readings(model(None))
    assert len(honest) == 2
    assert not any(is_hostile(read) for read in honest)


def test_the_fuzzer_has_a_seed_of_every_message() -> None:
    spoken = [*from_device("i", ("a",), TASK, MANIFEST), *from_coordinator("i", TASK, DIGEST)]
    kinds = {kind.__name__ for kind in AnyMessage.__args__}
    assert {type(message).__name__ for message in spoken} == kinds


def test_the_same_seed_gives_the_same_damage() -> None:
    raw, other = encode(TASK), encode(BlobNack(DIGEST, ((0, 1),)))
    first, second = Mutator(3), Mutator(3)
    assert [first.message(raw, other) for _ in range(200)] == [second.message(raw, other) for _ in range(200)]


@given(st.binary(max_size=300), st.integers(0, 2**32))
def test_decoders_raise_nothing_but_their_own_errors(noise: bytes, seed: int) -> None:
    damaged = Mutator(seed).message(encode(TASK), b"\x01\xc0")[1]
    for raw in (noise, b"\x01" + noise, damaged):
        for read in (decode, decode_chunk, decode_program, unpack):
            with contextlib.suppress(FedvitError):
                read(raw)


# --- claims -------------------------------------------------------------------------------------------


def as_sent(message: AnyMessage) -> bytes:
    """As a peer writes it that checks nothing."""
    return b"\x01" + msgspec.msgpack.encode(message)


def changed(message: AnyMessage, **values: object) -> bytes:
    return as_sent(msgspec.structs.replace(message, **values))


HELLO = Hello("i", "0.1", PROFILE, ("a", "b"), 10, 5)
RESULT = Result("run", 1, "train", 10, {"loss": 0.5}, USE, MANIFEST)


@pytest.mark.parametrize(
    "raw",
    {
        "a name of 1 MB": changed(HELLO, instance="x" * 60_000),
        "a host whose name fills a message": changed(
            HELLO, profile=msgspec.structs.replace(PROFILE, host="x" * 60_000)
        ),
        "a class whose name fills a message": changed(HELLO, classes=("\0" * 60_000,)),
        "no core": changed(HELLO, profile=msgspec.structs.replace(PROFILE, cores=0)),
        "an infinite time": changed(RESULT, use=msgspec.structs.replace(USE, train_s=float("inf"))),
        "a time that is no number": changed(RESULT, use=msgspec.structs.replace(USE, train_s=float("nan"))),
        "a negative memory": changed(RESULT, use=msgspec.structs.replace(USE, peak_rss_bytes=-1)),
        "more labels than a device may have": changed(HELLO, labels={f"l{number}": "x" for number in range(17)}),
        "a label whose text fills a message": changed(HELLO, labels={"site": "x" * 60_000}),
        "a program's name of 60 kB": changed(RESULT, program="x" * 60_000),
        "no time between two messages of progress": changed(TASK, progress_s=0.0),
        "thousands of metrics": changed(RESULT, metrics={f"m{number}": 1.0 for number in range(2000)}),
        "a deadline that never comes": changed(TASK, deadline_s=float("nan")),
        "too long": as_sent(HELLO) + bytes(MAX_MESSAGE_BYTES),
    }.items(),
    ids=lambda item: item[0],
)
def test_nonsense_is_refused_with_the_message(raw: tuple[str, bytes]) -> None:
    with pytest.raises(BadPayload):
        decode(raw[1])


@pytest.mark.parametrize(("size", "chunk"), [(2**62, 1024), (2**40, 1024), (MAX_BLOB_CHUNKS * 1024 + 1, 1024)])
def test_no_claim_allocates(size: int, chunk: int) -> None:
    """A receiver keeps a byte for each chunk of what is announced."""
    raw = as_sent(RESULT).replace(msgspec.msgpack.encode(MANIFEST), msgspec.msgpack.encode([DIGEST, size, chunk]))
    with pytest.raises(BadPayload, match="chunks"):
        decode(raw)


@pytest.mark.parametrize("chunk", [2**20 + 1, 2**32, 2**63])
def test_no_chunk_is_larger_than_a_message(chunk: int) -> None:
    """Blobs under construction note the size of a chunk in 32 bits."""
    raw = as_sent(RESULT).replace(msgspec.msgpack.encode(MANIFEST), msgspec.msgpack.encode([DIGEST, 2**40, chunk]))
    with pytest.raises(BadPayload, match="1048576"):
        decode(raw)


def test_chunks_are_asked_for_once() -> None:
    """20,000 ranges over all chunks of a large blob would be a minute's work for a message of 60 kB."""
    outgoing = Outgoing(Manifest(DIGEST, 10**9, 1024))
    everything = (0, outgoing.manifest.chunks)
    with pytest.raises(BadPayload, match="after those up to"):
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
        transport, BlobStore(tmp_path), send=lambda *_: None, topic_for=str, may_read=lambda *_: False
    )
    mutator = Mutator(1)
    valid = Chunk(DIGEST, 0, 3, 300_000, 1, bytes(100)).encode()
    for _ in range(500):
        exchange.heard(topic_of("anybody"), mutator.chunk(valid, valid)[1])
    assert list(tmp_path.iterdir()) == []


def test_chunks_on_the_topic_of_another_device_are_dropped(tmp_path: Path) -> None:
    """A broker guards topics, not what is said on them: chunks count for the one whose topic they come on."""
    transport = MemoryTransport(SimpleQueue(), MemoryBroker(), "x")
    exchange = BlobExchange(
        transport, BlobStore(tmp_path), send=lambda *_: None, topic_for=str, may_read=lambda *_: False
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


def model(location: str | None, *, where: str = "graph") -> bytes:
    """y = x + w, with w in another file, if one is named: as an initializer, or inside of a node."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    if location is None:
        tensor.raw_data = np.arange(4, dtype=np.float32).tobytes()
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    if where == "node":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [tensor] if where == "graph" else [])
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


@pytest.mark.parametrize("where", ["graph", "node"])
@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "beside.bin"])
def test_a_graph_that_reads_another_file_is_refused(where: str, location: str, tmp_path: Path) -> None:
    (tmp_path / "beside.bin").write_bytes(bytes(16))
    (tmp_path / "graph.onnx").write_bytes(model(location, where=where))
    with pytest.raises(BadPayload, match="a tensor lies in another file"):
        open_session(tmp_path / "graph.onnx", 1)


def disguised(location: str) -> bytes:
    """The graph above, with bit 32 set in the tags of the fields that name the file.

    onnxruntime's reader of protobuf drops that bit; read as a number it makes another field of them.
    """
    bare = onnx.ModelProto.FromString(model(location))
    [tensor] = bare.graph.initializer
    entries = [bytes_field(13 | 1 << 29, entry.SerializeToString()) for entry in tensor.external_data]
    for name in ("external_data", "data_location"):
        tensor.ClearField(name)
    weight = tensor.SerializeToString() + b"".join(entries) + number_field(14 | 1 << 29, TensorProto.EXTERNAL)
    del bare.graph.initializer[:]
    graph = bare.graph.SerializeToString() + bytes_field(5, weight)
    bare.ClearField("graph")
    whole: bytes = bare.SerializeToString() + bytes_field(7, graph)
    return whole


def test_a_graph_that_hides_another_file_from_the_check_is_refused(tmp_path: Path) -> None:
    """The engine would read it: without the check it does."""
    (tmp_path / "beside.bin").write_bytes(np.float32([1, 2, 3, 4]).tobytes())
    graph = tmp_path / "graph.onnx"
    graph.write_bytes(disguised("beside.bin"))
    [y] = onnxruntime.InferenceSession(str(graph)).run(None, {"x": np.ones(4, np.float32)})
    assert y.tolist() == [2, 3, 4, 5]
    with pytest.raises(BadPayload, match="a field has number 536870925"):
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
    graph.write_bytes(model(str(secret) if location == "absolute" else location))
    monkeypatch.chdir(home)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with pytest.raises(Exception, match="External data path validation failed"):
        onnxruntime.InferenceSession(str(graph) if given == "path" else graph.read_bytes(), options)


@pytest.mark.parametrize("raw", [model("beside.bin"), disguised("beside.bin")], ids=["plain", "disguised"])
def test_a_bundle_that_reads_another_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    """Both what a bundle is made of, a run's graph, and its files, which `predict --bundle` opens."""
    (tmp_path / "model.onnx").write_bytes(raw)
    for source in (raw, tmp_path / "model.onnx"):
        with pytest.raises(BadPayload, match="is refused"):
            open_bundle_session(source, 1)


@pytest.mark.parametrize("where", ["graph", "node"])
def test_a_graph_with_its_weights_inside_is_opened(where: str, tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(model(None, where=where))
    [y] = open_session(tmp_path / "graph.onnx", 1).run(None, {"x": np.ones(4, np.float32)})
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("raw", [b"", b"\x0b", b"ORTM" * 20, b"\xff" * 40, b"\x3a\xff\xff\xff\x0f"])
def test_what_is_no_onnx_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(raw)
    with pytest.raises(BadPayload):
        check_self_contained(tmp_path / "graph.onnx")


# --- no code from outside -----------------------------------------------------------------------------

PACKAGES = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet", "bench")
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {("pickle", name) for name in ("load", "loads", "_load", "_loads", "_Unpickler")}
FORBIDDEN_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("torch", "load"), *LOADERS}
OWN_PIPES = {"coordinator/compute/rank.py", "coordinator/compute/ranks.py"}
"""The worker process sends work to the processes that it started itself, over pipes that nobody else has."""
KNOW_PICKLES = {"fleet/datasets/pickles.py", "bench/wire_side.py", *OWN_PIPES}
"""CIFAR comes as pickles; an unpickler that makes nothing but arrays reads them. The benchmark writes some."""

LOADS_KERNELS = "fedvit/engine.py"
"""The library of the optional package that the device's owner installed; graphs that ask for it are refused."""


def offences(name: str, source: str) -> Iterator[str]:
    """Calls and imports that could run what came from outside."""
    for node in ast.walk(ast.parse(source, name)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield f"{where} calls {node.func.id}"
            for keyword in node.keywords:
                given = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, given) in (("shell", True), ("allow_pickle", True), ("trust_remote_code", True)):
                    yield f"{where} passes {keyword.arg}=True"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES - (LOADERS if name in OWN_PIPES else set()):
                yield f"{where} uses {node.value.id}.{node.attr}"
            if node.attr == "register_custom_ops_library" and name != LOADS_KERNELS:
                yield f"{where} loads a library of operators"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if name not in KNOW_PICKLES:
                yield from (f"{where} imports {one}" for one in names if one.partition(".")[0] in FORBIDDEN_MODULES)


def test_the_walk_finds_what_it_looks_for() -> None:
    source = (
        "import pickle\nfrom dill import x\neval('1')\nos.system('ls')\nrun('x', shell=True)\nf(a, allow_pickle=True)\n"
        "pickle.loads(a)\noptions.register_custom_ops_library(a)"
    )
    assert len(list(offences("x.py", source))) == 8
    assert list(offences("x.py", "# pickle, eval(\nmodel.eval()\nsession.exec(query)\nre.compile('x')")) == []


def test_nothing_in_the_tree_runs_what_came_from_outside() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 150
    found = [text for file in files for text in offences(str(file.relative_to(ROOT)), file.read_text())]
    assert found == []


def test_nothing_in_the_wheel_does_either(tmp_path: Path) -> None:
    """The wheel as it is built: its Python is that of the tree, and whatever else is in it is data."""
    command = [
        sys.executable,
        "-c",
        "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    built = subprocess.run(
        [*command, str(tmp_path)], cwd=source, check=True, capture_output=True, text=True, timeout=120
    )
    assert "absent from the `packages` configuration" not in built.stdout + built.stderr
    [file] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        found = [text for name in names if name.endswith(".py") for text in offences(name, wheel.read(name).decode())]
    assert found == []
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds <= {".py", ".toml", ".json", ".html", ".css", ".onnx"}
    assert not [name for name in names if name.startswith(("tests", "deploy"))]
    instruments = {"bench", "chaos", "fuzz", "pentest"}
    assert not [name for name in names if instruments & set(Path(name).with_suffix("").parts)]
