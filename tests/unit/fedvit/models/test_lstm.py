"""The recurrent model of text: that it is torch's LSTM, what a position reads, and which methods train it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coordinator.compute.planning.batch import suitable_run_size
from coordinator.compute.planning.checks import checked_config
from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.models import LSTM
from fedvit.models.lstm import TextLstm
from fedvit.program import Batch, Role, Text
from tests.support.codes import has_code
from tests.support.counterparts import for_torchs_lstm
from tests.support.plays import LSTM_MODEL

CLASSES = 7


def model(method: str = "fedavg", **options: Any) -> TextLstm:
    made = build_model(make_method(method), LSTM, CLASSES, seed=0, options={**LSTM_MODEL, **options})
    assert isinstance(made, TextLstm)
    return made


def logits(vit: TextLstm, tokens: Tensor) -> Tensor:
    return vit.classify(vit.run_to_class(vit.embed(tokens), 0))


def tokens(samples: int = 3) -> Tensor:
    return torch.randint(0, CLASSES, (samples, 8), generator=torch.Generator().manual_seed(1))


def in_torch(vit: TextLstm) -> nn.LSTM:
    """torch's LSTM of the same tensors."""
    layers = nn.LSTM(4, vit.width, vit.depth, batch_first=True).double()
    with torch.no_grad():
        for layer in range(vit.depth):
            for name, value in for_torchs_lstm(vit.tensors(), layer).items():
                getattr(layers, name).copy_(value)
    return layers


def test_states_and_gradients_are_those_of_torchs_lstm() -> None:
    vit = model().double()
    embedded, layers = vit.embed(tokens()), in_torch(vit)
    ours, (theirs, _) = vit.run_to_class(embedded, 0), layers(embedded)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    ours.square().sum().backward(retain_graph=True)
    theirs.square().sum().backward()
    enters, keeps, candidate, leaves = layers.weight_hh_l0.grad.split(vit.width)
    got = vit.vit.get_parameter("blocks.0.state_weight").grad
    torch.testing.assert_close(got, torch.cat([enters, keeps, leaves, candidate]), rtol=1e-8, atol=1e-10)


def test_model_reads_no_later_character() -> None:
    vit = model()
    before = logits(vit, tokens())
    for place in range(8):
        changed = tokens()
        changed[:, place] = (changed[:, place] + 1) % CLASSES
        moved = (logits(vit, changed) != before).any(dim=2)
        assert not moved[:, :place].any()
        assert moved[:, place:].all()


def test_model_has_the_tensors_of_its_options() -> None:
    shapes = {name: tuple(value.shape) for name, value in model().tensors().items()}
    assert shapes == {
        "token_embed.weight": (CLASSES, 4),
        "blocks.0.input_weight": (48, 4), "blocks.0.state_weight": (48, 12), "blocks.0.bias": (48,),
        "blocks.1.input_weight": (48, 12), "blocks.1.state_weight": (48, 12), "blocks.1.bias": (48,),
        "head.weight": (CLASSES, 12), "head.bias": (CLASSES,),
    }  # fmt: skip


def test_default_model_is_that_of_leaf() -> None:
    """Embedding 8, two layers of 256 units: 4 x 256 x (8 + 256 + 1) + 4 x 256 x (256 + 256 + 1) numbers between
    embedding and head."""
    with torch.device("meta"):
        vit = build_model(make_method("fedavg"), LSTM, 80, seed=0)
    numbers = sum(value.numel() for value in vit.tensors().values())
    assert numbers == 80 * 8 + 271_360 + 525_312 + 257 * 80
    assert (vit.width, vit.depth) == (256, 2)


def test_steps_take_as_many_samples_as_fit() -> None:
    """Each character's product has one row a sample: all of a batch is taken at a time."""
    vit = model()
    assert suitable_run_size(vit, Batch(batch_size=64, text=Text(context=8))) == 64


@pytest.mark.parametrize(
    ("method", "options", "needed"),
    [
        ("fedtp", {}, "self-attention"),
        ("fedtp", {"parts": "mlp"}, "MLPs"),
        ("fedtp", {"parts": "norm"}, "norms"),
        ("vanilla_attention", {}, "self-attention"),
        ("fed_prompt", {}, "the blocks of a Transformer"),
        ("fedperfix", {}, "the blocks of a Transformer"),
        ("fedavg", {"dropout": 0.1}, "the blocks of a Transformer"),
        ("eftvit", {}, "the blocks of a Transformer"),
        ("fedbn", {}, "norms"),
        ("personal_part", {"part": "pos_embed"}, "positions"),
    ],
)
def test_methods_that_need_a_transformer_are_refused(method: str, options: dict[str, Any], needed: str) -> None:
    values = {"method": method, "options": options, "model": LSTM, "model_options": LSTM_MODEL, "rounds": 1}
    with pytest.raises(ConfigError, check=has_code("FV1111", needed)):
        checked_config(values, "run.toml")


def test_what_needs_a_transformer_is_refused() -> None:
    values = {"method": "personal_part", "options": {"part": "head"}, "model": LSTM, "rounds": 1}
    checked_config(values, "run.toml")
    with pytest.raises(ConfigError, check=has_code("FV1002", "'small-*'")):
        checked_config({**values, "variants": {"small-*": {"part": "norm"}}}, "run.toml")
    with pytest.raises(ConfigError, check=has_code("FV1110", "'lstm_small_text'")):
        model("knn_per")


def test_personal_head_stays_on_the_device() -> None:
    groups = make_method("fedper").groups(model("fedper"))
    assert groups["personal"] == (Role.LOCAL, ["head.weight", "head.bias"])
