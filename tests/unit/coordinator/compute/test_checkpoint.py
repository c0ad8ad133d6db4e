"""What a round leaves behind, and what the next one or a restart begins with."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.compute.checkpoint import find_needed_blobs, load_state, save_state, write_models
from coordinator.compute.planning.planner import Plan, make_plan
from fedvit.blobs import BlobStore, digest_of
from fedvit.methods import build_model, make_method
from fedvit.methods.base import ServerState, Upload
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models import SMALL
from fedvit.tensors import pack, unpack
from tests.support.method_steps import make_context
from tests.support.runs import Configure


@pytest.fixture(scope="module")
def planned(
    tmp_path_factory: pytest.TempPathFactory, graph_cache: Path, configure: Configure
) -> tuple[Plan, BlobStore]:
    blobs = BlobStore(tmp_path_factory.mktemp("blobs"))
    return make_plan(configure("eftvit"), ("0", "1", "2"), blobs, cache=graph_cache), blobs


def updated(plan: Plan) -> ServerState:
    """A state after some round: other tensors, an optimizer's memory with a scalar in it, two devices' uploads."""
    tensors = {name: value + np.float32(0.1) for name, value in plan.state.tensors.items()}
    memory = {"exp_avg/norm.weight": np.arange(32, dtype=np.float32), "step/norm.weight": np.float32(7)}
    return ServerState(tensors, memory, {"a": digest_of(b"a"), "b": digest_of(b"b")})  # type: ignore[arg-type]


def test_a_state_comes_back_bit_for_bit(planned: tuple[Plan, BlobStore]) -> None:
    """Also shapes without a dimension; tensors are in the model's order, however the state had them."""
    plan, blobs = planned
    program, state = plan.first.program, updated(plan)
    again = load_state(save_state(state, plan.groups, blobs), blobs, plan.values)
    assert list(again.tensors) == [name for name in program.tensors if name in state.tensors]
    assert again.tensors.keys() == state.tensors.keys()
    assert again.memory.keys() == state.memory.keys()
    for kept, given in ((again.tensors, state.tensors), (again.memory, state.memory)):
        for name, value in given.items():
            assert (kept[name].shape, kept[name].dtype) == (value.shape, value.dtype), name
            assert kept[name].tobytes() == value.tobytes(), name
    assert again.uploads == state.uploads


def test_a_state_without_memory(planned: tuple[Plan, BlobStore]) -> None:
    plan, blobs = planned
    saved = save_state(plan.state, plan.groups, blobs)
    assert saved.memory is None
    again = load_state(saved, blobs)
    assert (again.memory, again.uploads) == ({}, {})


def test_the_saved_groups_are_what_devices_fetch(planned: tuple[Plan, BlobStore]) -> None:
    """One blob a group that comes from the server; local tensors are in none."""
    plan, blobs = planned
    state = updated(plan)
    saved = save_state(state, plan.groups, blobs)
    assert set(saved.groups) == {"head", "norm", "block.1", "block.2"}
    for group, digest in saved.groups.items():
        tensors = unpack(blobs.get(digest))
        assert sorted(tensors) == sorted(plan.first.program.names(group))
        assert digest == digest_of(pack({name: state.tensors[name] for name in tensors}))


def test_what_must_not_be_deleted(planned: tuple[Plan, BlobStore]) -> None:
    """The program, its 3 graphs, the local group's first value, 4 groups, the memory, 2 uploads: 12 blobs."""
    plan, blobs = planned
    program = plan.first.program
    saved = save_state(updated(plan), plan.groups, blobs)
    needed = find_needed_blobs(plan, saved)
    assert len(needed) == 12
    assert {plan.first.digest, saved.memory, *saved.groups.values(), *saved.uploads.values()} <= needed
    assert {graph.digest for graph in program.graphs.values()} <= needed
    assert program.groups["local"].initial in needed


def test_a_state_comes_back_without_a_plan(planned: tuple[Plan, BlobStore]) -> None:
    """So a run reads what an earlier one ended with."""
    plan, blobs = planned
    state = updated(plan)
    again = load_state(save_state(state, plan.groups, blobs), blobs)
    assert again.tensors.keys() == state.tensors.keys()
    assert all(value.tobytes() == state.tensors[name].tobytes() for name, value in again.tensors.items())


def test_a_group_that_did_not_move_keeps_its_blob(planned: tuple[Plan, BlobStore]) -> None:
    """So devices do not fetch it again."""
    plan, blobs = planned
    before = save_state(plan.state, plan.groups, blobs)
    tensors = {name: value + np.float32(name in plan.groups["block.2"]) for name, value in plan.state.tensors.items()}
    after = save_state(ServerState(tensors), plan.groups, blobs)
    assert {group for group in plan.groups if before.groups[group] != after.groups[group]} == {"block.2"}


def test_programs_of_every_variant_must_not_be_deleted(configure: Configure, graph_cache: Path, tmp_path: Path) -> None:
    """Two splits: two programs and two first values of local tensors. Prediction and the update are the same graphs for
    both: four graphs, and the four groups of the state: 12 blobs."""
    blobs = BlobStore(tmp_path)
    config = configure("eftvit", variants={"jetson-*": {"local_blocks": 2}})
    plan = make_plan(config, ("0", "1", "2"), blobs, cache=graph_cache)
    assert plan.first
    saved = save_state(plan.state, plan.groups, blobs)
    assert len(find_needed_blobs(plan, saved)) == 1 + 3 + 1 + 4
    other = plan.variant("jetson-1", 1)
    needed = find_needed_blobs(plan, saved)
    assert len(needed) == 12
    assert {plan.first.digest, other.digest} < needed
    for program in (plan.first.program, other.program):
        assert {graph.digest for graph in program.graphs.values()} < needed
        assert program.groups["local"].initial in needed


def test_generator_and_embeddings_are_written_at_the_end_of_a_run(tmp_path: Path) -> None:
    """Without the optimizer's state; device `a` trained, `b` did not. They make what `a` was given again."""
    method = make_method("pfedpg", {"tokens": 3, "server_optimizer": "adamw"})
    vit = build_model(method, SMALL, 4, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "heads": 2})
    rule = method.server_rule(vit)
    assert isinstance(rule, GeneratorUpdate)
    context = make_context(vit)
    uploads = [Upload("a", 2, "", lambda: {"prompts.tokens": np.ones((3, 8), np.float32)})]
    state, _ = rule.close(ServerState({}, rule.begin(0)), uploads, context)
    write_models(tmp_path, state, rule, ["a", "b"], 0)
    written = unpack((tmp_path / "generator.safetensors").read_bytes())
    assert {name for name in written if name.startswith("device/")} == {"device/a/descriptor"}
    assert {name.split("/")[0] for name in written} == {"device", "generator"}
    shared, own = (
        {name.removeprefix(prefix): torch.tensor(value) for name, value in written.items() if name.startswith(prefix)}
        for prefix in ("generator/", "device/a/")
    )
    made = rule.generator.generate(shared, own)["prompts.tokens"].numpy()
    np.testing.assert_array_equal(unpack((tmp_path / "generated/a.safetensors").read_bytes())["prompts.tokens"], made)


def test_without_a_generator_none_is_written(tmp_path: Path) -> None:
    write_models(tmp_path, ServerState({}, {"optimizer/momentum": np.ones(1)}), WeightedMean(), ["a"], 0)
    assert not (tmp_path / "generator.safetensors").exists()
