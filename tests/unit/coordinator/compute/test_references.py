"""References and their links: devices get to the very same bytes by any way, and the state is not lost on the way."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.compute.references import references, snapshot
from coordinator.config import UpdatesConfig
from coordinator.record.tables import Reference
from edge_client.storage.delta_chains import delta_chains, make_blob
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.tensors import Tensors, pack, unpack
from fedvit.wire.messages import MAX_CHAIN_STEPS, DeltaStep, Manifest, Task, encode
from tests.support.codes import has_code

WAYS = [
    UpdatesConfig(down="int8"),
    UpdatesConfig(down="fp16"),
    UpdatesConfig(down="top_k:share=0.1"),
    UpdatesConfig(down_whole="int8"),
    UpdatesConfig(down_whole="fp16"),
    UpdatesConfig(down="top_k:share=0.05", down_whole="fp16"),
    UpdatesConfig(down="int8", down_whole="fp16"),
]
each_way = pytest.mark.parametrize("updates", WAYS, ids=lambda updates: f"{updates.down}-{updates.down_whole}")


def states(count: int) -> list[Tensors]:
    """A model that moves a little in every round."""
    rng = np.random.default_rng(0)
    model = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": rng.normal(size=64).astype(np.float32)}
    updated = []
    for _ in range(count):
        updated.append(model)
        model = {name: value + rng.normal(0, 1e-3, value.shape).astype(np.float32) for name, value in model.items()}
    return updated


def run(updates: UpdatesConfig, blobs: BlobStore, count: int) -> list[Reference]:
    found: list[Reference] = []
    for state in states(count):
        before = {"model": found[-1]} if found else {}
        found.append(references({"model": state}, before, updates, blobs)["model"])
    return found


def hand_over(reference: Reference, server: BlobStore, device: BlobStore) -> int:
    """What a device fetches to have the reference; it is then in its store."""
    recipes, target = reference.delta_chain(server), server.manifest(reference.digest)
    found = delta_chains([target.digest], recipes, {target.digest: target}, device.has)
    fetched = 0
    if not found and not device.has(target.digest):
        device.put(server.get(target.digest))
        return target.size
    for chain in found:
        for delta_step in chain.steps:
            device.put(server.get(delta_step.patch.digest))
            fetched += delta_step.patch.size
        make_blob(chain, device)
    return fetched


@each_way
def test_a_device_gets_to_the_same_bytes(updates: UpdatesConfig, tmp_path: Path) -> None:
    """Whether it is there in every round, comes late, or was away for one round, two or five."""
    server = BlobStore(tmp_path / "server")
    found = run(updates, server, 8)
    for here in ((0, 1, 2, 3, 4, 5, 6, 7), (7,), (0, 2, 4), (0, 3, 6), (0, 6, 7)):
        device = BlobStore(tmp_path / f"device-{'-'.join(map(str, here))}")
        for number in here:
            reference = found[number]
            hand_over(reference, server, device)
            assert device.get(reference.digest) == server.get(reference.digest)


@each_way
def test_device_with_previous_round_only_fetches_a_patch(updates: UpdatesConfig, tmp_path: Path) -> None:
    server, device = BlobStore(tmp_path / "server"), BlobStore(tmp_path / "device")
    found = run(updates, server, 4)
    sizes = [hand_over(reference, server, device) for reference in found]
    whole = server.manifest(found[0].digest).size
    assert all(size < 0.6 * whole for size in sizes[1:])
    assert sizes[0] == whole if updates.down_whole == "none" else sizes[0] < 0.6 * whole


def test_a_chain_is_followed_as_long_as_it_is_cheaper(tmp_path: Path) -> None:
    """int8 patches take a bit more than a quarter: three of them are less than the whole, four are not."""
    server = BlobStore(tmp_path / "server")
    found = run(UpdatesConfig(down="int8"), server, 6)
    assert [len(reference.links) for reference in found] == [0, 1, 2, 3, 3, 3]
    whole = server.manifest(found[0].digest).size
    for missed, cheaper in ((1, True), (2, True), (3, True), (4, False)):
        device = BlobStore(tmp_path / f"missed-{missed}")
        device.put(server.get(found[5 - missed].digest))
        assert (hand_over(found[5], server, device) < whole) is cheaper


def test_chain_of_tiny_patches_is_capped_so_that_a_task_can_name_it(tmp_path: Path) -> None:
    """Patches of top-k are so small that hundreds would be cheaper than the whole, and larger than a message."""
    blobs = BlobStore(tmp_path)
    rng = np.random.default_rng(0)
    state = {"w": rng.normal(size=100_000).astype(np.float32)}
    reference, rounds = Reference(blobs.put(pack(state)).digest), MAX_CHAIN_STEPS + 3
    for _ in range(rounds):
        state = {"w": state["w"] + rng.normal(0, 1e-3, 100_000).astype(np.float32)}
        found = references({"g": state}, {"g": reference}, UpdatesConfig(down="top_k:share=0.001"), blobs)
        reference = found["g"]
    assert len(reference.links) == MAX_CHAIN_STEPS
    assert reference.links[-1].target == reference.digest
    groups = {f"group-{number}": reference.digest for number in range(4)}
    named = [reference.digest, *(link.patch for link in reference.links)]
    manifests = tuple(blobs.manifest(digest) for digest in named)
    task = Task("i" * 64, 1, "r" * 64, 1, "train", 1, reference.digest, groups, manifests, 60.0)
    encode(msgspec.structs.replace(task, recipes=4 * reference.delta_chain(blobs)))  # raises for one that is too large


@each_way
def test_what_coding_loses_in_one_round_comes_in_the_next(updates: UpdatesConfig, tmp_path: Path) -> None:
    """The state stands still: where changes are coded, the reference comes to it."""
    blobs = BlobStore(tmp_path)
    first, second = states(2)
    reference = references({"model": first}, {}, updates, blobs)["model"]
    apart = []
    for _ in range(60):
        reference = references({"model": second}, {"model": reference}, updates, blobs)["model"]
        got = unpack(blobs.get(reference.digest))
        apart.append(float(np.abs(got["w"] - second["w"]).max()))
    finest = {"none": 1e-6, "fp16": 2e-3, "int8": 2e-2}[updates.down_whole]  # half a step of what devices can have
    assert apart[-1] <= finest
    assert apart[-1] <= apart[0]


def test_a_state_that_stands_still_costs_nothing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    [state] = states(1)
    first = references({"model": state}, {}, UpdatesConfig(down="int8"), blobs)["model"]
    assert references({"model": state}, {"model": first}, UpdatesConfig(down="int8"), blobs)["model"] == first


def test_numbers_beyond_a_codec_go_whole(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    [state] = states(1)
    first = references({"model": state}, {}, UpdatesConfig(down="fp16"), blobs)["model"]
    grown = {name: value * np.float32(1e6) for name, value in state.items()}
    second = references({"model": grown}, {"model": first}, UpdatesConfig(down="fp16"), blobs)["model"]
    assert blobs.get(second.digest) == pack(grown)
    assert not second.links


def test_uncoded_groups_have_no_reference(tmp_path: Path) -> None:
    [state] = states(1)
    assert references({"model": state}, {}, UpdatesConfig(up="int8"), BlobStore(tmp_path)) == {}
    assert not snapshot(state, UpdatesConfig(), BlobStore(tmp_path)).links


def test_delta_chain_with_another_result_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    server, device = BlobStore(tmp_path / "server"), BlobStore(tmp_path / "device")
    first, second = run(UpdatesConfig(down="int8"), server, 2)
    device.put(server.get(first.digest))
    wrong = unpack(server.get(second.links[0].patch))
    wrong["w"] = wrong["w"] + np.int8(1)
    patch = device.put(pack(wrong))
    target = server.manifest(second.digest)
    [chain] = delta_chains(
        [target.digest], (DeltaStep(target.digest, first.digest, patch),), {target.digest: target}, device.has
    )
    with pytest.raises(BadPayload, check=has_code("FV1704")):
        make_blob(chain, device)
    assert sorted(file for file in device.folder.glob("*/*")) == sorted(map(device.path, (first.digest, patch.digest)))


def described(name: str, size: int) -> Manifest:
    return Manifest(name, size, 1024)


def test_cheapest_delta_chain_is_used() -> None:
    whole = {"c": described("c", 100)}
    recipes = (
        DeltaStep("c", "b", described("bc", 30)),
        DeltaStep("b", "a", described("ab", 30)),
        DeltaStep("c", "a", described("ac", 70)),
        DeltaStep("c", "", described("snapshot", 50)),
    )

    def base_and_patches(*here: str) -> list[tuple[str, list[str]]]:
        found = delta_chains(["c"], recipes, whole, lambda digest: digest in here)
        return [(chain.base, [delta_step.patch.digest for delta_step in chain.steps]) for chain in found]

    assert base_and_patches("c") == []
    assert base_and_patches("b", "a") == [("b", ["bc"])]
    assert base_and_patches("a") == [("", ["snapshot"])]
    assert base_and_patches() == [("", ["snapshot"])]
    recipes = recipes[:3]
    assert base_and_patches("a") == [("a", ["ab", "bc"])]
    assert base_and_patches() == []
    recipes = (DeltaStep("c", "b", described("bc", 100)),)
    assert base_and_patches("b") == [], "no cheaper than the whole"


def test_delta_steps_in_a_circle_are_refused() -> None:
    """Every digest leads to every other one: there are more ways than anybody can try."""
    names = [f"n{number}" for number in range(16)]
    steps = tuple(
        DeltaStep(target, base, described("patch", 1)) for target in names for base in names if target != base
    )
    with pytest.raises(BadPayload, check=has_code("FV2304", "circle")):
        delta_chains(["n0"], steps, {"n0": described("n0", 100)}, lambda digest: False)


def test_a_ladder_of_delta_steps_is_climbed_once() -> None:
    """Two ways for each of many steps: 2 ** 30 ways to the top."""
    steps = tuple(
        DeltaStep(f"n{number + 1}", f"n{number}", described(f"patch-{number}-{way}", 1 + way))
        for number in range(30)
        for way in range(2)
    )
    [chain] = delta_chains(["n30"], steps, {"n30": described("n30", 100)}, lambda digest: digest == "n0")
    assert chain.base == "n0"
    assert [step.patch.digest for step in chain.steps] == [f"patch-{number}-0" for number in range(30)]


def test_a_delta_chain_that_is_too_long_is_refused() -> None:
    steps = tuple(DeltaStep(f"n{number + 1}", f"n{number}", described("patch", 1)) for number in range(100))
    with pytest.raises(BadPayload, check=has_code("FV2304")):
        delta_chains(["n100"], steps, {"n100": described("n100", 1000)}, lambda digest: digest == "n0")


def test_values_that_return_make_no_circle(tmp_path: Path) -> None:
    """A device that has the first values already fetches nothing, and one in between goes back by one patch."""
    updates, blobs = UpdatesConfig(down="fp16"), BlobStore(tmp_path)
    there, back = ({"w": np.full((64, 64), value, np.float32)} for value in (1.0, 2.0))
    reference = references({"g": there}, {}, updates, blobs)["g"]
    first = reference.digest
    for state in (back, there, back, there):
        reference = references({"g": state}, {"g": reference}, updates, blobs)["g"]
    assert reference.digest == first
    steps, target = reference.delta_chain(blobs), blobs.manifest(first)
    assert delta_chains([first], steps, {first: target}, lambda digest: digest == first) == []
    between = steps[-1].base
    [chain] = delta_chains([first], steps, {first: target}, lambda digest: digest == between)
    assert len(chain.steps) == 1
