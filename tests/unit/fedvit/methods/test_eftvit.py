"""EFTViT's device half in torch: what is trained, through what, and what is collected."""

import pytest
import torch
from torch import Tensor

from fedvit.data.images import unfold
from fedvit.errors import ConfigError
from fedvit.methods.base import Images, check_fits
from fedvit.methods.calculus import Named
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.optimizers import AdamW, Sgd
from fedvit.methods.rules.feature_training import FeatureTraining, features_into
from fedvit.methods.step import predict_step, whole_step
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Collect, Role
from tests.support.codes import has_code

SAMPLES, CLASSES, PATCHES = 6, 5, 16

PLAIN = EFTViT(optimizer="sgd", weight_decay=0.0, mask=0.0)
MASKED = EFTViT(optimizer="sgd", weight_decay=0.0, mask=0.75)


def test_a_device_may_answer_with_its_own_head(vit: PatchViT) -> None:
    """After training, the head stays on the device; the next round's value from the server does not change answers."""
    method = EFTViT(optimizer="sgd", weight_decay=0.0, mask=0.0, client_head=True)
    assert method.names_with(vit, Role.LOCAL)[-2:] == ["client.head.weight", "client.head.bias"]
    assert method.names_with(vit, Role.SEEDED) == ["head.weight", "head.bias"]
    train, keep = method.phases(vit)
    assert (train.groups, keep.groups, keep.steps) == (("local", "head"), ("client_head",), 1)
    inputs = step_inputs(vit, method)
    inputs |= {f"tensor/{name}": value.double() for name, value in method.extra_tensors(vit).items()}
    inputs["tensor/head.weight"] = inputs["tensor/head.weight"] + 1.0
    after = whole_step(method, vit, keep)(inputs)
    tensors = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(after[f"new/tensor/client.{name}"], tensors[name], rtol=0, atol=0)
    kept = tensors | {f"client.{name}": tensors[name] for name in ("head.weight", "head.bias")}
    batch = Images(inputs["batch/patches"], None)
    want = PLAIN.predict(vit, tensors, batch, None)
    moved = kept | {"head.weight": tensors["head.weight"] - 3.0}
    torch.testing.assert_close(method.predict(vit, moved, batch, None), want)
    assert not torch.allclose(PLAIN.predict(vit, moved, batch, None), want)


def small_vit() -> PatchViT:
    options = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 4, "heads": 2}
    vit = build_vit(SMALL, CLASSES, seed=0, options=options).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in vit.parameters():  # zeros and ones would hide what is forgotten
            value += 0.05 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
    return vit


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return small_vit()


def images(seed: int = 2) -> Tensor:
    return torch.randn(SAMPLES, 32, 32, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_inputs(vit: PatchViT, method: EFTViT, *, seed: int = 2) -> dict[str, Tensor]:
    """A batch of all patches, or of a random quarter of them."""
    draw = torch.Generator().manual_seed(seed)
    patches = torch.from_numpy(unfold(images(seed).numpy(), 8))
    inputs = {f"tensor/{name}": value.clone() for name, value in vit.tensors().items()}
    if method.mask:
        kept = torch.stack([torch.randperm(PATCHES, generator=draw)[:4] for _ in range(SAMPLES)])
        patches = patches.take_along_dim(kept[..., None], dim=1)
        inputs["batch/kept"] = kept
    for slot in method.optimizer_rule().slots:
        inputs |= {f"slot/{slot}/{name}": torch.zeros_like(value) for name, value in vit.tensors().items()}
    return inputs | {
        "batch/patches": patches,
        "batch/labels": torch.arange(SAMPLES) % CLASSES,
        "batch/weight": torch.ones(SAMPLES, dtype=torch.float64),
        "hyper/lr": torch.tensor(0.5, dtype=torch.float64),
        "hyper/step": torch.tensor(1.0, dtype=torch.float64),
    }


def run_step(vit: PatchViT, method: EFTViT, inputs: Named) -> dict[str, Tensor]:
    (phase,) = method.phases(vit)
    return whole_step(method, vit, phase)(inputs)


def find_updated(outputs: Named, inputs: Named) -> dict[str, Tensor]:
    """after - start of every tensor that the step gives back."""
    return {
        name.removeprefix("new/tensor/"): value - inputs[name.removeprefix("new/")]
        for name, value in outputs.items()
        if name.startswith("new/tensor/")
    }


# --- roles --------------------------------------------------------------------------------------------


def test_who_trains_what() -> None:
    """The device: embedding and blocks 0 and 1. The server: the others, each a group, and the last norm. The head:
    both."""
    vit = build_vit(SMALL, 5, seed=0, options={"image_size": 8, "patch_size": 4, "width": 4, "depth": 12, "heads": 1})
    groups = EFTViT(local_blocks=2).groups(vit)
    assert {group: role for group, (role, _) in groups.items()} == {
        "head": Role.SEEDED,
        "norm": Role.GLOBAL,
        **{f"block.{block}": Role.GLOBAL for block in range(2, 12)},
        "local": Role.LOCAL,
    }
    assert groups["head"][1] == ["head.weight", "head.bias"]
    assert groups["norm"][1] == ["norm.weight", "norm.bias"]
    in_local = {name.split(".")[1] for name in groups["local"][1] if name.startswith("blocks.")}
    assert in_local == {"0", "1"}
    for block in range(2, 12):
        names = groups[f"block.{block}"][1]
        assert len(names) == 12
        assert {name.split(".")[1] for name in names} == {str(block)}
    assert {name for name in groups["local"][1] if not name.startswith("blocks.")} == {
        "cls_token",
        "pos_embed",
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
    }


@pytest.mark.parametrize(
    ("local_blocks", "classes", "parameters"), [(2, 10, 14_926_090), (4, 100, 29_171_044), (6, 100, 43_346_788)]
)
def test_parameters_on_a_device(local_blocks: int, classes: int, parameters: int) -> None:
    """ViT-B/16: embedding 590 592 + 768 + 197 * 768 = 742 656, a block 7 087 872, a head 769 C.
    M=2, C=10: 742 656 + 14 175 744 + 7 690 = 14 926 090; M=4, C=100: 742 656 + 28 351 488 + 76 900 = 29 171 044;
    M=6, C=100: 742 656 + 42 527 232 + 76 900 = 43 346 788. Built without memory for the numbers."""
    with torch.device("meta"):
        vit = build_vit("vit_base_patch16_224", classes, seed=0)
    groups = EFTViT(local_blocks=local_blocks).groups(vit)
    trained = [name for role, names in groups.values() if role.is_trained_on_device for name in names]
    assert sum(vit.tensors()[name].numel() for name in trained) == parameters


@pytest.mark.parametrize("local_blocks", [4, 5])
def test_the_server_must_have_something_to_train(vit: PatchViT, local_blocks: int) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", str(local_blocks))):
        check_fits(EFTViT(local_blocks=local_blocks), vit)


def test_the_papers_warm_up_is_the_default() -> None:
    """Section 4.2: 5 rounds; then the cosine."""
    scales = [EFTViT().lr_scale(number, 200) for number in range(1, 8)]
    assert scales[:5] == [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]
    assert scales[5] == 1.0
    assert scales[6] < 1.0


# --- forward ------------------------------------------------------------------------------------------


def test_without_masking_it_is_timms_forward(vit: PatchViT) -> None:
    pictures = images()
    forward = PLAIN.forward(vit, vit.tensors(), Images(torch.from_numpy(unfold(pictures.numpy(), 8)), None))
    with torch.no_grad():
        stock = vit.vit(pictures.permute(0, 3, 1, 2))
    torch.testing.assert_close(forward.logits, stock, rtol=0, atol=1e-12)


def test_prediction_sees_the_whole_image(vit: PatchViT) -> None:
    """Masking is for training only."""
    pictures = images()
    inputs = {f"tensor/{name}": value for name, value in vit.tensors().items()}
    inputs["batch/patches"] = torch.from_numpy(unfold(pictures.numpy(), 8))
    with torch.no_grad():
        logits = predict_step(MASKED, vit)(inputs)["logits"]
        torch.testing.assert_close(logits, vit.vit(pictures.permute(0, 3, 1, 2)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("local_blocks", [1, 2, 3])
def test_what_is_collected_is_the_input_of_the_servers_half(vit: PatchViT, local_blocks: int) -> None:
    """One class token and a quarter of 16 patches for each sample; the blocks behind give the same logits."""
    method = EFTViT(optimizer="sgd", mask=0.75, local_blocks=local_blocks)
    inputs = step_inputs(vit, method)
    forward = method.forward(vit, vit.tensors(), Images(inputs["batch/patches"], inputs["batch/kept"]))
    features = forward.collected[f"features.{local_blocks}"]
    assert features.shape == (SAMPLES, 1 + 4, 16)
    (phase,) = method.phases(vit)
    assert phase.collect is not None
    assert (phase.collect.output, phase.collect.shape) == (f"features.{local_blocks}", features.shape[1:])
    joined = vit.call(vit.tensors(), lambda vit: vit.classify(vit.run_blocks(features, local_blocks, vit.depth)))
    torch.testing.assert_close(joined, forward.logits, rtol=0, atol=1e-12)


# --- one step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PLAIN, MASKED], ids=["whole images", "masked"])
def test_the_gradient_reaches_the_device_through_the_frozen_blocks(vit: PatchViT, method: EFTViT) -> None:
    """Every tensor of the local module and of the head moves; the global module is no output, and its input is as it
    was. With `no_grad` around the frozen blocks only the head would move."""
    inputs = step_inputs(vit, method)
    before = {name: value.clone() for name, value in inputs.items()}
    steps = find_updated(run_step(vit, method, inputs), inputs)
    groups = method.groups(vit)
    assert set(steps) == {*groups["local"][1], *groups["head"][1]}
    for name, step in steps.items():
        assert step.abs().max() > 1e-9, name
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


def test_the_step_is_minus_lr_times_timms_gradient(vit: PatchViT) -> None:
    """SGD without decay, whole images: after - start = -0.5 dL/dw, with L from timm's own forward."""
    inputs = step_inputs(vit, PLAIN)
    outputs = run_step(vit, PLAIN, inputs)
    stock = small_vit().vit
    loss = torch.nn.functional.cross_entropy(stock(images().permute(0, 3, 1, 2)), inputs["batch/labels"])
    loss.backward()
    gradients = dict(stock.named_parameters())
    torch.testing.assert_close(outputs["metric/loss"], loss.detach(), rtol=0, atol=1e-12)
    for name, step in find_updated(outputs, inputs).items():
        gradient = gradients[name].grad
        assert gradient is not None
        torch.testing.assert_close(step, -0.5 * gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_positions_that_nobody_kept_do_not_move(vit: PatchViT) -> None:
    """All samples keep patches 3, 7, 8 and 12: of the 17 positions, the class token's and those four move."""
    inputs = step_inputs(vit, MASKED)
    inputs["batch/kept"] = torch.tensor([3, 7, 8, 12]).expand(SAMPLES, -1)
    step = find_updated(run_step(vit, MASKED, inputs), inputs)["pos_embed"][0]
    assert torch.nonzero(step.abs().sum(dim=1)).flatten().tolist() == [0, 1 + 3, 1 + 7, 1 + 8, 1 + 12]


def test_padding_has_no_say(vit: PatchViT) -> None:
    """Two of six samples are padding: whatever is in them, the step is that of the other four."""
    inputs = step_inputs(vit, MASKED)
    inputs["batch/weight"] = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.float64)
    short = {name: value[:4] if name.startswith("batch/") else value for name, value in inputs.items()}
    garbage = dict(inputs)
    garbage["batch/patches"] = inputs["batch/patches"].clone()
    garbage["batch/patches"][4:] = 1e3
    garbage["batch/kept"] = inputs["batch/kept"].clone()
    garbage["batch/kept"][4:] = 0
    garbage["batch/labels"] = torch.tensor([*inputs["batch/labels"][:4], 0, 0])
    want = run_step(vit, MASKED, short)
    got = run_step(vit, MASKED, garbage)
    for name, value in want.items():
        rows = got[name][:4] if name.startswith("collect/") else got[name]
        torch.testing.assert_close(rows, value, rtol=1e-10, atol=1e-13, msg=name)


def test_no_parameter_is_dead(vit: PatchViT) -> None:
    """After two AdamW steps on different batches every element of every local tensor has had a gradient, but for
    positions that were masked both times."""
    method = EFTViT(mask=0.5)
    inputs = step_inputs(vit, method)
    for number in (1, 2):
        batch = step_inputs(vit, method, seed=number)
        inputs |= {name: value for name, value in batch.items() if name.startswith("batch/")}
        inputs["hyper/step"] = torch.tensor(float(number), dtype=torch.float64)
        outputs = run_step(vit, method, inputs)
        inputs |= {name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")}
    for name in (*method.groups(vit)["local"][1], *method.groups(vit)["head"][1]):
        seen = inputs[f"slot/exp_avg_sq/{name}"] > 0
        assert seen.all() or name == "pos_embed", name


# --- phases and the server's rule ---------------------------------------------------------------------


def test_the_rounds_local_work(vit: PatchViT) -> None:
    """One phase that moves local tensors and the head; 1 + floor(16 * 0.25) tokens of width 16 are collected."""
    (phase,) = EFTViT(epochs=3, lr=0.01, threshold=1.5).phases(vit)
    assert (phase.graph, set(phase.groups), phase.epochs, phase.lr) == ("train", {"local", "head"}, 3, 0.01)
    assert phase.slots == ("exp_avg", "exp_avg_sq")
    assert phase.collect == Collect("features.2", (5, 16), 1.5)


def test_registers_are_collected_too() -> None:
    """The server's blocks need all prefix tokens: 1 + 4 of DINOv2 and floor(16 * 0.25) patches."""
    with torch.device("meta"):
        vit = build_vit("vit_small_patch14_reg4_dinov2", 5, seed=0, options={"image_size": 56})
    (phase,) = EFTViT().phases(vit)
    assert phase.collect == Collect("features.2", (5 + 4, 384), 1.0)
    assert "reg_token" in EFTViT().groups(vit)["local"][1]


def test_the_papers_defaults() -> None:
    """M=2, r=0.75, E=5, E_s=2, AdamW with decay 0.05, cosine schedule, batches of 32, and the store of features."""
    method = EFTViT()
    assert (method.local_blocks, method.mask, method.epochs, method.server_epochs) == (2, 0.75, 5, 2)
    assert (method.optimizer_rule(), method.schedule, method.batch_size) == (AdamW(weight_decay=0.05), "cosine", 32)
    assert method.server_data == "store"


def test_features_are_named_by_the_block_that_they_enter() -> None:
    assert [features_into(block) for block in (1, 11)] == ["features.1", "features.11"]


def test_devices_of_every_split_have_the_servers_groups_in_common(vit: PatchViT) -> None:
    """So that they fetch the same blobs: what two splits both name is the same, tensor by tensor, and the server has
    all that the lowest of them leaves to it."""
    low, high = EFTViT(local_blocks=1).groups(vit), EFTViT(local_blocks=3).groups(vit)
    assert set(high) - {"local"} == {"head", "norm", "block.3"}
    assert set(low) - {"local"} == {"head", "norm", "block.1", "block.2", "block.3"}
    for group in ("head", "norm", "block.3"):
        assert high[group] == low[group]


def test_the_servers_rule_follows_from_the_options(vit: PatchViT) -> None:
    assert EFTViT(local_blocks=3, lr=0.02).server_rule(vit) == FeatureTraining(
        epochs=2, batch_size=32, optimizer=AdamW(weight_decay=0.05), lr=0.02, keep=True
    )
    other = EFTViT(
        optimizer="sgd", weight_decay=0.0, server_lr=0.5, server_epochs=7, server_batch_size=9, server_data="latest"
    )
    assert other.server_rule(vit) == FeatureTraining(epochs=7, batch_size=9, optimizer=Sgd(), lr=0.5, keep=False)
    limited = EFTViT(feature_store_bytes=10**9).server_rule(vit)
    assert isinstance(limited, FeatureTraining)
    assert limited.store_bytes == 10**9
