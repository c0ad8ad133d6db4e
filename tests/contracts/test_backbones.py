"""Models that are no Transformers: with every method that can train them they keep the contract, others say why not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coordinator.compute.planning.batch import method_batch
from export.graphs import export_graphs
from export.verify import reference_step
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, build_model, make_method
from fedvit.methods.base import list_trained
from fedvit.methods.calculus import TorchCalculus
from fedvit.methods.step import example_inputs, steps_of, whole_step
from fedvit.models import CNN, LSTM, RESNET, TEXT
from fedvit.program import Train
from profiles.cost import flop_shares, graph_cost
from tests.support.steps import Session, assert_names_of_the_contract, in_parts, whole
from tests.support.tiny import Tiny

BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": (LSTM, {"context": 4, "embedding": 3, "width": 6, "depth": 2}),
    "resnet": (RESNET, {"image_size": 8, "width": 4, "stages": 2, "groups": 2}),
    "cnn": (CNN, {"image_size": 16, "width": 2}),
    "cnn with norms": (CNN, {"image_size": 16, "width": 2, "groups": 1}),
    "bottlenecks": (RESNET, {"image_size": 9, "width": 4, "stages": 2, "groups": 2, "block": "bottleneck"}),
}
CLASSES = 5
OPTIONS = {"batch_size": 8, "micro_batch": 3, "epochs": 2, "lr": 0.003}
PARTS: dict[str, dict[str, Any]] = {"personal_part": {"part": "head"}}
"""Options with which a method needs no Transformer."""
TRAINED = {
    "lstm": {
        "apfl", "ditto", "fed_bias", "fed_head", "fedala", "fedavg", "fedbabu", "feddyn", "fednova", "fedntd",
        "fedopt", "fedper", "fedprox", "fedrep", "ifca", "local", "per_fedavg", "personal_part", "pfedhn", "pfedme",
        "scaffold",
    },
}  # fmt: skip
TRAINED["resnet"] = TRAINED["lstm"] | {
    "analytic",
    "fedas",
    "fedbn",
    "fedcp",
    "feddbe",
    "feddf",
    "fedpac",
    "fedproto",
    "fedrod",
    "gpfl",
    "knn_per",
    "moon",
    "personal_analytic",
}
CASES = [(backbone, name) for backbone, names in TRAINED.items() for name in sorted(names)]
CASES += [("bottlenecks", "fedavg"), ("bottlenecks", "fedrod"), ("cnn with norms", "fedbn")]
CASES += [
    ("cnn", "fedavg"),
    ("cnn", "pfedhn"),
    ("cnn", "fedrod"),
]


def test_page_says_which_methods_train_which_models() -> None:
    _, _, behind = Path("docs/methods.md").read_text().partition("| method | LSTM | ResNet |\n|---|---|---|\n")
    rows = [row.split("|")[1:4] for row in behind.partition("\n\n")[0].splitlines()]
    named = [set(re.findall(r"`(\w+)`", methods)) & METHODS.keys() for methods, *_ in rows]
    both, with_norms, for_images, _ = named
    assert both == TRAINED["lstm"]
    assert both | (with_norms - {"fedtp"}) | for_images == TRAINED["resnet"]  # fedtp has an option for it


@pytest.fixture(scope="module")
def tiny(graph_cache: Path) -> Callable[[str, str], Tiny]:
    made: dict[tuple[str, str], Tiny] = {}

    def make(backbone: str, name: str) -> Tiny:
        if (backbone, name) not in made:
            method = make_method(name, {**OPTIONS, **PARTS.get(name, {})})
            model, options = BACKBONES[backbone]
            vit = build_model(method, model, CLASSES, seed=0, options=options)
            batch = method_batch(method, vit)
            made[backbone, name] = Tiny(method, vit, batch, export_graphs(method, vit, batch, cache=graph_cache))
        return made[backbone, name]

    return make


def phases(made: Tiny) -> list[Train]:
    return [phase for phase in steps_of(made.method, made.vit).values() if isinstance(phase, Train)]


@pytest.mark.parametrize(("backbone", "name"), CASES)
def test_graphs_have_the_names_of_the_contract_and_no_operators_of_other_domains(
    backbone: str, name: str, tiny: Any
) -> None:
    """They were verified against torch when they were exported. Any onnxruntime runs them, and nothing is a loop."""
    made = tiny(backbone, name)
    for graph, serves in steps_of(made.method, made.vit).items():
        model = onnx.load_from_string(made.graphs[graph].content)
        inputs, outputs = ({value.name for value in side} for side in (model.graph.input, model.graph.output))
        if backbone == "lstm":  # the names of the contract are those of images
            inputs = {name.replace("batch/tokens", "batch/patches") for name in inputs}
        assert_names_of_the_contract(made.method, made.vit, serves, inputs, outputs)
        assert {node.domain for node in model.graph.node} == {""}
        assert not {"Loop", "Scan", "If", "LSTM"} & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(("backbone", "name"), CASES)
def test_a_step_in_parts_is_torchs_step(backbone: str, name: str, tiny: Any) -> None:
    """Of the whole batch, with backward() and torch.optim; also the parts of a last batch that is not full."""
    made = tiny(backbone, name)
    for phase in phases(made):
        inputs = example_inputs(made.method, made.vit, made.batch, whole(phase))
        run = Session(made.graphs[phase.graph].content)
        if phase.update:
            names = list_trained(made.method, made.vit, phase)
            update = Session(made.graphs[phase.update].content)
            got = in_parts(phase, names, run, update, made.batch.run_size)(inputs)
        else:
            got = run(inputs)
        want = whole_step(made.method, made.vit, phase, TorchCalculus)(inputs)
        for key in list_trained(made.method, made.vit, phase):
            assert_change(got, want, inputs, key)
        torch.testing.assert_close(got["metric/loss"], want["metric/loss"], rtol=1e-4, atol=1e-6)


def assert_change(got: Any, want: Any, inputs: dict[str, Tensor], key: str) -> None:
    """Within 1e-3 of the tensor's largest change, and two last digits of the value."""
    start, new = inputs[f"tensor/{key}"], want[f"new/tensor/{key}"]
    largest = (new - start).abs().max()
    assert largest > 0, f"{key} did not move"
    assert (got[f"new/tensor/{key}"] - new).abs().max() <= 1e-3 * largest + 3e-7 * new.abs().max(), key


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"recompute": True}),
        ("fed_head", {"frozen_precision": "int8"}),
        ("fed_head", {"frozen_precision": "fp16"}),
        ("fed_head", {"compute": "int8"}),
        ("fedbabu", {"compute": "fp16"}),
    ],
)
def test_forms_that_a_budget_may_choose_are_torchs(
    backbone: str, name: str, options: dict[str, Any], graph_cache: Path
) -> None:
    """Exported, and verified; weights that are sent packed have the axes of convolutions, too."""
    method = make_method(name, {**OPTIONS, **options})
    model, sizes = BACKBONES[backbone]
    vit = build_model(method, model, CLASSES, seed=0, options=sizes)
    graphs = export_graphs(method, vit, method_batch(method, vit), cache=graph_cache)
    assert graphs.keys() == {*steps_of(method, vit)}


@pytest.mark.parametrize("backbone", TRAINED)
@pytest.mark.parametrize("name", METHODS)
def test_other_methods_say_what_the_model_lacks(backbone: str, name: str) -> None:
    """The table above is complete."""
    model, options = BACKBONES[backbone]
    method = make_method(name, PARTS.get(name, {}))
    if name in TRAINED[backbone]:
        build_model(method, model, CLASSES, seed=0, options=options)
        return
    with pytest.raises(ConfigError) as refused:
        build_model(method, model, CLASSES, seed=0, options=options)
    assert refused.value.code in ("FV1110", "FV1111")  # it needs images, or a part
    assert repr(model) in str(refused.value)


@pytest.mark.parametrize("name", ["fedavg", "fedtp"])
def test_fedtps_model_of_text_is_exported(name: str, graph_cache: Path) -> None:
    """Exported, and verified against torch; its positions are constants of the graph."""
    method = make_method(name, OPTIONS)
    options = {"context": 4, "width": 8, "heads": 2, "head_width": 3, "depth": 2, "form": "fedtp"}
    vit = build_model(method, TEXT, CLASSES, seed=0, options=options)
    graphs = export_graphs(method, vit, method_batch(method, vit), cache=graph_cache)
    assert graphs.keys() == {*steps_of(method, vit)}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_flops_are_those_of_torchs_counter_and_belong_to_the_layers_that_need_them(backbone: str, tiny: Any) -> None:
    """Backward costs twice what forward does, but of the stem, whose images need no gradient."""
    made = tiny(backbone, "fedavg")
    [phase] = phases(made)
    with FlopCounterMode(display=False) as counter:
        reference_step(made.method, made.vit, phase)(example_inputs(made.method, made.vit, made.batch, phase))
    cost = graph_cost(made.graphs["train"].content)
    assert cost.flops == counter.get_total_flops()
    shares = {(block, kind): (forward, backward) for block, kind, forward, backward in flop_shares(cost)}
    layers = {kind for _, kind in shares}
    assert (
        layers
        == {
            "lstm": {"embedding", "input_weight", "state_weight", "head"},
            "cnn": {"embedding", "conv", "linear", "head"},
            "cnn with norms": {"embedding", "conv", "linear", "head"},
            "resnet": {"embedding", "conv1", "conv2", "shortcut", "head"},
            "bottlenecks": {"embedding", "conv1", "conv2", "conv3", "shortcut", "head"},
        }[backbone]
    )
    for (block, _), (forward, backward) in shares.items():
        if block != "embedding":
            assert backward == 2 * forward
        elif backbone != "lstm":  # the embedding of text is a table, whose gradient is a product
            assert backward == forward


@pytest.mark.parametrize("backbone", BACKBONES)
def test_memory_of_activations_is_known_before_there_is_a_graph(backbone: str, tiny: Any) -> None:
    """By formula, up to a factor of two, which decides how many samples a device takes at a time."""
    made = tiny(backbone, "fedavg")
    counted = graph_cost(made.graphs["train"].content).activation_bytes / made.batch.run_size
    assert 0.5 < made.vit.activation_bytes(made.batch.tokens) / counted < 2
