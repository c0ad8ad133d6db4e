"""The model of text: what a position reads, and which methods train it."""

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from coordinator.compute.planning.batch import method_batch
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, build_model, make_method
from fedvit.methods.fedala import MIX
from fedvit.methods.step import example_inputs, predict_step, steps_of, whole_step
from fedvit.models import TEXT
from fedvit.models.text import TextTransformer, make_sinusoids
from fedvit.program import Role, Train
from tests.support.plays import TEXT_MODEL

CLASSES = 7


def model(method: str = "fedavg", **options: Any) -> TextTransformer:
    made = build_model(make_method(method), TEXT, CLASSES, seed=0, options={**TEXT_MODEL, **options})
    assert isinstance(made, TextTransformer)
    return made


def logits(vit: TextTransformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return vit.classify(vit.run_to_class(vit.embed(tokens), 0))


@pytest.mark.parametrize(("head_width", "form"), [(None, "vit"), (4, "vit"), (4, "fedtp")])
def test_causal_model_reads_no_later_character(head_width: int | None, form: str) -> None:
    vit = model(head_width=head_width, form=form)
    tokens = torch.randint(0, CLASSES, (3, 8), generator=torch.Generator().manual_seed(1))
    before = logits(vit, tokens)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % CLASSES
        moved = (logits(vit, changed) != before).any(dim=2)
        assert not moved[:, :place].any()
        assert moved[:, place:].all()


def test_model_without_the_mask_reads_its_answer() -> None:
    vit = model(causal=False)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 1] = 1
    assert (logits(vit, tokens)[0, 0] != logits(vit, changed)[0, 0]).all(), "it is the label of position 0"


def test_model_has_the_tensors_of_its_options() -> None:
    vit = model(head_width=4, depth=1)
    shapes = {name: tuple(value.shape) for name, value in vit.tensors().items()}
    assert shapes["token_embed.weight"] == (CLASSES, 16)
    assert shapes["pos_embed"] == (1, 8, 16)
    assert shapes["blocks.0.attn.qkv.weight"] == (24, 16)
    assert "blocks.0.attn.qkv.bias" not in shapes
    assert shapes["head.weight"] == (CLASSES, 16)
    assert (vit.context, vit.width, vit.depth, vit.heads, vit.classes) == (8, 16, 1, 2, CLASSES)


def test_fedtps_released_form() -> None:
    """Sinusoids that nobody trains, norms behind each sum, no biases but the MLP's, and small logits."""
    vit = model(form="fedtp", head_width=4, depth=1)
    assert [*vit.tensors()] == [
        "token_embed.weight", "norm_pre.weight", "norm_pre.bias",
        *(f"blocks.0.{name}" for name in (
            "attn.qkv.weight", "attn.proj.weight", "norm1.weight", "norm1.bias", "mlp.fc1.weight", "mlp.fc1.bias",
            "mlp.fc2.weight", "mlp.fc2.bias", "norm2.weight", "norm2.bias",
        )),
        "head.weight",
    ]  # fmt: skip
    tokens = torch.randint(0, CLASSES, (3, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = vit.features(vit.run_to_class(vit.embed(tokens), 0))
    torch.testing.assert_close(features.mean(dim=2), torch.zeros(3, 8), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(vit, tokens), features @ vit.tensors()["head.weight"].T / 4)
    places = make_sinusoids(8, 16)[0]
    assert places[0].tolist() == [0.0, 1.0] * 8
    assert places[3, 5].item() == pytest.approx(math.cos(3 / 10_000 ** (4 / 16)))


@pytest.mark.parametrize("name", METHODS)
def test_methods_train_text_or_refuse_it(name: str) -> None:
    """A method that takes the model of text has steps that lower the loss, and logits for every position."""
    lr = 0.05 if make_method(name).optimizer == "sgd" else 0.001
    method = make_method(name, {"batch_size": 4, "lr": lr})
    if not method.reads_text:
        with pytest.raises(ConfigError):
            build_model(method, TEXT, CLASSES, seed=0, options=TEXT_MODEL)
        return
    vit = build_model(method, TEXT, CLASSES, seed=0, options=TEXT_MODEL)
    batch = method_batch(method, vit)
    graphs = steps_of(method, vit)
    # FedALA's first phase moves no loss where it begins, and IFCA's first two choose a model
    phases = [phase for phase in method.phases(vit) if phase.graph != MIX]
    phase = phases[-1 if name == "ifca" else 0]
    assert isinstance(phase, Train)
    inputs = example_inputs(method, vit, batch, phase)
    inputs |= {"hyper/lr": torch.tensor(lr), "hyper/step": torch.tensor(1.0)}
    for slot in phase.slots:
        inputs |= {
            f"slot/{slot}/{n}": torch.zeros_like(inputs[f"tensor/{n}"]) for n in method.names_in(vit, *phase.groups)
        }
    step, losses = whole_step(method, vit, phase), []
    for _ in range(3):
        outputs = step(inputs)
        losses.append(float(outputs["metric/loss"]))
        inputs |= {key.removeprefix("new/"): value for key, value in outputs.items() if key.startswith("new/")}
    assert losses[-1] < losses[0]
    predicted = predict_step(method, vit)(example_inputs(method, vit, batch, graphs["predict"]))
    assert predicted["logits"].shape == (batch.answer_size, 8, CLASSES)


def test_fedtp_generates_the_projections_of_text() -> None:
    method = make_method("fedtp")
    groups = method.groups(build_model(method, TEXT, CLASSES, seed=0, options=TEXT_MODEL))
    assert groups["attention"] == (Role.GENERATED, ["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"])


@pytest.mark.parametrize(("causal", "low", "high"), [(True, 0.0, 0.35), (False, 0.7, 1.0)])
def test_labels_leak_without_the_mask(causal: bool, low: float, high: float) -> None:
    """On characters drawn at random a fifth is right by chance; without the mask all are but the last of a sample."""
    method = make_method("fedavg", {"batch_size": 64, "optimizer": "adamw", "lr": 0.01})
    vit = build_model(method, TEXT, 5, seed=0, options={**TEXT_MODEL, "context": 4, "causal": causal})
    (phase,) = method.phases(vit)
    step = whole_step(method, vit, phase)
    draw = torch.Generator().manual_seed(0)
    inputs = example_inputs(method, vit, method_batch(method, vit), msgspec.structs.replace(phase, update=None))
    inputs |= {name: torch.zeros_like(value) for name, value in inputs.items() if name.startswith("slot/")}
    inputs["batch/weight"] = torch.ones(64)
    for number in range(120):
        windows = torch.randint(0, 5, (64, 5), generator=draw)
        inputs |= {"batch/tokens": windows[:, :-1], "batch/labels": windows[:, 1:]}
        inputs["hyper/step"] = torch.tensor(number + 1.0)
        outputs = step(inputs)
        inputs |= {name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")}
    windows = torch.randint(0, 5, (512, 5), generator=draw)
    answers = predict_step(method, vit)({**inputs, "batch/tokens": windows[:, :-1]})["logits"].argmax(dim=2)
    right = (answers == windows[:, 1:]).float()
    assert low < right.mean() < high
    assert right[:, -1].mean() < 0.35, "the last position has nothing to read its answer from"
