"""CAFF: which layers a device trains, and the mean of each layer over the devices that trained it."""

import numpy as np
import pytest

from fedvit.errors import EmptyCohort
from fedvit.methods.base import ServerState
from fedvit.methods.caff import CAFF
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.method_steps import make_context
from tests.support.uploads import upload

DEPTH = 3
IMAGES = {"a": 6, "b": 2, "c": 4, "none": 0}
LAYERS = {"a": 1, "b": 2, "c": 2, "none": 3}


@pytest.fixture(scope="module")
def deep() -> PatchViT:
    options = {"image_size": 16, "patch_size": 8, "width": 8, "depth": DEPTH, "heads": 2}
    return build_vit(SMALL, 3, seed=0, options=options)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_device_trains_the_last_layers(deep: PatchViT, layers: int) -> None:
    trained = set(CAFF(layers=layers).names_with(deep, Role.SHARED))
    ends = tuple(f"blocks.{block}." for block in range(DEPTH - layers, DEPTH))
    assert trained == {name for name in deep.tensors() if name.startswith(("head.", "norm.", *ends))}


def test_a_layer_is_averaged_over_those_who_trained_it(deep: PatchViT) -> None:
    draw = np.random.default_rng(0)
    methods = {device: CAFF(layers=layers) for device, layers in LAYERS.items()}
    state = ServerState({name: draw.normal(size=value.shape) for name, value in deep.tensors().items()})
    deltas = {
        device: {name: draw.normal(size=state.tensors[name].shape) for name in method.names_with(deep, Role.SHARED)}
        for device, method in methods.items()
    }
    uploads = [upload(device, IMAGES[device], tensors) for device, tensors in deltas.items()]
    rule = CAFF().server_rule(deep)
    after, _ = rule.close(state, uploads, make_context(deep))
    for name, before in state.tensors.items():
        senders = [device for device in "abc" if name in deltas[device]]
        total = sum(IMAGES[device] for device in senders)
        step = sum(IMAGES[device] * deltas[device][name] for device in senders) / total if senders else 0
        np.testing.assert_allclose(after.tensors[name], before + step)
    assert not np.allclose(after.tensors["blocks.1.mlp.fc1.weight"], state.tensors["blocks.1.mlp.fc1.weight"])
    np.testing.assert_array_equal(after.tensors["pos_embed"], state.tensors["pos_embed"])
    with pytest.raises(EmptyCohort):
        rule.close(state, uploads[3:], make_context(deep))


def test_an_update_that_is_late_counts_less(deep: PatchViT) -> None:
    state = ServerState({"x": np.zeros(2), "y": np.zeros(2)})
    both = upload("a", 4, {"x": np.ones(2), "y": np.ones(2)})
    late = upload("b", 4, {"x": np.full(2, 3.0)})._replace(discount=0.5)
    after, _ = CAFF().server_rule(deep).close(state, [both, late], make_context(deep))
    np.testing.assert_allclose(after.tensors["x"], (1 + 0.5 * 3) / 2)
    np.testing.assert_allclose(after.tensors["y"], 1)
