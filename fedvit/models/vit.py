"""A timm Vision Transformer driven by unfolded patches, so that its whole training step can be traced.

Tokens are taken by `split`, whose gradient is a concatenation, never by indexing, whose gradient is a scatter.
Tensors keep timm's names and shapes. Letters in names: B batch, N tokens, D width, P values of a patch.
"""

import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.label_forms import LabelForm
from fedvit.models.attend import attention_pool, class_token
from fedvit.models.recompute import SampleSeeds, recompute_block

_POOLS = ("token", "avg", "map")
"""Ways to make one vector of all tokens: the class token, their mean, or attention with a learned query."""

ModelPart = Literal["attention", "mlp", "norms", "positions", "patches", "blocks"]
"""Features that a method may need; "blocks": Transformer blocks whose tokens have the same width."""


class TokenHooks(nn.Module):
    """A child of the timm model that adds or replaces tokens between stages; the base class changes nothing."""

    def after_embedding(self, x_BND: Tensor) -> Tensor:
        """Result of `embed`."""
        return x_BND

    def before_block(self, block: int, x_BND: Tensor) -> Tensor:
        """Return the input of block `block`; a run may begin at any block."""
        return x_BND

    def after_block(self, block: int, x_BND: Tensor) -> Tensor:
        """Return the output of block `block`. It is not called after the last, which computes only the class token."""
        return x_BND


class Dimensions:
    """The dimensions of a timm model, and the costs that follow from them."""

    vit: VisionTransformer
    label_form: LabelForm | None = None  # of the run's task; None: one class for each sample, or position

    @property
    def image_size(self) -> int:
        return int(self.vit.patch_embed.img_size[0])

    @property
    def patch_size(self) -> int:
        return int(self.vit.patch_embed.patch_size[0])

    @property
    def patches(self) -> int:
        return int(self.vit.patch_embed.num_patches)

    @property
    def labels_patches(self) -> bool:
        """Return whether the head reads the token of each patch, and answers with a class for each."""
        return self.label_form is not None and self.label_form.labels_patches

    @property
    def width(self) -> int:
        return int(self.vit.embed_dim)

    @property
    def depth(self) -> int:
        return len(self.vit.blocks)

    @property
    def heads(self) -> int:
        """Heads of each block's attention."""
        return int(cast(Any, self.vit.blocks[0]).attn.num_heads)

    @property
    def classes(self) -> int:
        return int(self.vit.num_classes)

    @property
    def pools_class_token(self) -> bool:
        """True if the head reads the class token; else it reads other tokens, pooled or each by itself."""
        return self.vit.global_pool == "token" and not self.labels_patches

    @property
    def prefix_tokens(self) -> int:
        """Class token and registers: tokens that are no patches."""
        return int(self.vit.num_prefix_tokens)

    @property
    def mean_std(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Normalisation of images that the weights expect; one half if the model does not define it."""
        config: dict[str, Any] = getattr(self.vit, "pretrained_cfg", None) or {}
        half = (0.5, 0.5, 0.5)
        mean, std = tuple(config.get("mean", half)), tuple(config.get("std", half))
        return cast(tuple[float, float, float], mean), cast(tuple[float, float, float], std)

    def activation_bytes(self, tokens: int) -> int:
        """Memory of pre-norm blocks for one sample's backward pass: 16 units of tokens x width, and twice the attention
        weights."""
        return 4 * self.depth * (16 * tokens * self.width + 2 * self.heads * tokens**2)

    def product_rows(self, tokens: int) -> int:
        """Rows of a matrix product for one sample of `tokens` tokens."""
        return tokens


class PatchViT(Dimensions, nn.Module):
    """Stages of a plain ViT as functions of patches; `call` runs them with any values for its tensors."""

    kind: ClassVar[str] = "a Transformer"
    reads_text: ClassVar[bool] = False
    has: ClassVar[frozenset[ModelPart]] = frozenset(typing.get_args(ModelPart))

    seed: int = 0  # of the run: first random values of a method's own tensors follow from it

    def __init__(self, name: str, vit: VisionTransformer) -> None:
        super().__init__()
        self.name = name
        self.vit = vit.eval()
        self.seeds = SampleSeeds()  # for dropout, as `embed` got them
        self.recompute = False  # whether blocks keep only what enters them for their backward pass
        self._check_plain()

    def _check_plain(self) -> None:
        vit = self.vit
        embed = vit.patch_embed
        pool: Any = vit.attn_pool
        reasons = {
            f"it pools its tokens by {vit.global_pool!r}, not by one of {', '.join(_POOLS)}": (
                vit.global_pool not in _POOLS
            ),
            "its pooling has positions or several queries": (
                pool is not None and (pool.pos_embed is not None or pool.latent_len != 1)
            ),
            f"its image of {embed.img_size[0]} pixels holds no patch of {embed.patch_size[0]}": embed.num_patches < 1,
            f"its image of {embed.img_size[0]} pixels is not a multiple of its patches of {embed.patch_size[0]}": (
                embed.img_size[0] % embed.patch_size[0] != 0
            ),
            "its patches are not square": embed.proj.kernel_size[0] != embed.proj.kernel_size[1],
            "its image is not square": embed.img_size[0] != embed.img_size[1],
            "its patch embedding is normalised": not isinstance(embed.norm, nn.Identity),
            "it has no position embedding": vit.pos_embed is None and getattr(vit, "rope", None) is None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError("FV1112", f"model {self.name!r} is not supported: {reason}")

    # --- tensors --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Every trainable tensor by timm's name, or by that of the model patch that added it; detached."""
        return {name: value.detach() for name, value in self.vit.named_parameters()}

    def add(self, path: str, module: nn.Module) -> None:
        """Add a module to the timm model: `add("blocks.0.mlp.adapter", ...)`; its tensors are named after it.

        Raises ConfigError if the name exists.
        """
        parent, _, name = path.rpartition(".")
        owner = self.vit.get_submodule(parent)
        if hasattr(owner, name):
            raise ConfigError("FV1112", f"model {self.name!r} already has a module {path!r}")
        owner.add_module(name, module)

    def _token_hooks(self) -> list[TokenHooks]:
        return [child for child in self.vit.children() if isinstance(child, TokenHooks)]

    # --- stages ---------------------------------------------------------------------------------------

    def call(self, tensors: Mapping[str, Tensor], body: Callable[["PatchViT"], Any]) -> Any:
        """Run `body(self)` while every tensor has the value given in `tensors`."""
        try:
            return torch.func.functional_call(self, {f"vit.{name}": value for name, value in tensors.items()}, (body,))
        finally:
            self.seeds.now = None

    @contextmanager
    def recomputing(self, recompute: bool) -> Iterator[None]:
        """Choose, until the context ends, whether the backward pass recomputes blocks."""
        before, self.recompute = self.recompute, recompute
        try:
            yield
        finally:
            self.recompute = before

    def forward(self, body: Callable[["PatchViT"], Any]) -> Any:
        return body(self)

    def embed(self, patches_BNP: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        """Tokens of the kept patches, each with its own position, behind the prefix tokens.

        `kept_BN` says which patch of the image each row is; None means all, in order. Of `seeds_B` follows what dropout
        drops, here and in the blocks.
        """
        vit = self.vit
        self.seeds.now = seeds_B
        projection = vit.patch_embed.proj
        x_BND = nn.functional.linear(patches_BNP, projection.weight.flatten(1), projection.bias)
        before: list[Tensor] = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
        prefix_1ND = torch.cat(before, dim=1) if len(before) > 1 else before[0] if before else None
        pos_1ND = vit.pos_embed
        if pos_1ND is not None and prefix_1ND is not None and not vit.no_embed_class:
            first_1ND, pos_1ND = pos_1ND.split([self.prefix_tokens, self.patches], dim=1)
            prefix_1ND = prefix_1ND + first_1ND
        if pos_1ND is not None:  # without, the blocks have rotary ones
            x_BND = x_BND + (pos_1ND if kept_BN is None else take_rows(pos_1ND.squeeze(0), kept_BN))
        if prefix_1ND is not None:
            x_BND = torch.cat([prefix_1ND.expand(x_BND.shape[0], -1, -1), x_BND], dim=1)
        x_BND = vit.norm_pre(x_BND)
        for hooks in self._token_hooks():
            x_BND = hooks.after_embedding(x_BND)
        return x_BND

    def run_blocks(self, x_BND: Tensor, first: int, last: int) -> Tensor:
        """Blocks `first` to `last - 1`."""
        token_hooks = self._token_hooks()
        for index, block in enumerate(self.vit.blocks[first:last], start=first):
            for hooks in token_hooks:
                x_BND = hooks.before_block(index, x_BND)
            x_BND = recompute_block(block, x_BND, self.seeds) if self.recompute else block(x_BND)
            for hooks in reversed(token_hooks):
                x_BND = hooks.after_block(index, x_BND)
        return x_BND

    def run_to_class(self, x_BND: Tensor, first: int, last: int | None = None) -> Tensor:
        """(B, 1, D) the class token behind block `last - 1`, which computes nothing else.

        By default that is the model's last block. Of a model that pools other tokens, all tokens (B, N, D).
        """
        last = self.depth if last is None else last
        if not self.pools_class_token:
            return self.run_blocks(x_BND, first, last)
        if first == last:
            return self._class_token(x_BND)
        x_BND = self.run_blocks(x_BND, first, last - 1)
        for hooks in self._token_hooks():  # after the block they only change other tokens
            x_BND = hooks.before_block(last - 1, x_BND)
        return class_token(self.vit.blocks[last - 1], x_BND)

    def _class_token(self, x_BND: Tensor) -> Tensor:
        cls_B1D, _ = x_BND.split([1, x_BND.shape[1] - 1], dim=1)
        return cast(Tensor, cls_B1D)

    def features(self, x_BND: Tensor, normed: bool = True) -> Tensor:
        """(B, D) what a block's output is pooled to, behind the final norms as a head reads it, or before them.

        An attention that pools reads normed tokens in both cases. Where patches have labels, (B, N, D): nothing is
        pooled.
        """
        vit = self.vit
        if self.labels_patches:
            _, tokens_BND = x_BND.split([x_BND.shape[1] - self.patches, self.patches], dim=1)  # prompts are before them
            return cast(Tensor, vit.fc_norm(vit.norm(tokens_BND))) if normed else tokens_BND
        if self.pools_class_token:
            cls_BD = (x_BND if x_BND.shape[1] == 1 else self._class_token(x_BND)).squeeze(1)
            return cast(Tensor, vit.fc_norm(vit.norm(cls_BD))) if normed else cls_BD
        tokens_BND = self._select_pooled(x_BND)
        if self.vit.global_pool == "map":
            pooled_BD = attention_pool(vit.attn_pool, vit.norm(tokens_BND))
        else:
            pooled_BD = (vit.norm(tokens_BND) if normed else tokens_BND).mean(dim=1)
        return cast(Tensor, vit.fc_norm(pooled_BD)) if normed else pooled_BD

    def _select_pooled(self, x_BND: Tensor) -> Tensor:
        """The tokens that are pooled: most models leave class token and registers out."""
        prefix = self.prefix_tokens
        if self.vit.pool_include_prefix or prefix == 0:
            return x_BND
        _, tokens_BND = x_BND.split([prefix, x_BND.shape[1] - prefix], dim=1)
        return cast(Tensor, tokens_BND)

    def head(self, features_BD: Tensor, name: str = "head") -> Tensor:
        """(B, classes) logits, (B, N, classes) of patches; `name` is timm's own head or one that a patch added."""
        return cast(Tensor, self.vit.get_submodule(name)(features_BD))

    def classify(self, x_BND: Tensor) -> Tensor:
        """(B, classes) logits of a block's output."""
        return self.head(self.features(x_BND))


def take_rows(table_ND: Tensor, rows_BN: Tensor) -> Tensor:
    """(B, N, D) `table[rows]`, in a form whose gradient devices can compute."""
    return cast(Tensor, _TakeRows.apply(table_ND, rows_BN))


class _TakeRows(torch.autograd.Function):
    """`table[rows]` whose backward is a matrix product.

    Indexing's own backward adds into shared rows, a scatter in a graph: slow, and on
    several threads its order of additions is not fixed. A product with the one-hot matrix is neither.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(table_ND: Tensor, rows_BN: Tensor) -> Tensor:
        return table_ND[rows_BN]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, rows = inputs
        ctx.save_for_backward(rows)
        ctx.length = table.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_BND,) = grads
        (rows,) = ctx.saved_tensors
        one_hot = (rows.reshape(-1, 1) == torch.arange(ctx.length, device=rows.device)).to(grad_BND.dtype)
        return one_hot.transpose(0, 1) @ grad_BND.reshape(-1, grad_BND.shape[-1]), None
