"""Published numbers of parameters; models are made on torch's device "meta", where they cost nothing."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch

from fedvit.models import SMALL, FreePrefix, KVAdapter, Lora, Prompts, build_vit
from fedvit.models.model_patch import ModelPatch

TINY, SMALL_224, BASE = (f"vit_{size}_patch16_224" for size in ("tiny", "small", "base"))
MEBI = 2**20


@cache
def sizes(name: str, classes: int = 1000, *patches: ModelPatch) -> dict[str, int]:
    with torch.device("meta"):
        vit = build_vit(name, classes, seed=0)
        for patch in patches:
            patch.apply(vit, 0)
    return {tensor: value.numel() for tensor, value in vit.tensors().items()}


def count(sizes: dict[str, int], *patterns: str) -> int:
    return sum(size for name, size in sizes.items() if any(fnmatchcase(name, pattern) for pattern in patterns))


NORMS = ("blocks.*.norm1.*", "blocks.*.norm2.*", "norm.*")


@pytest.mark.parametrize(
    ("name", "block", "attention", "mlp", "norms", "body", "whole"),
    [
        (TINY, 444_864, 148_224, 295_872, 9_600, 5_524_416, 5_717_416),
        (SMALL_224, 1_774_464, 591_360, 1_181_568, 19_200, 21_665_664, 22_050_664),
        (BASE, 7_087_872, 2_362_368, 4_722_432, 38_400, 85_798_656, 86_567_656),
    ],
)
def test_vit(name: str, block: int, attention: int, mlp: int, norms: int, body: int, whole: int) -> None:
    """E.g. tiny: qkv 3 * 192 * 193 and proj 192 * 193 are 148,224."""
    have = sizes(name)
    assert count(have, "blocks.0.*") == count(have, "blocks.11.*") == block
    assert count(have, "blocks.3.attn.*") == attention
    assert count(have, "blocks.3.mlp.*") == mlp
    assert count(have, *NORMS) == norms
    assert count(have, "*") - count(have, "head.*") == body
    assert count(have, "*") == whole


def count_added(name: str, patch: ModelPatch) -> int:
    return count(sizes(name, 1000, patch), "*") - count(sizes(name), "*")


def test_fedperfix() -> None:
    """3 D b + b + 2 D = 3 * 384 * 256 + 256 + 768 = 295,936 a block. Published: 21.03 and 24.42 in all, 20.66 sent,
    13.89 without attention, 21.01 without norms, in units of 2^20 and with 1000 classes."""
    have = sizes(SMALL_224, 1000, KVAdapter())
    assert count(have, "blocks.5.attn.adapter.*") == 295_936
    assert count_added(SMALL_224, KVAdapter()) == count_added(SMALL_224, KVAdapter(mode="concat")) == 3_551_232
    total = count(have, "*")
    sent = total - count(have, "*.attn.adapter.*", "head.*")
    assert sent == 21_665_664
    plain = count(sizes(SMALL_224), "*")
    assert [round(value / MEBI, 2) for value in (plain, total, sent)] == [21.03, 24.42, 20.66]
    assert plain - count(sizes(SMALL_224), "*.attn.*", "head.*") == 14_569_344
    assert round((plain - 19_200) / MEBI, 2) == 21.01
    assert count(sizes(SMALL_224, 100), "*") == 21_704_164


def test_additions_have_the_sizes_of_the_papers() -> None:
    # linear prefixes: 12 (2 D^2 + 2 D), D = 384; published 24.413 in all: as many as FedPerfix, to 0.1 percent
    assert count_added(SMALL_224, FreePrefix(form="linear")) == 3_548_160
    assert round(count(sizes(SMALL_224, 1000, FreePrefix(form="linear")), "*") / MEBI, 3) == 24.413
    # literal prefixes: 12 blocks, keys and values, 10 of 384
    assert count_added(SMALL_224, FreePrefix(tokens=10)) == 12 * 2 * 10 * 384
    # prompts: 10 * 768 = 7.68e3; the published 9.22e3 of FedVPT-D is 12 * 768: one prompt for each block
    assert count_added(BASE, Prompts(tokens=10)) == 7_680
    assert count_added(BASE, Prompts(tokens=1, placement="deep")) == 9_216
    assert count_added(SMALL_224, Prompts(tokens=10, placement="appended")) == 12 * 10 * 384
    # lora: 4 r D L = 4 * 16 * 768 * 12
    assert count_added(BASE, Lora(rank=16)) == 589_824
    # what fed head and fed bias train: 768 * 100 + 100, and every bias of the backbone
    have = sizes(BASE, 100)
    assert count(have, "head.*") == 76_900
    assert count(have, "*.bias") - count(have, "head.bias") == 102_912


@pytest.mark.parametrize(
    ("blocks", "classes", "whole", "published"),
    [(2, 10, 14_926_090, 14.23), (4, 100, 29_171_044, 27.82), (6, 100, 43_346_788, 41.34)],
)
def test_eftvit(blocks: int, classes: int, whole: int, published: float) -> None:
    """What a device trains: embedding, its blocks and the head, in units of 2^20."""
    local: Iterable[str] = (f"blocks.{block}.*" for block in range(blocks))
    trained = count(sizes(BASE, classes), "patch_embed.*", "pos_embed", "cls_token", "head.*", *local)
    assert trained == whole
    assert abs(trained / MEBI - published) < 0.006


@pytest.mark.parametrize(("head_width", "whole", "generated"), [(64, 2_657_508, 1_572_864), (None, 1_084_644, 393_216)])
def test_fedtp(head_width: int | None, whole: int, generated: int) -> None:
    """The generated part is 8 blocks of (3 * inner, 128): inner 512 as in the released code, or 128."""
    options = {
        "image_size": 32, "patch_size": 4, "width": 128, "depth": 8, "heads": 8, "mlp_ratio": 2.0,
        "qkv_bias": False, "head_width": head_width,
    }  # fmt: skip
    with torch.device("meta"):
        have = {name: value.numel() for name, value in build_vit(SMALL, 100, seed=0, options=options).tensors().items()}
    assert count(have, "*") == whole
    assert count(have, "blocks.*.attn.qkv.weight") == generated
    assert count(have, "blocks.*.attn.qkv.bias") == 0
