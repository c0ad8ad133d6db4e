"""FedPerfix's blocks, roles and baselines beside the released code's, with the same weights and batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedvit.methods import build_model, make_method
from fedvit.methods.apfl import ALPHA
from fedvit.methods.base import Method
from fedvit.methods.calculus import Named
from fedvit.methods.twins import name_twins, select_twins
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.released import (
    as_images,
    assert_equal,
    draw_batches,
    in_double,
    load_modules,
    make_client,
    train_device,
)

CLASSES, SIDE, RATE = 5, 16, 0.05
MODEL = {"image_size": SIDE, "patch_size": 8, "width": 24, "depth": 3, "heads": 3}
INSIDE = "basic_model."
"""Beginning of the names that the released wrappers give to timm's tensors."""
EXACT = 1e-14
"""Tolerance in float64."""
SINGLE = 2e-6
"""Tolerance of the released clients, which turn images into float32."""

adapters, partials, prefixes, apfl, per_avg = load_modules(
    "FedPerfix/system",
    *(f"flcore.trainmodel.{name}" for name in ("adapter", "partial", "prefix")),
    *(f"flcore.clients.{name}" for name in ("clientapfl", "clientperavg")),
    unused=("opacus", "ujson"),
)


def timm_model() -> Any:
    return build_vit(SMALL, CLASSES, seed=1, options=MODEL).vit


def list_tensors(theirs: nn.Module) -> dict[str, Tensor]:
    """Their tensors by our names."""
    return {name.removeprefix(INSIDE): value.detach() for name, value in theirs.named_parameters()}


def make_prefix(**options: Any) -> Any:
    """Make their model; newer versions of timm pass masks to an attention, which theirs does not take."""
    theirs = prefixes.Prefix(timm_model(), mid_dim=16, scale=1.5, **options)
    for block in theirs.basic_model.blocks:
        block.attn.forward = lambda x, attn_mask=None, is_causal=False, run=block.attn.forward: run(x)
    return theirs


def compare(theirs: nn.Module, method: Method, renamed: dict[str, str] | None = None) -> None:
    """Compare logits, and gradients of all tensors."""
    theirs = theirs.double()
    for value in theirs.parameters():  # away from zeros, with which half of the gradients vanish
        value.data += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL)
    [(images, labels)] = draw_batches(0, [6], SIDE, CLASSES)
    logits = theirs(images)
    nn.functional.cross_entropy(logits, labels).backward()

    def ours(name: str) -> str:
        name = name.removeprefix(INSIDE)
        for theirs_part, our_part in (renamed or {}).items():
            name = name.replace(theirs_part, our_part)
        return name

    grads = {ours(name): value.grad for name, value in theirs.named_parameters()}
    leaves = {ours(name): value.detach().clone().requires_grad_() for name, value in theirs.named_parameters()}
    assert leaves.keys() == method.tensors(vit).keys()
    answers = method.forward(vit, leaves, as_images(vit, images)).logits
    torch.testing.assert_close(answers, logits, rtol=0.0, atol=EXACT)
    nn.functional.cross_entropy(answers, labels).backward()
    assert_equal({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, grads, EXACT)


def test_the_adapter_of_keys_and_values() -> None:
    compare(make_prefix(), make_method("fedperfix", {"bottleneck": 16, "scale": 1.5, "mode": "add"}))


@pytest.mark.parametrize(("vanilla", "init"), [("zero", "zero"), ("random", "random")])
def test_vanilla_prefixes(vanilla: str, init: str) -> None:
    method = make_method("prefix", {"form": "linear", "init": init, "scale": 1.5})
    compare(make_prefix(vanilla=vanilla), method, {"attn.adapter.kv": "attn.prefix.linear"})


def test_the_adapter_that_all_blocks_share() -> None:
    theirs = adapters.PAadapter(timm_model(), mid_dim=16)
    method = make_method("adapters", {"shared_dead": True, "bottleneck": 16})
    compare(theirs, method, {"adapter_downsample": "mlp_adapter.down", "adapter_upsample": "mlp_adapter.up"})


@pytest.mark.parametrize(
    ("patterns", "name", "options"),
    [
        (["head"], "fedper", {}),
        (["norm"], "fedbn", {}),
        (["attn", "head"], "vanilla_attention", {}),
        (["adapter", "head"], "fedperfix", {}),
        (["blocks.2", "adapter", "head"], "fedperfix", {"with_last_block": True}),
    ],
)
def test_the_same_tensors_stay_on_a_device(patterns: list[str], name: str, options: dict[str, Any]) -> None:
    """The released code's patterns are parts of names; its "blocks.11" is the last block of 12, here the third."""
    if name == "fedperfix":
        theirs = prefixes.Prefix(timm_model(), local_parts=patterns)
    else:
        theirs = partials.Partial(timm_model(), local_parts=patterns)
    method = make_method(name, options)
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL)
    assert {name.removeprefix(INSIDE) for name in theirs.local} == set(method.names_with(vit, Role.LOCAL))


def start(theirs: nn.Module, seed: int) -> dict[str, Tensor]:
    """Move a released model away from its first values; return these by our names, in float64."""
    draw = torch.Generator().manual_seed(seed)
    for value in theirs.parameters():
        value.data += 0.05 * torch.randn(value.shape, generator=draw)
    return in_double({name: value.clone() for name, value in list_tensors(theirs).items()})


def train(name: str, options: dict[str, Any], tensors: Named, batches: Any) -> tuple[PatchViT, dict[str, Tensor]]:
    method = make_method(name, {"lr": RATE, **options})
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL)
    return vit, train_device(method, vit, tensors, batches)


def test_apfl() -> None:
    """Two epochs of two batches: both models, the mixture at the end, and alpha."""
    batches = draw_batches(0, [6, 6], SIDE, CLASSES)
    shared, personal = (partials.Partial(timm_model()) for _ in range(2))
    tensors = {**start(shared, 1), **name_twins(start(personal, 2)), ALPHA: torch.tensor([0.25], dtype=torch.float64)}
    client = make_client(
        apfl.clientAPFL, model=shared, model_per=personal, alpha=0.25, learning_rate=RATE, local_steps=2,
        loss=nn.CrossEntropyLoss(), load_train_data=lambda: batches,
        optimizer=torch.optim.SGD(shared.parameters(), lr=RATE),
        optimizer_per=torch.optim.SGD(personal.parameters(), lr=RATE),
    )  # fmt: skip
    client.train()
    vit, after = train("apfl", {"form": "code", "epochs": 2}, tensors, batches)
    assert_equal({name: after[name] for name in vit.tensors()}, in_double(list_tensors(shared)), SINGLE)
    assert_equal(select_twins(after), in_double(list_tensors(personal)), SINGLE)
    assert float(after[ALPHA]) == pytest.approx(client.alpha, abs=SINGLE)
    assert client.alpha != 0.25


def test_per_fedavg() -> None:
    """Two epochs of two double batches; theirs halves a batch, ours takes every other image of it."""
    halves = draw_batches(0, [12, 12], SIDE, CLASSES)
    order = torch.arange(12).reshape(2, 6).T.flatten()
    theirs = partials.Partial(timm_model())
    tensors = start(theirs, 1)
    client = make_client(
        per_avg.clientPerAvg, model=theirs, beta=RATE, learning_rate=RATE, local_steps=2, batch_size=6,
        loss=nn.CrossEntropyLoss(), load_train_data=lambda size: halves,
        optimizer=per_avg.PerAvgOptimizer(theirs.parameters(), lr=RATE),
    )  # fmt: skip
    client.train()
    batches = [(images[order], labels[order]) for images, labels in halves]
    _, after = train("per_fedavg", {"epochs": 2, "batch_size": 6}, tensors, batches)
    assert_equal(after, in_double(list_tensors(theirs)), SINGLE)
