"""The rows of docs/backbones.md: what a model is, and what its export was checked with."""

import re
from pathlib import Path
from typing import NamedTuple

import torch

from fedvit.methods import build_model, make_method
from fedvit.models.vit import PatchViT

PAGE = Path(__file__).parents[2] / "docs" / "backbones.md"
HEAD = "| backbone | parameters (M) | image, patch (px) | tokens | positions | the head reads | verified graphs |\n"
WHOLE_BELOW = 20_000_000
"""Parameters of the largest model of which the training of all tensors is exported, too."""
NAMES = (
    "vit_wee_patch16_reg1_gap_256",
    "vit_tiny_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_little_patch16_reg4_gap_256",
    "vit_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "deit3_small_patch16_224",
    "vit_base_patch16_224",
    "vit_base_patch14_reg4_dinov2",
    "vit_base_patch16_dinov3",
    "vit_base_patch16_siglip_224",
    "vit_large_patch16_224",
    "vit_large_patch16_dinov3",
)
OPTIONS = {name: {"image_size": 224} for name in NAMES if name.endswith("dinov2")}
"""Smaller images for models that read large ones by default."""
POOLS = {"token": "class token", "avg": "mean of tokens", "map": "attention over tokens"}
METHODS = ("fed_head", "fedavg")


class Row(NamedTuple):
    """One line of the table."""

    name: str
    facts: tuple[str, ...]

    def write(self, methods: tuple[str, ...]) -> str:
        """Write the line, with the methods whose graphs were verified."""
        return f"| `{self.name}` | {' | '.join(self.facts)} | {', '.join(f'`{method}`' for method in methods)} |\n"


def describe(vit: PatchViT) -> Row:
    """Describe a model."""
    inner = vit.vit
    parameters = sum(value.numel() for value in inner.parameters())
    positions = {"learned": inner.pos_embed, "rotary": getattr(inner, "rope", None)}
    return Row(
        vit.name,
        (
            f"{parameters / 1e6:.1f}",
            f"{vit.image_size}, {vit.patch_size}",
            str(vit.patches + vit.prefix_tokens),
            " and ".join(kind for kind, value in positions.items() if value is not None),
            POOLS[inner.global_pool],
        ),
    )


def choose_methods(vit: PatchViT) -> tuple[str, ...]:
    """Choose the methods whose graphs are verified: the head's, and for models of boards the training of everything."""
    is_small = sum(value.numel() for value in vit.vit.parameters()) < WHOLE_BELOW
    return METHODS if is_small else METHODS[:1]


def build(name: str, method: str = "fed_head", *, is_empty: bool = False) -> PatchViT:
    """Build a model of ten classes with random weights, or without values to describe it."""
    with torch.device("meta" if is_empty else "cpu"):
        return build_model(make_method(method, {"batch_size": 2}), name, 10, seed=0, options=OPTIONS.get(name))


def read_rows() -> dict[str, str]:
    """Read the table's lines from the page, by name."""
    _, _, behind = PAGE.read_text().partition(HEAD)
    lines = [line for line in behind.splitlines(keepends=True) if line.startswith("| `")]
    return {re.findall(r"`([^`]+)`", line)[0]: line for line in lines}


def store_rows(rows: list[str]) -> None:
    """Write the table into the page."""
    before, _, behind = PAGE.read_text().partition(HEAD)
    rest = [line for line in behind.splitlines(keepends=True) if not line.startswith("|")]
    PAGE.write_text(f"{before}{HEAD}|---|---|---|---|---|---|---|\n{''.join(rows)}{''.join(rest)}")
