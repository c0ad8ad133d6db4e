"""Model patches: additions to a Vision Transformer that have tensors of their own.

One file in this folder is one model patch; the table `MODEL_PATCHES` lists them. A patch adds named tensors and
keeps the names and values of all others, so that weights of timm still load and every method's groups
still match. Patches combine in any order.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from timm.models.vision_transformer import Block

from fedvit.errors import ConfigError
from fedvit.models.vit import PatchViT


class ModelPatch(ABC):
    """A frozen dataclass of options that can change a model."""

    @abstractmethod
    def apply(self, vit: PatchViT, seed: int) -> None:
        """Change a freshly built model in place; new random values follow from `seed` alone.

        Raises ConfigError for an unsuitable model, or one that has this patch already; the model is unchanged then.
        """


@contextmanager
def seed_random(seed: int, what: str) -> Iterator[None]:
    """Random numbers that follow from `seed` and `what`: independent of those of the model and of other patches."""
    digest = hashlib.blake2b(f"{what}/{seed}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "big"))
        yield


def plain_blocks(vit: PatchViT) -> list[Block]:
    """The blocks of a model whose blocks are an attention and an MLP, each behind its norm."""
    for block in vit.vit.blocks:
        if type(block) is not Block:
            raise ConfigError("FV1112", f"model {vit.name!r} cannot be changed: its blocks are {type(block).__name__}")
    return cast(list[Block], list(vit.vit.blocks))
