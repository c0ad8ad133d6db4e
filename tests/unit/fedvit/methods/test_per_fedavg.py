"""Per-FedAvg's step in float64: closed forms on a parabola, two plain steps on a ViT; and what a test leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor

from edge_client.work.runtime import ModelTest, Runtime, Seeds, Watch
from export.trace import to_onnx, trace
from fedvit.data.folder import DeviceData
from fedvit.methods import make_method
from fedvit.methods.base import PREDICT, Images, Method, StepInputs, list_trained
from fedvit.methods.calculus import Named, Objective, TorchCalculus
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.per_fedavg import ADAPT, PerFedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import example_inputs, predict_step, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train
from tests.support.quadratic import BATCH, HALF, Inputs, in_double, small

RATE, INNER = 0.25, 0.125
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Parabola(PerFedAvg):
    """f(x) = c x^2 / 2 in every number x; c is the mean label of the images in the half."""

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        squares = torch.stack([value.square().sum() for value in tensors.values()]).sum()
        return Objective(0.5 * inputs.mean(inputs.labels.double()) * squares, {})


def inputs_of(method: Method, vit: PatchViT, phase: Train, *, labels: list[int], weight: list[int]) -> Inputs:
    """Anything plausible in a batch of 8, with slots as in the middle of a phase."""
    inputs = example_inputs(method, vit, BATCH, phase)
    inputs |= {
        "batch/labels": torch.tensor(labels),
        "batch/weight": torch.tensor(weight),
        "hyper/lr": torch.tensor(RATE),
    }
    inputs["batch/weight"] = inputs["batch/weight"].float()
    return in_double(inputs)


def training(method: Method, vit: PatchViT) -> Train:
    (phase,) = method.phases(vit)
    return phase


def adaptation(method: Method, vit: PatchViT) -> Train:
    (phase,) = method.evaluate(vit).adapt
    return phase


def factor(method: Method, vit: PatchViT, phase: Train, **batch: list[int]) -> float:
    """What one step multiplies every tensor with."""
    inputs = inputs_of(method, vit, phase, **batch)
    outputs = whole_step(method, vit, phase)(inputs)
    ratios = [outputs[f"new/tensor/{name}"] / inputs[f"tensor/{name}"] for name in list_trained(method, vit, phase)]
    every = torch.cat([ratio.flatten() for ratio in ratios])
    torch.testing.assert_close(every, every[0].expand_as(every), rtol=1e-6, atol=0)
    return float(every.mean())


def state_of(outputs: Named, prefix: str = "new/") -> dict[str, Tensor]:
    """New tensors and slots, named as the inputs that they replace."""
    return {name.removeprefix(prefix): value for name, value in outputs.items() if name.startswith(prefix)}


FULL = {"labels": [1, 3, 1, 3, 1, 3, 1, 3], "weight": [1] * 8}
"""c1 = 1 in the half that adapts, c2 = 3 in the half whose gradient moves the model."""


# --- closed forms -------------------------------------------------------------------------------------


def test_first_order_on_a_parabola(vit: PatchViT) -> None:
    """x' = (1 - a c1) x; x - b c2 x'."""
    method = Parabola(inner_lr=INNER)
    expected = 1 - RATE * 3 * (1 - INNER * 1)
    assert factor(method, vit, training(method, vit), **FULL) == pytest.approx(expected, rel=1e-10)


def test_hessian_free_on_a_parabola(vit: PatchViT) -> None:
    """The gradient of f2(x - a grad f1(x)) is c2 (1 - a c1)^2 x: a difference of gradients is exact where they are
    linear."""
    method = Parabola(inner_lr=INNER, order="hessian_free")
    expected = 1 - RATE * 3 * (1 - INNER * 1) ** 2
    assert factor(method, vit, training(method, vit), **FULL) == pytest.approx(expected, rel=1e-7)


def test_adaptation_has_the_methods_rate_by_default(vit: PatchViT) -> None:
    """The schedule lowers the step's rate, which the graph is given, and not the adaptation's, which devices are
    tested with."""
    method = Parabola(lr=0.5)
    assert method.adaptation_lr == adaptation(method, vit).lr == 0.5
    expected = 1 - RATE * 3 * (1 - 0.5 * 1)
    assert factor(method, vit, training(method, vit), **FULL) == pytest.approx(expected, rel=1e-10)
    assert adaptation(Parabola(lr=0.5, inner_lr=INNER), vit).lr == INNER


def test_padding_has_no_say(vit: PatchViT) -> None:
    """Six images in a batch of eight, three in each half: c2 = 2, c1 = 4."""
    method = Parabola(inner_lr=INNER)
    got = factor(method, vit, training(method, vit), labels=[4, 1, 4, 2, 4, 3, 9, 9], weight=[1] * 6 + [0] * 2)
    assert got == pytest.approx(1 - RATE * 2 * (1 - INNER * 4), rel=1e-10)


@pytest.mark.parametrize("images", [2, 3, 4])
def test_a_device_with_few_images_learns(vit: PatchViT, images: int) -> None:
    """No more than half a batch: it is divided among both losses, c1 = 1 and c2 = 3."""
    method = Parabola(inner_lr=INNER)
    weight = [1] * images + [0] * (8 - images)
    got = factor(method, vit, training(method, vit), labels=FULL["labels"], weight=weight)
    assert got == pytest.approx(1 - RATE * 3 * (1 - INNER * 1), rel=1e-10)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
@pytest.mark.parametrize("optimizer", [{}, MOMENTUM, ADAMW])
def test_a_single_image_moves_nothing(vit: PatchViT, optimizer: dict[str, Any], order: str) -> None:
    """Not a bit, whatever momentum and weight decay would do; nor do the slots."""
    method = make_method("per_fedavg", {"order": order, **optimizer})
    phase = training(method, vit)
    inputs = inputs_of(method, vit, phase, labels=[0] * 8, weight=[1, 0, 0, 0, 0, 0, 0, 0])
    new = state_of(whole_step(method, vit, phase)(inputs))
    assert new.keys() == {name for name in inputs if name.startswith(("tensor/", "slot/"))}
    assert all(torch.equal(value, inputs[name]) for name, value in new.items())


# --- on a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{}, MOMENTUM, ADAMW])
def test_it_is_fedavgs_gradient_after_one_plain_step(vit: PatchViT, optimizer: dict[str, Any]) -> None:
    """FedAvg's plain step on the first half gives theta'; FedAvg's gradient of the second half there is what torch's
    optimizer gets at theta."""
    labels, weight = [0, 1, 2, 0, 1, 2, 0, 1], [1] * 7 + [0]
    method = make_method("per_fedavg", {"inner_lr": INNER, **optimizer})
    phase = training(method, vit)
    inputs = inputs_of(method, vit, phase, labels=labels, weight=weight)
    outputs = whole_step(method, vit, phase)(inputs)

    def half(first: int, tensors: Named) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient and the loss of every other row, by a plain step of rate 1."""
        rows = {name: value[first::2] for name, value in inputs.items() if name.startswith("batch/")}
        plain = {**inputs, **tensors, **rows, "hyper/lr": torch.tensor(1.0, dtype=torch.float64)}
        outputs = whole_step(FedAvg(), vit, training(FedAvg(), vit))(plain)
        return {name: value - state_of(outputs)[name] for name, value in tensors.items()}, outputs["metric/loss"]

    start = {name: value for name, value in inputs.items() if name.startswith("tensor/")}
    first, before = half(0, start)
    second, after = half(1, {name: value - INNER * first[name] for name, value in start.items()})
    calculus = TorchCalculus(method.optimizer_rule(), inputs)
    bare = {name.removeprefix("tensor/"): value for name, value in start.items()}
    want = calculus.update(bare, {name.removeprefix("tensor/"): value for name, value in second.items()})
    for name, value in want.items():
        torch.testing.assert_close(outputs[f"new/tensor/{name}"], value, rtol=1e-9, atol=1e-13)
    for slot, value in calculus.slots.items():
        torch.testing.assert_close(outputs[f"new/slot/{slot}"], value, rtol=1e-9, atol=1e-13)
    # every image's loss where it was used: 4 before the adaptation, 3 after it
    torch.testing.assert_close(outputs["metric/loss"], (4 * before + 3 * after) / 7, rtol=1e-9, atol=0)


def test_hessian_free_is_the_gradient_through_the_adaptation(vit: PatchViT) -> None:
    """Autograd of f2(x - a grad f1(x)) on a model that is no parabola; without the Hessian it is another step."""
    steps: dict[str, dict[str, Tensor]] = {}
    for order in ("first", "hessian_free"):
        method = make_method("per_fedavg", {"order": order, "inner_lr": INNER})
        phase = training(method, vit)
        inputs = inputs_of(method, vit, phase, labels=[0, 1, 2, 0, 1, 2, 0, 1], weight=[1] * 8)
        new = state_of(whole_step(method, vit, phase)(inputs))
        steps[order] = {name: (inputs[name] - value) / RATE for name, value in new.items()}

    def loss(at: dict[str, Tensor], rows: slice) -> Tensor:
        images = Images(inputs["batch/patches"][rows], None)
        logits = (
            FedAvg().forward(vit, {name.removeprefix("tensor/"): value for name, value in at.items()}, images).logits
        )
        return torch.nn.functional.cross_entropy(logits, inputs["batch/labels"][rows])

    def adapted(at: dict[str, Tensor]) -> Tensor:
        inner = torch.func.grad(loss)(at, slice(0, None, 2))
        return loss({name: value - INNER * inner[name] for name, value in at.items()}, slice(1, None, 2))

    exact = torch.func.grad(adapted)({name: inputs[name] for name in steps["first"]})

    def apart(order: str) -> float:
        squares = [(steps[order][name] - value).square().sum() for name, value in exact.items()]
        return float(torch.stack(squares).sum().sqrt())

    length = float(torch.stack([value.square().sum() for value in exact.values()]).sum().sqrt())
    assert apart("hessian_free") < 1e-4 * length
    assert apart("first") > 1e-2 * length


def test_two_batches_in_one_run_of_the_graph(vit: PatchViT) -> None:
    method = PerFedAvg(batch_size=4)
    assert method.samples_per_step == 8
    assert method.groups(vit) == {"model": (Role.SHARED, list(vit.tensors()))}
    assert method.server_rule(vit) == WeightedMean()


# --- evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{}, MOMENTUM, ADAMW])
def test_a_test_adapts_by_one_plain_step_on_half_a_batch(vit: PatchViT, optimizer: dict[str, Any]) -> None:
    """Without momentum, without weight decay: x - a c x, c the mean label of the first half."""
    method = Parabola(**optimizer, inner_lr=INNER, batch_size=4)
    phase = adaptation(method, vit)
    assert (phase.graph, phase.epochs, phase.steps, phase.groups) == (ADAPT, 1, 1, ("model",))
    got = factor(method, vit, phase, labels=[1, 1, 1, 1, 3, 3, 3, 3], weight=[1] * 8)
    assert got == pytest.approx(1 - RATE * 1, rel=1e-10)


def picture_folder(folder: Path) -> DeviceData:
    """Noise: 8 training and 4 test images of 2 classes."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for name in ("ant", "bee"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return DeviceData.open(folder)


def test_a_test_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device's own software, with real graphs: the adapted model gives other answers, and the tensors that were
    handed in are the same bits afterwards."""
    method, vit = PerFedAvg(batch_size=4, inner_lr=5.0), small(2)
    batch = Batch(image_size=16, patch_size=8, batch_size=8, mean=HALF, std=HALF)
    phase = adaptation(method, vit)
    answers: list[np.ndarray] = []

    class Listening(onnxruntime.InferenceSession):
        """A session that keeps its answers."""

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            outputs = super().run(output_names, input_feed, run_options)
            answers.extend(values for name, values in zip(output_names, outputs, strict=True) if name == "logits")
            return outputs

    monkeypatch.setattr(onnxruntime, "InferenceSession", Listening)
    runtime, graphs = Runtime(1), {}
    for name, step, of in ((ADAPT, whole_step(method, vit, phase), phase), (PREDICT, predict_step(method, vit), None)):
        file = tmp_path / f"{name}.onnx"
        file.write_bytes(to_onnx(trace(step, example_inputs(method, vit, batch, of))))
        runtime.open(name, file)
        graphs[name] = GraphSpec(name, 1)
    values = {name: value.numpy().copy() for name, value in vit.tensors().items()}
    program = Program(
        method="per_fedavg",
        model=SMALL,
        classes=("ant", "bee"),
        groups={"model": TensorGroup(Role.SHARED)},
        tensors={name: TensorSpec(value.shape, "float32", "model") for name, value in values.items()},
        graphs=graphs,
        train=method.phases(vit),
        evaluate=method.evaluate(vit),
        batch=batch,
    )
    data = picture_folder(tmp_path / "data")
    before = {name: value.tobytes() for name, value in values.items()}
    for value in values.values():
        value.flags.writeable = False
    watch, seeds = Watch(lambda *_: None, lambda: False), Seeds(run=1, round=1, device="pi")
    adapted = runtime.evaluate(ModelTest(program, values, data, seeds), watch)
    again = runtime.evaluate(ModelTest(program, values, data, seeds), watch)
    assert {name: value.tobytes() for name, value in values.items()} == before
    assert adapted == again
    with torch.no_grad():
        fed = {f"tensor/{name}": torch.tensor(value) for name, value in values.items()}
        patches = torch.zeros(8, batch.patches, batch.patch_values)
        plain = predict_step(method, vit)({**fed, "batch/patches": patches})["logits"].numpy()
    # rows 4 to 7 are padding: the same zeros for both models
    np.testing.assert_array_equal(answers[0], answers[1])
    assert np.abs(answers[0][4:] - plain[4:]).max() > 0.1
