"""What the report draws of a finished run."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch import Tensor

from fedvit.data.layout import PARTITION_FILE
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, Method
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fleet.api import FinishedRun
from fleet.experiments.pictures import attention_rollout, device_kinds, embed_devices, fuse_heads
from fleet.experiments.report import html_report
from fleet.partition import DeviceCounts, PartitionSummary
from tests.support.experiments import ExperimentRun, run_experiment, written_experiment
from tests.support.tiny import TINY_MODEL

DOCS = Path(__file__).parents[4] / "docs" / "methods.md"
FILE = """
# Embeddings and attention.
dataset = "digits"
image_size = 32
devices = 4
rounds = 1
seeds = [0, 1]
test_share = 0.8
engine = "torch"
pictures = 2

[model]
options = {patch_size = 8, width = 32, depth = 3, heads = 2, mlp_ratio = 4.0}

[partitions.skewed]
partition = "dirichlet"
alpha = 0.3

[methods.fedper]
method = "fedper"

[methods.fedtp]
method = "fedtp"
epochs = 1
""".lstrip()


def pair(name: str, **options: Any) -> tuple[Method, PatchViT, dict[str, Tensor], Images]:
    """With tensors that differ from the first ones, so that attention is not nearly even."""
    method = make_method(name, options)
    vit = build_model(method, SMALL, 10, seed=0, options=TINY_MODEL)
    draw = torch.Generator().manual_seed(0)
    tensors = {
        key: value + 0.3 * torch.randn(value.shape, generator=draw) for key, value in method.tensors(vit).items()
    }
    return method, vit, tensors, Images(torch.randn(2, 16, 192, generator=draw), None)


def test_attention_rollout_is_the_product_of_the_blocks_attention() -> None:
    """Computed from timm's own layers, with all tokens as queries in every block."""
    method, vit, tensors, images = pair("fedavg")
    found = attention_rollout(method, vit, tensors, images)
    vit.vit.load_state_dict(tensors)
    with torch.no_grad():
        x, flow = vit.embed(*images), torch.eye(17)
        for block in vit.vit.blocks:
            q, k, _ = block.attn.qkv(block.norm1(x)).reshape(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1) / 4).softmax(dim=-1).mean(dim=1)
            flow = (weights + torch.eye(17)) / 2 @ flow
            x = block(x)
    want = flow[:, 0, 1:] / flow[:, 0, 1:].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found, want)
    assert want.max() > 2 / 16


def test_fedtps_attention_is_the_largest_of_the_heads_without_the_lowest_weights() -> None:
    """The three lowest of ten weights of one image are left out."""
    weights = torch.tensor([[[[0.9, 0.02, 0.03, 0.04, 0.01]], [[0.1, 0.2, 0.1, 0.5, 0.1]]]])
    weights = torch.cat([weights, torch.tensor([[[[0.6, 0.1, 0.1, 0.1, 0.11]], [[0.3, 0.3, 0.2, 0.15, 0.05]]]])], dim=2)
    assert fuse_heads(weights, "mean")[0, 0].tolist() == pytest.approx([0.5, 0.11, 0.065, 0.27, 0.055])
    assert fuse_heads(weights, "max")[0].flatten().tolist() == pytest.approx(
        [0.9, 0.2, 0.0, 0.5, 0.0, 0.6, 0.3, 0.2, 0.15, 0.0]
    )
    method, vit, tensors, images = pair("fedavg")
    shares = attention_rollout(method, vit, tensors, images, "max")
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
    assert not torch.allclose(shares, attention_rollout(method, vit, tensors, images))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("apfl", {}),
        ("fedperfix", {"mode": "concat"}),
        ("prefix", {}),
        ("pfedpg", {}),
        ("knn_per", {}),
        ("fedtp", {"head": "rod", "knn_weight": 0.6}),
    ],
)
def test_attention_of_changed_models_is_shared_by_all_patches(name: str, options: dict[str, Any]) -> None:
    method, vit, tensors, images = pair(name, **options)
    shares = attention_rollout(method, vit, tensors, images)
    assert shares.shape == (2, 16)
    assert (shares > 0).all()
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
    assert not any(block.attn.attn_drop._forward_hooks for block in vit.vit.blocks)


def summary(**more: Any) -> PartitionSummary:
    """Device 0 has most images of class b, all others of class a."""
    counts = [DeviceCounts(f"device-{n}", {"a": 5, "b": 9 if n == 0 else 1}, {"a": 0, "b": 99}) for n in range(8)]
    return PartitionSummary(
        dataset="d", classes=("a", "b"), size=8, seed=0, test_share=0.2, devices=tuple(counts),
        **{"options": {}, "partition": "x", **more},
    )  # fmt: skip


def test_device_is_of_its_domain_or_of_the_class_that_it_has_most_of() -> None:
    assert [*device_kinds(summary()).values()] == ["b", *["a"] * 7]
    dealt = summary(domains=("clipart", "photo"), options={"per_domain": 4})
    assert [*device_kinds(dealt).values()] == [*["clipart"] * 4, *["photo"] * 4]
    assert [*device_kinds(summary(partition="coarse_iid")).values()] == ["a, ..."] * 8


def test_like_embeddings_lie_together_on_the_plane(tmp_path: Path) -> None:
    """Eight devices in two domains, whose embeddings are around two points, one of them novel."""
    dealt = summary(domains=("clipart", "photo"), options={"per_domain": 4})
    (tmp_path / PARTITION_FILE).write_bytes(msgspec.json.encode(dealt))
    draw = np.random.default_rng(0)
    vectors = {f"device/device-{n}/embedding": draw.normal(10 * (n // 4), 0.1, 16).astype(np.float32) for n in range(8)}
    weights = {"generator/trunk.0.weight": np.ones((2, 2), np.float32)}
    for name, held in (("run", 7), ("novel", 8)):
        (tmp_path / name).mkdir()
        save_file({**dict([*vectors.items()][:held]), **weights}, tmp_path / name / "generator.safetensors")
    run, novel = (FinishedRun(name, tmp_path / name, 0.0, SimpleNamespace()) for name in ("run", "novel"))  # type: ignore[arg-type]
    assert {device: vector.shape for device, vector in run.embeddings().items()} == dict.fromkeys(
        [f"device-{n}" for n in range(7)], (16,)
    )
    points = embed_devices(run, tmp_path, 0, novel)
    assert [entry.device for entry in points if entry.novel] == ["device-7"]
    plane = np.array([(entry.x, entry.y) for entry in points])
    nearest = [
        min((n for n in range(8) if n != one), key=lambda n: float(np.linalg.norm(plane[n] - plane[one])))
        for one in range(8)
    ]
    assert all(points[one].kind == points[other].kind for one, other in enumerate(nearest))
    assert embed_devices(FinishedRun("none", tmp_path, 0.0, SimpleNamespace()), tmp_path, 0) == []  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> tuple[Path, ExperimentRun]:
    out = tmp_path_factory.mktemp("pictures")
    return out, run_experiment(written_experiment(out, FILE), out, graph_cache=graph_cache)


@pytest.mark.slow
def test_cells_of_the_first_seed_have_pictures(done: tuple[Path, ExperimentRun]) -> None:
    """Of the same images for both methods; only FedTP's server has embeddings."""
    out, (outcome, _, lines) = done
    for cell in outcome.cells:
        assert cell.result is not None, lines
        embedded = [entry.device for entry in cell.result.embeddings]
        shown = [entry.device for entry in cell.result.attention]
        first = cell.seed == 0
        assert embedded == ([f"device-{n}" for n in range(4)] if first and cell.method == "fedtp" else [])
        assert shown == (["device-0", "device-1"] if first else [])
    fedper, fedtp = (cell.result for cell in outcome.cells[:2])
    assert fedper is not None
    assert fedtp is not None
    for one, other in zip(fedper.attention, fedtp.attention, strict=True):
        assert (one.png, one.label) == (other.png, other.label)
        assert one.attention != other.attention
        assert np.sum(one.attention) == pytest.approx(1)
        file = sorted((out / f"parts/skewed/seed-0/{one.device}/test").glob("*/*.png"))[0]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(one.png))), np.asarray(Image.open(file).convert("RGB")))
        assert one.label == file.parent.name


@pytest.mark.slow
def test_page_shows_pictures_of_cells_that_have_them(done: tuple[Path, ExperimentRun]) -> None:
    _, (outcome, _, _) = done
    page = html_report(outcome)
    assert page.count("<svg") == 7  # curves, three costs, spread, FedTP's embeddings, attention
    assert "<h3>fedtp: embeddings of devices</h3>" in page
    assert "<h3>Attention</h3>" in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # it needs no other file
    assert html_report(outcome) == page
    without = msgspec.structs.replace(outcome, cells=[cell for cell in outcome.cells if cell.seed == 1])
    assert html_report(without).count("<svg") == 5


@pytest.mark.slow
def test_saved_hypernetwork_makes_the_same_tensors_again(done: tuple[Path, ExperimentRun]) -> None:
    """As the page about methods says."""
    out, _ = done
    home = out / "cells/fedtp/skewed/seed-0/runs/run"
    [text] = re.findall(r"```python\n(from safetensors.*?)```", DOCS.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"model_options": TINY_MODEL}
    exec(text.replace("runs/first", str(home)), names)
    made = load_file(home / "generated" / "device-0.safetensors")
    assert made.keys() == names["made"].keys()
    assert all(np.array_equal(names["made"][name], value) for name, value in made.items())
