"""Attacks that the information-flow check refuses, on graphs that a device really gets."""

from collections.abc import Callable
from random import Random

import msgspec
import numpy as np
import pytest

from edge_client.trust.flow import MAX_DRAWS, MAX_GRAPH_BYTES, MAX_NODES, check_flow, check_images
from fedvit.blobs import digest_of
from fedvit.errors import NotAllowed
from fedvit.program import Draw, GraphSpec, Program
from tests.support.agents import with_local_head
from tests.support.codes import has_code
from tests.support.program_mutations import FLOAT, GraphEditor
from tests.support.settings import Setting

Edit = Callable[[GraphEditor], None]
OUTPUT = "new/grad/blocks.0.mlp.fc1.weight"


def edited(setting: Setting, edit: Edit, graph: str = "train") -> tuple[Program, Callable[[str], bytes]]:
    """Return the setting's Program with an edited graph, and a reader of its graphs."""
    program = setting.program
    editor = GraphEditor(setting.blobs.get(program.graphs[graph].digest))
    edit(editor)
    content = editor.content()
    spec = GraphSpec(digest_of(content), 1)
    program = msgspec.structs.replace(program, graphs={**program.graphs, graph: spec})
    return program, lambda digest: content if digest == spec.digest else setting.blobs.get(digest)


def refused(setting: Setting, edit: Edit, reason: str, graph: str = "train") -> None:
    program, graphs = edited(setting, edit, graph)
    with pytest.raises(NotAllowed, check=has_code("FV1441", reason)) as caught:
        check_flow(program, graphs)
    assert "\n" not in str(caught.value)


def put(output: str, source: str, *, added: bool = False) -> Edit:
    """Put the numbers of a value into an output, in the place of what is there or added to it."""

    def edit(editor: GraphEditor) -> None:
        shape, value = editor.shape(source), source
        if editor.model.inputs[source].dtype != FLOAT:
            value = editor.add("Cast", source, to=FLOAT)
        copy = editor.copy_to(value, shape, editor.shape(output), Random(0))
        before = editor.take_output(output)
        other = before if added else output.removeprefix("new/")
        if output.startswith("new/"):
            editor.insert("Add", (other, copy), output)
        else:
            editor.give_output(output, copy)

    return edit


def test_programs_pass_as_they_are(fedavg: Setting, parts: Setting, eftvit: Setting) -> None:
    for setting in (fedavg, parts, eftvit):
        flows = check_flow(setting.program, setting.blobs.get, min_mask=setting.program.batch.mask_ratio)
        check_images(setting.program, flows, 2)
        assert [flow.rows for flow in flows] == [None if setting is eftvit else 8]


# --- copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [True, False])
def test_a_shared_tensor_set_to_the_batch_is_refused(parts: Setting, added: bool) -> None:
    refused(parts, put(OUTPUT, "batch/patches", added=added), "takes single samples out of a batch")


def test_patches_in_place_of_features_are_refused(eftvit: Setting) -> None:
    collect = eftvit.program.train[0].collect
    assert collect
    output = f"collect/{collect.output}"

    def edit(editor: GraphEditor) -> None:
        shape, wanted = editor.shape("batch/patches"), editor.shape(output)
        flat = editor.add("Reshape", "batch/patches", editor.constant([shape[0], shape[1] * shape[2]], np.int64))
        bounds = [editor.constant([number], np.int64) for number in (0, wanted[1] * wanted[2], 1, 1)]
        copy = editor.add("Reshape", editor.add("Slice", flat, *bounds), editor.constant(list(wanted), np.int64))
        editor.take_output(output)
        editor.give_output(output, copy)

    refused(eftvit, edit, "is not made of images behind at least one block")


@pytest.mark.parametrize("source", ["batch/labels", "fact/class_counts"])
def test_labels_and_class_counts_in_the_loss_are_refused(parts: Setting, source: str) -> None:
    refused(parts, put("metric/loss", source), "copies")


def test_the_mean_of_a_batch_is_refused(parts: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        mean = editor.add("ReduceMean", "batch/patches", editor.constant([0], np.int64), keepdims=0)
        copy = editor.copy_to(mean, editor.shape("batch/patches")[1:], editor.shape(OUTPUT), Random(1))
        editor.insert("Add", (editor.take_output(OUTPUT), copy), OUTPUT)

    refused(parts, edit, "copies or averages")


@pytest.mark.parametrize("gate", ["Sigmoid", "Tanh"])
def test_a_copy_through_a_gate_is_refused(parts: Setting, gate: str) -> None:
    """The gate is a function of features of the same image, nearly 1 for all of them."""

    def edit(editor: GraphEditor) -> None:
        features = next(node.outputs[0] for node in editor.model.nodes if node.kind == "LayerNormalization")
        one = editor.add("ReduceMean", features, editor.constant([1, 2], np.int64), keepdims=1)
        copy = editor.add("Mul", "batch/patches", editor.add(gate, one))
        total = editor.add("ReduceSum", copy, editor.constant([0], np.int64), keepdims=0)
        copy = editor.copy_to(total, editor.shape("batch/patches")[1:], editor.shape(OUTPUT), Random(1))
        editor.insert("Add", (editor.take_output(OUTPUT), copy), OUTPUT)

    refused(parts, edit, "copies or averages")


def test_features_of_single_images_in_an_update_are_refused(parts: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        features = next(node.outputs[0] for node in editor.model.nodes if node.kind == "LayerNormalization")
        total = editor.add("ReduceSum", features, editor.constant([0], np.int64), keepdims=0)
        copy = editor.copy_to(total, editor.shape(features)[1:], editor.shape(OUTPUT), Random(1))
        editor.insert("Add", (editor.take_output(OUTPUT), copy), OUTPUT)

    refused(parts, edit, "has features of single images")


def put_products(layer: str) -> Edit:
    """Add products of a layer's first outputs with each other, summed over the samples, to an update."""

    def edit(editor: GraphEditor) -> None:
        values = next(node.outputs[0] for node in editor.model.nodes if node.kind == layer)
        count, size = editor.shape("batch/weight")[0], int(np.prod(editor.shape(values)))
        rows = editor.add("Reshape", values, editor.constant([count, size // count], np.int64))
        products = editor.add("Gemm", rows, rows, transA=1)
        copy = editor.copy_to(products, (size // count, size // count), editor.shape(OUTPUT), Random(1))
        editor.insert("Add", (editor.take_output(OUTPUT), copy), OUTPUT)

    return edit


def test_sums_of_products_of_features_pass_and_those_of_linear_layers_do_not(parts: Setting) -> None:
    """A regression sums features times features; behind linear layers alone they are pixels times pixels."""
    check_flow(*edited(parts, put_products("LayerNormalization")))
    refused(parts, put_products("Gemm"), "has features of single images")


def test_one_sample_chosen_from_a_batch_is_refused(parts: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        editor.insert("Mul", ("batch/weight", editor.constant([1, 0, 0])), "one", first=True)
        editor.read_instead("batch/weight", "one")

    refused(parts, edit, "weighs the samples of a batch differently")


def test_gradients_of_the_last_samples_alone_are_refused(parts: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        editor.insert("Sub", (editor.take_output(OUTPUT), OUTPUT.removeprefix("new/")), OUTPUT)

    refused(parts, edit, "is not added to the gradient of the samples before")


# --- personal tensors ---------------------------------------------------------------------------------


def test_a_local_head_passes_and_its_copy_does_not(parts: Setting) -> None:
    local = Setting(parts.name, parts.folder, with_local_head(parts), parts.first, parts.blobs)
    check_flow(local.program, local.blobs.get)
    refused(local, put(OUTPUT, "tensor/head.weight", added=True), "copies a local tensor")


def test_an_update_that_mixes_tensors_is_refused(parts: Setting) -> None:
    """It runs on pieces of all trained tensors as one vector, local ones among them."""

    def edit(editor: GraphEditor) -> None:
        total = editor.add("ReduceSum", "value", editor.constant([0], np.int64), keepdims=1)
        editor.insert("Add", (editor.take_output("new/value"), total), "new/value")

    refused(parts, edit, "ReduceSum' is not elementwise", parts.program.train[0].update or "")


# --- names, sizes, limits -----------------------------------------------------------------------------


def test_answers_that_copy_patches_are_refused(fedavg: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        copy = editor.copy_to("batch/patches", editor.shape("batch/patches"), editor.shape("logits"), Random(0))
        editor.take_output("logits")
        editor.give_output("logits", copy)

    refused(fedavg, edit, "'logits' copies", "predict")


def test_an_unknown_operator_is_refused(fedavg: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        editor.insert("Identity", (editor.add("Sin", editor.take_output("metric/loss")),), "metric/loss")

    refused(fedavg, edit, "operator 'Sin'")


def test_an_output_that_the_phase_does_not_have_is_refused(fedavg: Setting) -> None:
    program = fedavg.program
    phase = msgspec.structs.replace(program.train[0], slots=())
    with pytest.raises(NotAllowed, check=has_code("FV1441", "slot/")):
        check_flow(msgspec.structs.replace(program, train=(phase,)), fedavg.blobs.get)


def test_more_random_numbers_than_any_method_draws_are_refused(fedavg: Setting) -> None:
    draw = Draw(name="x", low=0, high=2, count=MAX_DRAWS // 2)
    draws = tuple(msgspec.structs.replace(draw, name=name) for name in "abc")
    phase = msgspec.structs.replace(fedavg.program.train[0], draws=draws)
    with pytest.raises(NotAllowed, check=has_code("FV1441", str(MAX_DRAWS))):
        check_flow(msgspec.structs.replace(fedavg.program, train=(phase,)), fedavg.blobs.get)


def test_features_below_the_least_mask_are_refused(eftvit: Setting) -> None:
    with pytest.raises(NotAllowed, check=has_code("FV1441", "leave out 0.5 of the patches")):
        check_flow(eftvit.program, eftvit.blobs.get, min_mask=0.75)


@pytest.mark.parametrize("images", [0, 1])
def test_an_update_of_one_image_is_refused(fedavg: Setting, images: int) -> None:
    flows = check_flow(fedavg.program, fedavg.blobs.get)
    with pytest.raises(NotAllowed, check=has_code("FV1441", f"an update of {images} training images")):
        check_images(fedavg.program, flows, images)


def test_graphs_that_are_too_large_are_refused(fedavg: Setting) -> None:
    def many(editor: GraphEditor) -> None:
        for _ in range(MAX_NODES):
            editor.add("Neg", "metric/loss")

    refused(fedavg, many, str(MAX_NODES))
    refused(fedavg, lambda editor: str(editor.constant(np.zeros(MAX_GRAPH_BYTES // 4))), str(MAX_GRAPH_BYTES))


def test_a_node_before_what_it_reads_is_refused(fedavg: Setting) -> None:
    def edit(editor: GraphEditor) -> None:
        editor.insert("Neg", ("metric/loss",), "early", first=True)

    refused(fedavg, edit, "before it is there")
