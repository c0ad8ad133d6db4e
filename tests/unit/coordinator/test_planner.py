"""From a configuration to what devices get."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from coordinator.planner import Plan, groups_from_server, initial_blobs, make_plan
from fedvit.blobs import BlobStore, digest_of
from fedvit.program import Role, decode_program
from fedvit.tensors import unpack

if TYPE_CHECKING:
    from tests.unit.coordinator.conftest import Configure

CLASSES = ("0", "1", "2")


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> BlobStore:
    return BlobStore(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="module")
def plan(blobs: BlobStore, graph_cache: Path, configure: "Configure") -> Callable[..., Plan]:
    """A plan for a configuration; each is made once."""
    made: dict[str, Plan] = {}

    def plan(*, into: BlobStore = blobs, classes: tuple[str, ...] = CLASSES, **values: Any) -> Plan:
        key = repr((str(into.folder), classes, sorted(values.items())))
        if key not in made:
            made[key] = make_plan(configure(**values), classes, into, cache=graph_cache)
        return made[key]

    return plan


@pytest.mark.parametrize("method", ["fedavg", "eftvit"])
def test_the_same_configuration_gives_the_same_program(plan: Callable[..., Plan], method: str, tmp_path: Path) -> None:
    """Byte for byte, in another blob store too: a resumed run finds its program again."""
    first, again = plan(method=method), plan(method=method, into=BlobStore(tmp_path))
    assert first.digest == again.digest
    assert first.state.tensors.keys() == again.state.tensors.keys()
    for name, value in first.state.tensors.items():
        assert value.tobytes() == again.state.tensors[name].tobytes()


@pytest.mark.parametrize(
    "changed",
    [{"options": {"lr": 0.06}}, {"classes": ("2", "1", "0")}, {"method": "eftvit"}],
)
def test_another_configuration_gives_another_program(plan: Callable[..., Plan], changed: dict[str, Any]) -> None:
    assert plan(method="fedavg").digest != plan(**{"method": "fedavg", **changed}).digest


def test_the_seed_decides_the_first_values(plan: Callable[..., Plan]) -> None:
    """All of FedAvg's come from the server, so its program is the same; EFTViT's initial blobs are in the program."""
    one, other = plan(method="fedavg"), plan(method="fedavg", seed=2)
    assert one.digest == other.digest
    assert (one.state.tensors["patch_embed.proj.weight"] != other.state.tensors["patch_embed.proj.weight"]).any()
    assert plan(method="eftvit").digest != plan(method="eftvit", seed=2).digest


def test_fedavg_in_groups(plan: Callable[..., Plan]) -> None:
    """Everything is shared: one group, from the server each round, with nothing to fetch once but the graphs."""
    made = plan(method="fedavg")
    program = made.program
    assert {name: group.role for name, group in program.groups.items()} == {"model": Role.SHARED}
    assert groups_from_server(program) == ["model"]
    assert initial_blobs(program) == [program.graphs[name].digest for name in ("train", "predict")]
    assert set(made.state.tensors) == set(program.tensors) == set(program.names("model"))


def test_eftvit_in_groups(plan: Callable[..., Plan], blobs: BlobStore) -> None:
    """One local block of three: embedding and block 0 local, blocks 1, 2 and norm global, the head seeded."""
    made = plan(method="eftvit")
    program = made.program
    assert {name: group.role for name, group in program.groups.items()} == {
        "head": Role.SEEDED,
        "global": Role.GLOBAL,
        "local": Role.LOCAL,
    }
    assert groups_from_server(program) == ["head", "global"]
    prefixes = {
        group: {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in program.names(group)}
        for group in program.groups
    }
    assert prefixes == {
        "head": {"head"},
        "global": {"blocks.1", "blocks.2", "norm"},
        "local": {"cls_token", "pos_embed", "patch_embed", "blocks.0"},
    }
    assert set(made.state.tensors) == {*program.names("head"), *program.names("global")}
    local = program.groups["local"].initial
    assert local is not None
    assert initial_blobs(program)[2:] == [local]
    assert program.groups["head"].initial is None
    first = unpack(blobs.get(local))
    assert set(first) == set(program.names("local"))
    for name, value in made.vit.tensors().items():
        if name in first:
            np.testing.assert_array_equal(first[name], value.numpy())


def test_every_tensor_of_the_model_is_in_the_program(plan: Callable[..., Plan]) -> None:
    for method in ("fedavg", "eftvit"):
        made = plan(method=method)
        model = made.vit.tensors()
        assert list(made.program.tensors) == list(model)
        for name, spec in made.program.tensors.items():
            assert (spec.shape, spec.dtype) == (tuple(model[name].shape), "float32")


def test_everything_that_a_device_fetches_is_in_the_blob_store(plan: Callable[..., Plan], blobs: BlobStore) -> None:
    made = plan(method="eftvit")
    assert decode_program(blobs.get(made.digest)) == made.program
    for digest in (made.digest, *initial_blobs(made.program)):
        assert digest_of(blobs.get(digest)) == digest


def test_the_program_says_what_was_configured(plan: Callable[..., Plan]) -> None:
    made = plan(
        method="eftvit", options={"threshold": 1.5}, images={"crop_padding": 2, "flip": True, "brightness": 0.25}
    ).program
    [phase] = made.train
    batch = made.batch
    assert (made.method, made.model, made.classes) == ("eftvit", "vit_small_images", CLASSES)
    assert (phase.graph, phase.groups, phase.epochs, phase.lr) == ("train", ("local", "head"), 3, 1e-3)
    assert phase.slots == ("exp_avg", "exp_avg_sq")
    assert phase.collect is not None
    assert (phase.collect.output, phase.collect.shape, phase.collect.threshold) == ("features", (9, 32), 1.5)
    assert (batch.image_size, batch.patch_size, batch.batch_size, batch.mask_ratio) == (32, 8, 8, 0.5)
    assert (batch.crop_padding, batch.flip, batch.brightness) == (2, True, 0.25)
    assert made.expected_upload() == {"features": ((None, 9, 32), "float32"), "labels": ((None,), "int64")}


def test_the_price_of_a_graph_is_counted(plan: Callable[..., Plan]) -> None:
    """The products of one prediction, 2 FLOPs per multiply-add, batch 8, 17 tokens of width 32, 3 blocks.

    Embedding 16*192*32; per block: qkv 17*32*96, scores and values 2*17*17*32, projection 17*32*32, MLP (ratio 2)
    2*17*32*64; head 32*3. Training costs at least twice that again for the backward pass.
    """
    block = 17 * 32 * 96 + 2 * 17 * 17 * 32 + 17 * 32 * 32 + 2 * 17 * 32 * 64
    forward = 2 * 8 * (16 * 192 * 32 + 3 * block + 32 * 3)
    graphs = plan(method="fedavg").program.graphs
    assert graphs["predict"].flops == forward
    assert 2.5 * forward < graphs["train"].flops <= 3 * forward
