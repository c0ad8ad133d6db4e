"""Damaged bytes at every decoder: it returns or raises its own error, and takes little time and memory."""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.rounds.validation import check_upload
from fedvit.errors import FedvitError
from fedvit.onnx_file import check_self_contained
from fedvit.program import decode_program, encode_program
from fedvit.releases import Offer, Package, ReleaseList, choose_offer, decode_list, encode_list
from fedvit.tensors import map_tensors, pack, unpack
from fedvit.wire.adoption import (
    AskAdoption,
    GrantToken,
    OfferAdoption,
    RefuseAdoption,
    RevealNumber,
    decode_adoption,
    encode_adoption,
)
from fedvit.wire.messages import AnyMessage, Manifest, Task, decode
from fedvit.wire.transfer import CHUNK_BYTES, Chunk, decode_chunk
from tests.support.corpus import list_coordinator_messages, list_device_messages
from tests.support.fuzz_scene import Scene, make_scene
from tests.support.mutations import damage_bytes, damage_chunk, damage_message, damage_structure, damage_tensors

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden" / "v1"
ADOPTION = [
    encode_adoption(message)
    for message in (
        AskAdoption(1, "pi-3", bytes(32)),
        OfferAdoption("home at server", bytes(32), bytes(32)),
        RevealNumber(bytes(32)),
        GrantToken(bytes(300)),
        RefuseAdoption("no"),
    )
]
PACKAGE = Package(
    file="a.zip", version="0.2.0", python="3.11", machine="aarch64", sha256=64 * "a", size=1000, unpacked=3000
)
RELEASES = encode_list(
    ReleaseList(channel="stable", serial=7, offers=(Offer(version="0.2.0", labels={"a": "b"}, packages=(PACKAGE,)),))
)
CPU_S = 1.0
"""Most processor time for a message; milliseconds are usual."""
MEMORY_BYTES = 16_000_000
"""Most memory at a time for a message."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> Scene:
    return make_scene(tmp_path_factory.mktemp("fuzz"), graph_cache)


class Target(NamedTuple):
    """A decoder, valid bytes for it, and the damage that they get."""

    valid: list[bytes]
    damage: Callable[[Random, bytes, bytes], bytes]
    read: Callable[[bytes], object]


def make_targets(scene: Scene) -> dict[str, Target]:
    program, file = scene.plan.first.program, scene.folder / "file"
    upload = pack({name: np.zeros(spec.shape, spec.dtype) for name, spec in program.tensors.items()})
    digest = "blake3:" + "ab" * 32
    chunks = [Chunk(digest, index, 5, 5 * CHUNK_BYTES, index + 1, bytes(99)).encode() for index in range(5)]
    graphs = [scene.blobs.get(graph.digest) for graph in program.graphs.values()]
    messages = [path.read_bytes() for path in sorted(GOLDEN.glob("*.bin"))]

    def make_file_reader(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def read_file(raw: bytes) -> object:
            file.write_bytes(raw)
            return read(file)

        return read_file

    return {
        "message": Target(messages, damage_message, decode),
        "message from noise": Target([b"\x01"], lambda random, *_: b"\x01" + random.randbytes(300), decode),
        "chunk": Target(chunks, damage_chunk, decode_chunk),
        "program": Target([encode_program(program)], damage_structure, decode_program),
        "program's bytes": Target([encode_program(program)], damage_bytes, decode_program),
        "tensors": Target([upload], damage_tensors, unpack),
        "tensors in a file": Target([upload], damage_tensors, make_file_reader(map_tensors)),
        "upload": Target(
            [upload], damage_tensors, make_file_reader(lambda path: check_upload(path, program, "upload"))
        ),
        "graph": Target(graphs, damage_bytes, make_file_reader(check_self_contained)),
        "adoption": Target(ADOPTION, damage_bytes, decode_adoption),
        "releases": Target([RELEASES], damage_bytes, lambda raw: choose_offer(decode_list(raw, "stable.json"), {})),
    }


TARGETS = (
    "message", "message from noise", "chunk", "program", "program's bytes", "tensors", "tensors in a file", "upload",
    "graph", "adoption", "releases",
)  # fmt: skip


@pytest.fixture(scope="module")
def targets(scene: Scene) -> Iterator[dict[str, Target]]:
    tracemalloc.start()
    yield make_targets(scene)
    tracemalloc.stop()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=True))
def test_decoders_raise_nothing_but_their_own_errors(targets: dict[str, Target], name: str, random: Random) -> None:
    """Whatever they get, they take little time and memory."""
    target = targets[name]
    raw = target.damage(random, random.choice(target.valid), random.choice(target.valid))
    tracemalloc.reset_peak()
    before, began_s = tracemalloc.get_traced_memory()[0], time.thread_time()
    try:
        target.read(raw)
    except FedvitError:
        pass
    finally:
        spent_s, peak = time.thread_time() - began_s, tracemalloc.get_traced_memory()[1]
    assert spent_s < CPU_S
    assert peak - before < MEMORY_BYTES


def test_corpus_has_every_message() -> None:
    manifest = Manifest("blake3:" + "ab" * 32, 300_000, 126_976)
    task = Task("i", 1, "run", 1, "train", 0, manifest.digest, {"model": manifest.digest}, (manifest,), 60.0)
    messages = [*list_device_messages("i", ("a",), task, manifest), *list_coordinator_messages("i", task, "x")]
    assert {type(message) for message in messages} == set(AnyMessage.__args__)
    assert {type(decode(path.read_bytes())) for path in GOLDEN.glob("*.bin")} == set(AnyMessage.__args__)
