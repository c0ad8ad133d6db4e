"""The information-flow check accepts every method's graphs as they are, and refuses what leaks more than they do.

FEDVIT_FLOW_MUTANTS is the number of mutated Programs of each method, 15 by default. Those that the check accepts are
compared with the slow reference of `tests.support.influence`.
"""

import os
from binascii import crc32
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edge_client.trust.flow import check_flow, check_images
from edge_client.trust.pins import find_changes, make_pins
from fedvit.blobs import digest_of
from fedvit.errors import ConfigError, NotAllowed
from fedvit.label_forms import LabelForm
from fedvit.methods import METHODS, make_method
from fedvit.model_options import CNN, LSTM, RESNET, TEXT
from fedvit.program import Program, Role
from tests.support.codes import has_code
from tests.support.influence import Device, measure_influence
from tests.support.program_mutations import Graphs, Mutant, mutants
from tests.support.tiny_programs import make_program

UNDECIDED = {"per_fedavg", "ifca"}
"""Methods of which the check accepts a mutant that tells more of single pixels (decision 0045): a value of the first
step in place of another in the second; sums of losses as the weights of a mixture, in which few pixels count."""
MUTANTS = int(os.environ.get("FEDVIT_FLOW_MUTANTS", "15"))
IMAGES = 20
ONE_PIXEL = {"image_size": 2, "patch_size": 2, "width": 8, "depth": 2, "heads": 2}
WIDE = {"image_size": 8, "patch_size": 4, "width": 128, "depth": 2, "heads": 2}
"""Wide enough for products of integers and of float16."""

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw and a clipped gradient": {"optimizer": "adamw", "clip_norm": 1.0},
    "masks, dropout, recomputing": {"mask": 0.5, "dropout": 0.2, "recompute": True},
    "weights in int8": {"frozen_precision": "int8"},
    "one image at a time": {"micro_batch": 1},
    "whole batches": {"micro_batch": 4},
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "analytic sketch": ("analytic", {"sketch": 3}),
    "apfl code": ("apfl", {"form": "code"}),
    "fedperfix concat": ("fedperfix", {"mode": "concat"}),
    "fedtp encoder": ("fedtp", {"parts": "encoder"}),
    "fedtp neighbours": ("fedtp", {"head": "rod", "knn_weight": 0.6, "capacity": 8}),
    "per_fedavg hessian": ("per_fedavg", {"order": "hessian_free"}),
    "pfedhn head": ("pfedhn", {"personal_head": True}),
    "pfedpg base": ("pfedpg", {"evaluate_with": "base"}),
    "fedbabu head": ("fedbabu", {"tune": "head", "tune_steps": 1}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer of text": (TEXT, {"context": 5, "width": 16, "depth": 2, "heads": 2}),
    "LSTM": (LSTM, {"context": 4, "width": 8, "depth": 2, "embedding": 4}),
    "LSTM of a longer text": (LSTM, {"context": 40, "width": 8, "depth": 1, "embedding": 4}),
    "plain convolutional network": (CNN, {"image_size": 16, "width": 2}),
    "residual network": (RESNET, {"image_size": 8, "width": 8, "stages": 2, "groups": 2}),
    "residual network with pooling": ("resnet18", {"image_size": 32, "stem": "7x7", "groups": 8}),
}


def assert_accepted(program: Program, graphs: Graphs) -> None:
    flows = check_flow(program, Mutant("", program, graphs).read)
    check_images(program, flows, IMAGES)


# --- methods as they are ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_options_that_change_graphs_pass(name: str, tmp_path: Path) -> None:
    method, options = MORE[name]
    assert_accepted(*make_program(method, tmp_path, options))


@pytest.mark.parametrize("method", ["fedper", pytest.param("eftvit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_every_method_pass(options: str, method: str, tmp_path: Path) -> None:
    assert_accepted(*make_program(method, tmp_path, OPTIONS[options]))


@pytest.mark.parametrize("method", [pytest.param("eftvit", marks=pytest.mark.slow), "fed_lora"])
@pytest.mark.parametrize("compute", ["int8", "fp16"])
def test_products_of_few_bits_pass(compute: str, method: str, tmp_path: Path) -> None:
    assert_accepted(*make_program(method, tmp_path, {"compute": compute}, model_options=WIDE))


@pytest.mark.parametrize("method", ["fedper", pytest.param("apfl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_other_models_pass(model: str, method: str, tmp_path: Path) -> None:
    name, options = MODELS[model]
    assert_accepted(*make_program(method, tmp_path, model=name, model_options=options))


def test_whole_steps_on_two_images_pass_and_an_update_of_one_image_does_not(tmp_path: Path) -> None:
    """A device with one image would send its gradient, whatever the size of a batch."""
    program, graphs = make_program("apfl", tmp_path, {"batch_size": 2})
    flows = check_flow(program, Mutant("", program, graphs).read)
    check_images(program, flows, 2)
    with pytest.raises(NotAllowed, check=has_code("FV1441", "1 training images")):
        check_images(program, flows, 1)


def test_personal_tensors_that_pfedme_would_copy_are_refused(tmp_path: Path) -> None:
    """With `start` own, shared tensors are pulled toward personal ones of earlier rounds: their difference leaves."""
    program, graphs = make_program("pfedme", tmp_path, {"start": "own"})
    with pytest.raises(NotAllowed, check=has_code("FV1441", "copies a local tensor")):
        assert_accepted(program, graphs)


def test_a_teacher_that_the_server_does_not_know_is_refused(tmp_path: Path) -> None:
    """MOON's last model of a device may come from the server, not from the device's own tensors."""
    program, graphs = make_program("moon", tmp_path)
    assert_accepted(program, graphs)
    groups = {
        name: msgspec.structs.replace(group, role=Role.LOCAL) if group.role is Role.ASSIGNED else group
        for name, group in program.groups.items()
    }
    with pytest.raises(NotAllowed, check=has_code("FV1441", "has features of single images")):
        assert_accepted(msgspec.structs.replace(program, groups=groups), graphs)


# --- other tasks --------------------------------------------------------------------------------------

TASKS = ("multi_label", "regression")
LEARNS_EVERY_TASK = [name for name in METHODS if make_method(name).why_one_class is None]


@pytest.mark.parametrize("name", [
    name if name == "eftvit" else pytest.param(name, marks=pytest.mark.slow)
    for name in LEARNS_EVERY_TASK
    if name != "fedper"  # below, before its mutants
])  # fmt: skip
@pytest.mark.parametrize("task", TASKS)
def test_losses_of_other_tasks_pass(task: str, name: str, tmp_path: Path) -> None:
    assert_accepted(*make_program(name, tmp_path, task=task))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in LEARNS_EVERY_TASK])
def test_a_method_that_needs_one_class_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    why = make_method(name).why_one_class
    assert why
    with pytest.raises(ConfigError, check=has_code("FV2490", why)):
        make_program(name, tmp_path, task="multi_label")


@pytest.mark.parametrize("task", TASKS)
def test_mutants_of_other_tasks_that_leak_more_are_refused(task: str, tmp_path: Path) -> None:
    program, graphs = make_program("fedper", tmp_path, task=task)
    assert_mutants_are_refused(f"fedper {task}", program, graphs)


def find_error(graphs: Graphs) -> tuple[Any, Any]:
    """Return the training graph of a regression, and the node that takes labels from the model's outputs."""
    model = onnx.load_from_string(graphs["train"])
    [node] = [node for node in model.graph.node if node.op_type == "Sub" and "batch/labels" in node.input]
    return model, node


def replace_error(program: Program, graphs: Graphs, output: str) -> tuple[Program, Graphs]:
    """Return a regression whose error is that of another value than the model's output."""
    model, node = find_error(graphs)
    node.input[0] = output
    content = model.SerializeToString()
    spec = msgspec.structs.replace(program.graphs["train"], digest=digest_of(content))
    return msgspec.structs.replace(program, graphs={**program.graphs, "train": spec}), {**graphs, "train": content}


def test_an_error_is_one_of_features_alone(tmp_path: Path) -> None:
    """Pixels less labels are pixels: their sum over a batch, or with features, would be sent."""
    program, graphs = make_program("fedavg", tmp_path, task="regression", model_options=ONE_PIXEL)
    assert_accepted(program, graphs)
    model, _ = find_error(graphs)
    pixel = helper.make_node("ReduceMean", ["batch/patches", "pixel.axes"], ["pixel"], keepdims=0)
    axes = numpy_helper.from_array(np.array([1], np.int64), "pixel.axes")
    model.graph.initializer.append(axes)
    model.graph.node.insert(0, pixel)
    wider = helper.make_node("ReduceMean", ["pixel", "pixel.axes"], ["pixel.mean"], keepdims=1)
    model.graph.node.insert(1, wider)
    changed = {**graphs, "train": model.SerializeToString()}
    with pytest.raises(NotAllowed, check=has_code("FV1441", "images")):
        assert_accepted(*replace_error(program, changed, "pixel.mean"))


def test_features_less_classes_are_no_error(tmp_path: Path) -> None:
    """Only labels that are numbers have an error: the same graph in a task of classes sends a sum of features."""
    program, graphs = make_program("fedavg", tmp_path, task="regression")
    assert_accepted(program, graphs)
    batch = msgspec.structs.replace(program.batch, labels=LabelForm(task="multi_label"))
    with pytest.raises(NotAllowed, check=has_code("FV1441")):
        assert_accepted(msgspec.structs.replace(program, batch=batch), graphs)


# --- mutants ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_passes_unchanged_and_mutants_that_leak_more_are_refused(name: str, tmp_path: Path) -> None:
    """A mutant that the check and the pins of the run accept tells no more of single pixels than the method does."""
    assert_mutants_are_refused(name, *make_program(name, tmp_path))


def assert_mutants_are_refused(name: str, program: Program, graphs: Graphs) -> None:
    assert_accepted(program, graphs)
    device, pins = Device(program, 1), make_pins(None, program)
    honest = measure_influence(program, graphs, device)
    refused = 0
    for mutant in mutants(crc32(name.encode()), MUTANTS, program, graphs):
        try:
            assert_accepted(mutant.program, mutant.graphs)
        except NotAllowed:
            refused += 1
            continue
        if next(find_changes(pins, mutant.program), None):
            refused += 1
            continue
        influence = measure_influence(mutant.program, mutant.graphs, device)
        leaks_more = influence.is_more_than(honest, program.batch.batch_size)
        assert not leaks_more or name in UNDECIDED, (mutant.what, influence, honest)
    print(f"{name}: {refused} of {MUTANTS} mutants refused")
    assert refused >= MUTANTS / 3
