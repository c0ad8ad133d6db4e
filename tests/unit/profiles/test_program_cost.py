"""What follows from a Program and its graphs: every figure here is derived by hand."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession

from coordinator.compute.planning.planner import make_plan
from coordinator.config import RunConfig
from edge_client.work.sampler import make_sampler
from edge_client.work.steps import Graph, SummedSteps
from fedvit.blobs import BlobStore
from fedvit.models import SMALL
from fedvit.program import (
    Batch,
    Collect,
    Evaluate,
    GraphSpec,
    Program,
    Role,
    TensorGroup,
    TensorSpec,
    Train,
    encode_program,
)
from fedvit.tensors import pack
from profiles.cost import GraphCost, NodeCost, Product
from profiles.prediction import MemoryPhase, ProductWork, ProgramCost
from profiles.program_cost import ARENA_SLACK, LOADED_PER_NODE_BYTES, PricedProgram
from tests.support.tiny import TINY_MODEL

DIGEST = "blake3:" + "0" * 64
IMAGE_BYTES = 3 * 32**2
PATCH_BYTES = 4 * 3 * 8**2
FORWARD, BACKWARD = Product("weights", 1, 40, 32, 96), Product("gradient", 1, 32, 40, 96)
ANSWER = Product("weights", 1, 64, 32, 96)

GRAPHS: dict[str, GraphCost] = {
    "train": GraphCost(
        (
            NodeCost("Gemm", FORWARD, 0, "block 0", "attention", True),
            NodeCost("Gemm", BACKWARD, 0, "block 0", "attention", False),
            NodeCost("Add", None, 100, "block 0", "attention", True),
            NodeCost("Softmax", None, 40, "block 0", "attention", True),
            NodeCost("Reshape", None, 0, "block 0", "attention", True),
        ),
        activation_bytes=10_000,
        graph_bytes=700,
    ),
    "update": GraphCost(
        (NodeCost("Mul", None, 8, "value", "value", False, 3),) * 3, activation_bytes=0, graph_bytes=50
    ),
    "predict": GraphCost(
        (NodeCost("Gemm", ANSWER, 0, "block 0", "attention", True),), activation_bytes=4_000, graph_bytes=300
    ),
}

TENSORS = {
    "embedding.weight": TensorSpec((192, 32), "float32", "frozen"),
    "blocks.0.weight": TensorSpec((32, 96), "float32", "model"),
    "blocks.0.bias": TensorSpec((96,), "float32", "model"),
    "norm.weight": TensorSpec((32,), "float32", "norm"),
    "head.weight": TensorSpec((10, 32), "float32", "head"),
}
GROUPS = {
    "frozen": TensorGroup(Role.FROZEN, DIGEST),
    "model": TensorGroup(Role.SHARED),
    "norm": TensorGroup(Role.GLOBAL),
    "head": TensorGroup(Role.LOCAL, DIGEST),
}
FROZEN, SHARED, GLOBAL, LOCAL = 192 * 32, 32 * 96 + 96, 32, 10 * 32  # numbers

PHASE = Train(graph="train", update="update", groups=("model", "head"), slots=("exp_avg", "exp_avg_sq"), lr=0.1)
BATCH = Batch(
    image_size=32, patch_size=8, batch_size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), mask_ratio=0.75, micro_batch=4
)


def program(*phases: Train, batch: Batch = BATCH, **changed: Any) -> Program:
    made = Program(
        method="by hand",
        model="small",
        classes=("a", "b"),
        groups=GROUPS,
        tensors=TENSORS,
        graphs={name: GraphSpec(DIGEST, cost.flops) for name, cost in GRAPHS.items()},
        train=phases or (PHASE,),
        evaluate=Evaluate(graph="predict"),
        batch=batch,
    )
    return msgspec.structs.replace(made, **changed)


def cost_of(made: Program | None = None, *, images: int = 20, test_images: int = 6, **given: Any) -> ProgramCost:
    priced = PricedProgram(made or program(), {"mask": 0.75}, GRAPHS)
    return priced.cost(images=images, test_images=test_images, **given)


def of(**changed: Any) -> Train:
    return msgspec.structs.replace(PHASE, **changed)


def pack_values(*shapes: tuple[int, ...]) -> int:
    """Of the float32 tensors of TENSORS that have these shapes."""
    names = [name for name, spec in TENSORS.items() if spec.shape in shapes]
    assert len(names) == len(shapes)
    return len(pack({name: np.zeros(TENSORS[name].shape, np.float32) for name in names}))


# --- steps and FLOPs ----------------------------------------------------------------------------------


def test_cost_describes_the_program() -> None:
    cost = cost_of()
    assert (cost.method, cost.model, cost.options) == ("by hand", "small", {"mask": 0.75})
    assert (cost.batch_size, cost.run_size, cost.answer_size, cost.kept_patches) == (8, 4, 4, 4)
    assert (cost.mask_ratio, cost.images, cost.test_images) == (0.75, 20, 6)
    assert cost.parameters_trained == SHARED + LOCAL
    assert cost.parameters_frozen == FROZEN + GLOBAL
    assert cost.parameters_local == LOCAL


def test_a_step_works_its_batch_off_in_runs() -> None:
    """8 samples in runs of 4: the graph runs twice, so a step has twice its FLOPs, shared out as the graph has them."""
    cost = cost_of()
    each = 2 * 40 * 32 * 96
    assert (FORWARD.flops, BACKWARD.flops) == (each, each)
    [share] = cost.flops
    assert (share.block, share.kind, share.forward, share.backward) == ("block 0", "attention", 2 * each, 2 * each)
    assert (cost.flops_forward, cost.flops_backward, cost.flops_step) == (2 * each, 2 * each, 4 * each)


def test_an_answer_costs_what_its_graph_costs_for_one_image() -> None:
    assert cost_of().flops_evaluate == 2 * 64 * 32 * 96 // 4


@pytest.mark.parametrize(
    ("images", "steps", "runs"),
    [
        (1, 1, 1),
        (4, 1, 1),
        (5, 1, 2),
        (8, 1, 2),
        (9, 2, 3),  # of the second batch one run has a sample, the other none
        (12, 2, 3),
        (13, 2, 4),
        (20, 3, 5),
    ],
)
def test_a_short_batch_has_only_the_runs_that_have_samples(images: int, steps: int, runs: int) -> None:
    """ceil(images / 8) steps; of a last batch ceil(rest / 4) runs."""
    cost = cost_of(images=images)
    assert cost.steps == steps
    assert cost.flops_round == runs * GRAPHS["train"].flops


def test_epochs_and_repeats_multiply() -> None:
    cost = cost_of(program(of(epochs=3, repeats=2)))
    assert cost.steps == 3 * 2 * 3
    assert cost.flops_round == 3 * 2 * 5 * GRAPHS["train"].flops


@pytest.mark.parametrize(("limit", "steps", "runs"), [(2, 2, 4), (3, 3, 5), (4, 4, 7), (6, 6, 10), (99, 6, 10)])
def test_a_phase_ends_after_its_steps(limit: int, steps: int, runs: int) -> None:
    """Two epochs of 20 images have 6 steps of 2, 2, 1, 2, 2, 1 runs."""
    cost = cost_of(program(of(epochs=2, steps=limit)))
    assert cost.steps == steps
    assert cost.flops_round == runs * GRAPHS["train"].flops


def test_steps_of_whole_graphs_and_of_phases() -> None:
    # a whole step is one run: Where the graph makes the whole step, a short batch is padded
    cost = cost_of(program(of(update=None, epochs=2)))
    assert cost.steps == 6
    assert cost.flops_round == 6 * GRAPHS["train"].flops
    assert cost.flops_step == GRAPHS["train"].flops
    # phases add up: 5 runs of the first in 3 steps; of the second, which ends after 1 step, 2 runs, and again
    cost = cost_of(program(PHASE, of(steps=1, repeats=2, lr=0.5)))
    assert cost.steps == 3 + 2
    assert cost.flops_round == (5 + 4) * GRAPHS["train"].flops


@given(
    images=st.integers(1, 200),
    batch_size=st.integers(1, 17),
    micro_batch=st.integers(1, 17),
    epochs=st.integers(1, 3),
    limit=st.none() | st.integers(1, 40),
    repeats=st.integers(1, 3),
)
def test_runs_are_those_of_a_device_that_does_them(
    images: int, batch_size: int, micro_batch: int, epochs: int, limit: int | None, repeats: int
) -> None:
    """Counted one by one: a batch in runs, as often as it is repeated, until the steps are done."""
    micro_batch = min(micro_batch, batch_size)
    steps = runs = 0
    for _ in range(epochs):
        for first in range(0, images, batch_size):
            if limit is not None and steps == limit:
                break
            steps += 1
            runs += len(range(0, min(batch_size, images - first), micro_batch))
    batch = msgspec.structs.replace(BATCH, batch_size=batch_size, micro_batch=micro_batch)
    cost = cost_of(program(of(epochs=epochs, steps=limit, repeats=repeats), batch=batch), images=images)
    assert cost.steps == repeats * steps
    assert cost.flops_round == repeats * runs * GRAPHS["train"].flops


def test_the_work_of_a_step_is_that_of_its_runs_and_of_the_update() -> None:
    """5 runs in 3 steps. The update runs on all 3488 trained numbers in one piece, 3 nodes that read two vectors and
    write one, 12 bytes a number."""
    work = cost_of().step_work
    runs = 5 / 3
    assert [tuple(product) for product in map(msgspec.structs.astuple, work.products)] == [
        (*FORWARD, pytest.approx(runs)),
        (*BACKWARD, pytest.approx(runs)),
    ]
    numbers = SHARED + LOCAL
    assert work.moved_bytes == {
        "Add": pytest.approx(100 * runs + 3 * 12 * numbers),
        "Softmax": pytest.approx(40 * runs),
    }
    assert work.nodes == pytest.approx(5 * runs + 3)


def test_kernels_change_work_and_memory_alone() -> None:
    fewer = replace(GRAPHS["train"], nodes=GRAPHS["train"].nodes[:3], activation_bytes=3_000)
    graphs = GRAPHS | {"train": replace(GRAPHS["train"], with_kernels=fewer)}
    priced = PricedProgram(program(), {}, graphs)
    plain, own = (each.cost(images=20, test_images=6) for each in (priced, priced.with_kernels))
    assert own.step_work.products == plain.step_work.products
    assert plain.step_work.moved_bytes.keys() - own.step_work.moved_bytes.keys() == {"Softmax"}
    assert memory(plain)["train"]["activations"] == int(ARENA_SLACK * 10_000)
    # the largest of the other graphs stays
    assert memory(own)["train"]["activations"] == int(ARENA_SLACK * 3_000)
    assert memory(own)["evaluate"]["activations"] == int(ARENA_SLACK * 4_000)
    changed = {"step_work", "memory"}
    assert all(getattr(own, name) == getattr(plain, name) for name in {*plain.__struct_fields__} - changed)


def test_work_of_steps_updates_and_answers() -> None:
    # the update of many numbers runs in pieces: 2^17 numbers a piece: 300 000 are three, each three nodes
    tensors = TENSORS | {"blocks.0.weight": TensorSpec((300_000 - 96 - LOCAL,), "float32", "model")}
    work = cost_of(program(tensors=tensors)).step_work
    assert work.nodes == pytest.approx(5 * 5 / 3 + 3 * 3)
    work = cost_of(program(of(update=None))).step_work
    assert work.moved_bytes == {"Add": 100, "Softmax": 40}
    assert work.nodes == 5
    work = cost_of().answer_work
    assert work.products == [ProductWork(*ANSWER, 1.0)]
    assert (work.moved_bytes, work.nodes) == ({}, 1)


# --- bytes --------------------------------------------------------------------------------------------


def test_bytes_are_those_of_packed_tensors() -> None:
    # bytes each way are those of packed tensors: Each round the shared and the global group come, a blob each, and
    # the shared group's changes go
    cost = cost_of()
    assert cost.bytes_down == pack_values((32, 96), (96,)) + pack_values((32,))
    assert cost.bytes_up == pack_values((32, 96), (96,))
    made = program()
    first = pack_values((192, 32)) + pack_values((10, 32))
    assert cost_of(made).bytes_once == 700 + 50 + 300 + len(encode_program(made)) + first


@pytest.mark.parametrize("epochs", [1, 2, 5])
@pytest.mark.parametrize("threshold", [0.25, 0.5, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("kind", ["median", "balanced"])
def test_features_are_part_of_the_upload(kind: Literal["median", "balanced"], threshold: float, epochs: int) -> None:
    """The upload has each feature that the sampler takes of two classes with 12 images, and its label."""
    collect = Collect("features.2", (5, 32), threshold, sampler=kind)
    cost = cost_of(program(of(collect=collect, epochs=epochs)), images=24)
    sampler = make_sampler(collect, np.arange(24) % 2, epochs, np.random.default_rng(0))
    rows, readable = np.arange(24), np.ones(24, np.bool_)
    count = sum(len(sampler.positions(epoch, rows, readable)) for epoch in range(epochs))
    sent = {name: np.zeros(TENSORS[name].shape, np.float32) for name in ("blocks.0.weight", "blocks.0.bias")}
    features = {"features.2": np.zeros((count, 5, 32), np.float32), "labels": np.zeros(count, np.int64)}
    assert cost.bytes_up == len(pack({**sent, **features}))


def test_who_sends_nothing_uploads_nothing() -> None:
    groups = {name: TensorGroup(Role.LOCAL, DIGEST) for name in GROUPS}
    cost = cost_of(program(groups=groups))
    assert (cost.bytes_up, cost.bytes_down) == (0, 0)


# --- memory -------------------------------------------------------------------------------------------


def memory(cost: ProgramCost) -> dict[str, dict[str, int]]:
    return {phase.phase: phase.parts for phase in cost.memory}


def test_memory_in_training() -> None:
    """Frozen weights once; of trained numbers values, gradients and two slots. All 20 images stay decoded; of the
    batch's 8 images with 4 of 16 patches three copies as patches and one as pictures."""
    assert memory(cost_of())["train"] == {
        "graphs": (5 + 3) * LOADED_PER_NODE_BYTES,
        "weights": 4 * (FROZEN + GLOBAL),
        "trained": 4 * 4 * (SHARED + LOCAL),
        "activations": int(ARENA_SLACK * 10_000),
        "images": 20 * IMAGE_BYTES + 3 * 8 * 4 * PATCH_BYTES + 8 * IMAGE_BYTES,
        "features": 0,
    }


def test_memory_of_the_upload() -> None:
    """Files of all tensors are read, the changes of what is sent lie beside the new values."""
    assert memory(cost_of())["upload"] == {
        "graphs": (5 + 3) * LOADED_PER_NODE_BYTES,
        "weights": 4 * (FROZEN + GLOBAL + SHARED + LOCAL),
        "trained": 4 * (SHARED + LOCAL) + 4 * SHARED,
        "activations": int(ARENA_SLACK * 10_000),
        "images": 20 * IMAGE_BYTES,
        "features": 0,
    }


def test_memory_of_an_evaluation() -> None:
    """All graphs are there; 4 whole images at a time, as pictures and as their 16 patches."""
    assert memory(cost_of())["evaluate"] == {
        "graphs": (5 + 3 + 1) * LOADED_PER_NODE_BYTES,
        "weights": 4 * (FROZEN + GLOBAL + SHARED + LOCAL),
        "activations": int(ARENA_SLACK * 10_000),
        "images": (20 + 6) * IMAGE_BYTES + 4 * (IMAGE_BYTES + 16 * PATCH_BYTES),
    }


@pytest.mark.parametrize(
    ("phase", "copies"),
    [
        (PHASE, 4),  # values, gradients, two slots
        (of(slots=()), 2),
        (of(slots=("momentum",)), 3),
        (of(update=None), 6),  # values and two slots, old and new
        (of(update=None, slots=()), 2),
    ],
)
def test_copies_of_what_is_trained(phase: Train, copies: int) -> None:
    assert memory(cost_of(program(phase)))["train"]["trained"] == copies * 4 * (SHARED + LOCAL)


@pytest.mark.parametrize("bits", [32, 8])
def test_trained_memory_is_what_a_device_allocates(bits: int, tmp_path: Path) -> None:
    """Slots of 8 bits have codes, scales and one unpacked piece each."""
    config = RunConfig(
        method="fedavg", options={"optimizer": "adamw", "optimizer_bits": bits}, model=SMALL,
        model_options={**TINY_MODEL, "width": 128},
    )  # fmt: skip
    plan = make_plan(config, ("a", "b"), BlobStore(tmp_path))
    variant = plan.first
    [phase] = variant.program.train
    graph, update = (
        Graph(InferenceSession(plan.blobs.get(variant.program.graphs[str(name)].digest)))
        for name in (phase.graph, phase.update)
    )
    facts = {"fact/class_counts": np.zeros(2, np.float32)}
    tracemalloc.start()
    steps = SummedSteps(graph, variant.program, phase, plan.values, plan.values, facts, update=update)
    allocated_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps.count == 0
    trained = memory(variant.priced.cost(images=20, test_images=6))["train"]["trained"]
    assert trained == pytest.approx(allocated_bytes, rel=0.03)
    numbers = variant.priced.cost(images=20, test_images=6).parameters_trained
    assert (trained < 0.9 * 4 * 4 * numbers) is (bits == 8)


def test_the_phase_that_moves_most_decides() -> None:
    """One phase trains the head alone, another the rest."""
    cost = cost_of(program(of(groups=("head",)), of(groups=("model",))))
    assert memory(cost)["train"]["trained"] == 4 * 4 * SHARED
    assert memory(cost)["upload"]["trained"] == 4 * SHARED + 4 * SHARED


@pytest.mark.parametrize(
    ("cache_images", "training", "testing"), [(20, 20, 6), (19, 0, 6), (6, 0, 6), (5, 0, 0), (0, 0, 0)]
)
def test_images_are_kept_where_all_of_them_fit(cache_images: int, training: int, testing: int) -> None:
    """Of training and of test images each; those that do not fit are decoded again each time."""
    parts = memory(cost_of(cache_bytes=cache_images * IMAGE_BYTES))
    at_work = 3 * 8 * 4 * PATCH_BYTES + 8 * IMAGE_BYTES
    assert parts["train"]["images"] == training * IMAGE_BYTES + at_work
    assert parts["upload"]["images"] == training * IMAGE_BYTES
    answers = 4 * (IMAGE_BYTES + 16 * PATCH_BYTES)
    assert parts["evaluate"]["images"] == (training + testing) * IMAGE_BYTES + answers


def test_memory_of_features_and_files() -> None:
    # features are held and then packed: 10 of 20 images, 5 x 32 floats each; with the bytes that travel they lie
    # there twice
    parts = memory(cost_of(program(of(collect=Collect("features.2", (5, 32), 0.5)))))
    assert parts["train"]["features"] == 4 * 10 * 5 * 32
    assert parts["upload"]["features"] == 2 * 4 * 10 * 5 * 32
    groups = GROUPS | {"model": TensorGroup(Role.LOCAL, DIGEST)}
    parts = memory(cost_of(program(groups=groups)))["upload"]
    assert parts["weights"] == 4 * (FROZEN + GLOBAL)
    assert parts["trained"] == 4 * (SHARED + LOCAL)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("float16", 2), ("int8", 1)])
def test_frozen_weights_take_the_bytes_of_their_type(dtype: str, item_bytes: int) -> None:
    tensors = TENSORS | {"embedding.weight": TensorSpec((192, 32), dtype, "frozen")}
    cost = cost_of(program(tensors=tensors))
    assert memory(cost)["train"]["weights"] == item_bytes * FROZEN + 4 * GLOBAL
    assert cost.parameters_frozen == FROZEN + GLOBAL
    assert cost_of().bytes_once - cost.bytes_once == pytest.approx((4 - item_bytes) * FROZEN, abs=32)


def test_memory_of_phases_is_the_sum_of_their_parts() -> None:
    # answers may need more than training: The arena keeps what training needed at its highest
    graphs = GRAPHS | {"predict": GraphCost(GRAPHS["predict"].nodes, activation_bytes=50_000, graph_bytes=300)}
    cost = PricedProgram(program(), {}, graphs).cost(images=20, test_images=6)
    assert memory(cost)["evaluate"]["activations"] == int(ARENA_SLACK * 50_000)
    assert memory(cost)["train"]["activations"] == int(ARENA_SLACK * 10_000)
    assert MemoryPhase(phase="train", parts={"weights": 3, "images": 4}).total_bytes == 7
