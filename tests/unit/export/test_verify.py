"""A graph is believed only after it gave the same numbers as torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from export.graphs import export_graphs, export_unverified
from export.verify import reference_step, reference_update, verify
from fedvit.errors import ExportMismatch
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.optimizers import Sgd
from fedvit.methods.step import Serves, Step, Update, example_inputs, train_step, update_step
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch
from tests.support.codes import has_code
from tests.support.steps import whole

START = torch.tensor([1.0, 2.0, 4.0])
INPUTS = {"tensor/w": START, "hyper/step": torch.tensor(3.0)}


def step_graph(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("metric/loss", "new/tensor/w")) -> bytes:
    """A graph made by hand: w and step in, a loss and a new w out. `one`, `zero` are constants."""
    graph = helper.make_graph(
        list(nodes),
        "by hand",
        [
            helper.make_tensor_value_info("tensor/w", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("hyper/step", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
            helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content


LOSS = helper.make_node("ReduceSum", ["tensor/w"], ["metric/loss"], keepdims=0)
NEW_W = helper.make_node("Add", ["tensor/w", "one"], ["new/tensor/w"])


def reference(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """loss = sum(w) = 7, new w = w + 1."""
    return {"metric/loss": inputs["tensor/w"].sum(), "new/tensor/w": inputs["tensor/w"] + 1}


def off_by(loss: float = 0.0, new: float = 0.0) -> Any:
    def wrong(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        right = reference(inputs)
        change = torch.tensor([0.0, new, 0.0])
        return {"metric/loss": right["metric/loss"] + loss, "new/tensor/w": right["new/tensor/w"] + change}

    return wrong


def test_a_right_graph_passes_with_its_difference() -> None:
    assert verify(step_graph(LOSS, NEW_W), reference, INPUTS, "graph 'x'") == 0.0
    # verify returns the difference: The change of w is 1 (not w's size of 4): an error of 8e-7 in it is 8e-7, but
    # for the two last digits of 2.4e-7 each that a new value near 3 may lack. A loss of 7 that is 5e-6 off is 7e-7
    # off
    graph = step_graph(LOSS, NEW_W)
    assert verify(graph, off_by(new=8e-7), INPUTS, "graph 'x'") == pytest.approx(8e-7 - 2 * 2.0**-22, rel=1e-2)
    assert verify(graph, off_by(loss=5e-6), INPUTS, "graph 'x'") == pytest.approx(5e-6 / 7, rel=1e-2)
    assert verify(graph, off_by(loss=5e-6, new=8e-7), INPUTS, "graph 'x'") == pytest.approx(5e-6 / 7, rel=1e-2)


def test_an_update_that_is_wrong_is_named() -> None:
    """2e-6 of an update of 1 is more than eight roundings, although it is only 5e-7 of the weights."""
    with pytest.raises(ExportMismatch) as refused:
        verify(step_graph(LOSS, NEW_W), off_by(new=2e-6), INPUTS, "graph 'train'")
    assert str(refused.value) == (
        "graph 'train': output 'new/tensor/w' differs from torch by 1.52e-06 of the largest value of its kind, "
        "1.6 times what rounding explains: the graph computes something else"
    )


def test_a_loss_that_is_wrong_is_named() -> None:
    with pytest.raises(ExportMismatch, check=has_code("FV1117", "'metric/loss'")):
        verify(step_graph(LOSS, NEW_W), off_by(loss=1.4e-5), INPUTS, "graph 'train'")


@pytest.mark.parametrize(("digits", "agrees"), [(2, True), (-2, True), (3, False)])
def test_a_new_value_is_rounded_like_any_other(digits: int, agrees: bool) -> None:
    """Near 65 536 float32 counts in steps of 2^-7: a change of 1 comes out up to two steps off on either side, where a
    decayed value and its sum are rounded, and that is nobody's fault. Three steps are: one of them counts, 2^-7 of a
    change of 1 + 3 * 2^-7, 7.63e-3."""
    large = {**INPUTS, "tensor/w": torch.tensor([1.0, 65_536.0, 1.0])}
    graph = step_graph(LOSS, NEW_W)
    if agrees:
        assert verify(graph, off_by(new=digits * 2.0**-7), large, "graph 'x'") == 0.0
    else:
        with pytest.raises(ExportMismatch, check=has_code("FV1117", "'new/tensor/w'")):
            verify(graph, off_by(new=digits * 2.0**-7), large, "graph 'x'")


@pytest.mark.parametrize("bad", ["metric/loss", "new/tensor/w"])
def test_nan_is_a_difference(bad: str) -> None:
    """In any of the outputs, whichever comes first and however right the others are. 0/0 only at step 3, so that the
    look at a first step finds nothing."""
    broken = [
        helper.make_node("Sub", ["hyper/step", "one"], ["later"]),
        helper.make_node("Greater", ["later", "zero"], ["is_later"]),
        helper.make_node("Div", ["zero", "zero"], ["nan"]),
        helper.make_node("Where", ["is_later", "nan", "zero"], ["nan_later"]),
        helper.make_node("ReduceSum", ["tensor/w"], ["loss"], keepdims=0),
        helper.make_node("Add", ["tensor/w", "one"], ["w"]),
        helper.make_node("Add", ["loss", "nan_later" if bad == "metric/loss" else "zero"], ["metric/loss"]),
        helper.make_node("Add", ["w", "nan_later" if bad == "new/tensor/w" else "zero"], ["new/tensor/w"]),
    ]
    with pytest.raises(ExportMismatch, check=has_code("FV1117", f"'{bad}'")):
        verify(step_graph(*broken), reference, INPUTS, "graph 'train'")


def test_a_first_step_must_be_finite() -> None:
    """1 / (step - 1) is right at step 3 and infinite at step 1."""
    graph = step_graph(
        LOSS,
        helper.make_node("Sub", ["hyper/step", "one"], ["before"]),
        helper.make_node("Div", ["one", "before"], ["inverse"]),
        helper.make_node("Add", ["tensor/w", "inverse"], ["new/tensor/w"]),
    )

    def same(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return reference(inputs) | {"new/tensor/w": inputs["tensor/w"] + 1 / (inputs["hyper/step"] - 1)}

    with pytest.raises(ExportMismatch, check=has_code("FV1117", "'new/tensor/w'")):
        verify(graph, same, INPUTS, "graph 'train'")


def test_outputs_must_be_the_same() -> None:
    only_loss = step_graph(LOSS, outputs=("metric/loss",))
    with pytest.raises(ExportMismatch, check=has_code("FV1117", "'new/tensor/w'")):
        verify(only_loss, reference, INPUTS, "graph 'train'")


# --- the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_reference_is_the_step_that_is_traced(optimizer: Any, momentum: float) -> None:
    """Written twice, in two ways: eager autograd with torch.optim, and a pure function. In the middle of a phase, with
    slots that are not empty, and in float64; of gradients, of updates and of whole steps."""
    vit = build_vit(SMALL, 4, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2})
    vit = vit.double()
    method = EFTViT(optimizer=optimizer, momentum=momentum, weight_decay=0.1, local_blocks=1, mask=0.5, batch_size=4)
    (phase,) = method.phases(vit)
    rule = method.optimizer_rule()
    pairs: list[tuple[Serves, Step, Step]] = [
        (phase, train_step(method, vit, phase), reference_step(method, vit, phase)),
        (whole(phase), train_step(method, vit, whole(phase)), reference_step(method, vit, whole(phase))),
        (Update(rule), update_step(rule), reference_update(rule)),
    ]
    for serves, traced, reference in pairs:
        inputs = example_inputs(method, vit, tiny_batch(mask_ratio=0.5), serves)
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        want, got = reference(inputs), traced(inputs)
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


# --- export as a whole --------------------------------------------------------------------------------

GRAPHS = ("train", "update", "predict")
"""FedAvg's."""


class Uphill(Sgd):
    """Goes up where torch goes down."""

    def update(self, value: Tensor, grad: Tensor, slots: Any, lr: Tensor, step: Tensor) -> tuple[Tensor, Any]:
        return value + lr * grad, {}


@dataclass(frozen=True, kw_only=True)
class WrongSign(FedAvg):
    """A method whose traced step is not the step of its optimizer in torch."""

    source: ClassVar[str] = "made for this test"

    def optimizer_rule(self) -> Sgd:
        return Uphill()


def tiny_batch(**changed: Any) -> Batch:
    return Batch(image_size=16, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3, **changed)


@pytest.fixture(scope="module")
def one_block() -> PatchViT:
    options = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 1, "mlp_ratio": 1.0}
    return build_vit(SMALL, 3, seed=0, options=options)


def test_a_wrong_graph_is_not_kept(tmp_path: Path, one_block: PatchViT) -> None:
    """A graph in the cache would not be verified again. Uphill and downhill lie two steps apart: 2.0 relative."""
    with pytest.raises(ExportMismatch, check=has_code("FV1117", "'update'")):
        export_graphs(WrongSign(batch_size=4), one_block, tiny_batch(), cache=tmp_path)
    kept = [json.loads(path.read_text())["graph"] for path in tmp_path.rglob("*.json")]
    assert kept == ["train"], "whose gradients are right"
    assert len([*tmp_path.rglob("*.onnx")]) == 1


def test_graphs_come_out_of_the_cache_as_they_went_in(tmp_path: Path, one_block: PatchViT) -> None:
    """The second time nothing is exported: bytes, and the difference from torch, are those of the first. Another
    method's graph is none of them, and what is half there (facts are written last) does not count."""
    method = FedAvg(batch_size=4)
    said: list[str] = []
    first = export_graphs(method, one_block, tiny_batch(), cache=tmp_path, progress=said.append)
    assert {name: exported.cached for name, exported in first.items()} == dict.fromkeys(GRAPHS, False)
    assert all(0 <= exported.max_difference < 1e-5 for exported in first.values())
    assert any("exporting graph 'train'" in line for line in said)
    said.clear()
    second = export_graphs(method, one_block, tiny_batch(), cache=tmp_path, progress=said.append)
    assert {name: exported.cached for name, exported in second.items()} == dict.fromkeys(GRAPHS, True)
    assert not any("exporting" in line for line in said)
    for name, exported in first.items():
        assert second[name].content == exported.content
        assert second[name].max_difference == exported.max_difference
    files = sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file())
    assert files == [".json"] * 3 + [".onnx"] * 3 + [".seen"] * 3
    for facts in tmp_path.rglob("*.json"):
        if json.loads(facts.read_text())["graph"] == "predict":
            facts.unlink()
    third = export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    assert {name: exported.cached for name, exported in third.items()} == {
        **dict.fromkeys(GRAPHS, True),
        "predict": False,
    }
    assert third["predict"].content == first["predict"].content


def test_pricing_takes_graphs_out_of_the_cache(
    tmp_path: Path, one_block: PatchViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced again, for a simulation on torch and for the form of a method that a run has already."""
    method = FedAvg(batch_size=4)
    first = export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    monkeypatch.delattr("export.graphs.trace")
    priced = export_unverified(method, one_block, tiny_batch(), cache=tmp_path)
    assert priced == {name: exported.content for name, exported in first.items()}


@pytest.mark.parametrize("suffix", [".onnx", ".json", ".seen"])
def test_a_damaged_graph_does_not_come_out_of_the_cache(tmp_path: Path, one_block: PatchViT, suffix: str) -> None:
    """It is exported anew, and is the same to the byte."""
    method = FedAvg(batch_size=4)
    first = export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    for file in tmp_path.rglob(f"*{suffix}"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x80
        file.write_bytes(content)
    second = export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    assert [exported.cached for exported in second.values()] == [suffix == ".seen"] * 3
    assert all(second[name].content == exported.content for name, exported in first.items())


def test_a_graph_that_passed_another_check_is_checked_anew(
    tmp_path: Path, one_block: PatchViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced from the same origin and equal in content: what an older rule let pass says nothing of this one."""
    method = FedAvg(batch_size=4)
    monkeypatch.setattr("export.graphs.check_key", lambda: "older")
    export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    monkeypatch.undo()
    for origin in tmp_path.rglob("*.seen"):  # sources are in its name: those of an older check have another
        origin.unlink()
    again = export_graphs(method, one_block, tiny_batch(), cache=tmp_path)
    assert {name: exported.cached for name, exported in again.items()} == dict.fromkeys(GRAPHS, False)


def test_the_tiny_models_graphs_agree_with_torch(tiny: Any) -> None:
    """Float32 on a model of this size: a few roundings."""
    for name in ("eftvit", "fedavg"):
        for exported in tiny(name).graphs.values():
            assert exported.max_difference < 1e-5
