"""timm's attention written out, so that a block can compute the class token's row only.

Letters in names: B batch, N tokens, Q query tokens, M keys, D width, I inner width of all heads, H heads, W width
of one head.
"""

from collections.abc import Callable
from typing import Protocol, cast

from timm.layers.attention import Attention
from timm.layers.attention_pool import AttentionPoolLatent
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

MoreKeys = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(B, N, D) what enters, (B, N, I) keys, (B, N, I) values -> keys and values (B, M, I)"""


class AttentionParts(Protocol):
    """The parts of timm's `Attention`."""

    num_heads: int
    scale: float
    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Dropout


def attend(
    attention: AttentionParts, x_BND: Tensor, queries: int, more: MoreKeys | None = None, mask_QM: Tensor | None = None
) -> Tensor:
    """(B, Q, D) the attention's output for the first `queries` tokens; all tokens are keys and values.

    `mask_QM` is added to the scores.
    """
    heads, qkv = attention.num_heads, attention.qkv
    if queries == x_BND.shape[1] or qkv._forward_hooks:  # a hook (LoRA) belongs to the layer as a whole
        q_BNI, k_BMI, v_BMI = qkv(x_BND).chunk(3, dim=-1)
        q_BQI = q_BNI if queries == x_BND.shape[1] else q_BNI.split([queries, x_BND.shape[1] - queries], dim=1)[0]
    else:
        inner = qkv.weight.shape[0] // 3
        weights = qkv.weight.split([inner, 2 * inner])
        biases = (None, None) if qkv.bias is None else qkv.bias.split([inner, 2 * inner])
        first_BQD, _ = x_BND.split([queries, x_BND.shape[1] - queries], dim=1)
        # in one piece, so that the product adds the bias itself
        q_BQI = functional.linear(first_BQD.contiguous(), weights[0], biases[0])
        k_BMI, v_BMI = functional.linear(x_BND, weights[1], biases[1]).chunk(2, dim=-1)
    if more is not None:
        k_BMI, v_BMI = more(x_BND, k_BMI, v_BMI)

    def split(x_BNI: Tensor) -> Tensor:
        """(B, H, N, W): heads are contiguous pieces of the inner width."""
        return x_BNI.reshape(*x_BNI.shape[:2], heads, -1).transpose(1, 2)

    q_BHQW = attention.q_norm(split(q_BQI)) * attention.scale
    k_BHMW = attention.k_norm(split(k_BMI))
    scores_BHQM = q_BHQW @ k_BHMW.transpose(-2, -1)
    if mask_QM is not None:
        scores_BHQM = scores_BHQM + mask_QM
    weights_BHQM = attention.attn_drop(scores_BHQM.softmax(dim=-1))
    out_BQI = (weights_BHQM @ split(v_BMI)).transpose(1, 2).flatten(2)
    return cast(Tensor, attention.proj_drop(attention.proj(attention.norm(out_BQI))))


def class_token(block: nn.Module, x_BND: Tensor) -> Tensor:
    """(B, 1, D) the first token of what leaves a block: the same numbers, without computing the other tokens'.

    Every token is still a key and a value, but only one is a query, and only one goes through the MLP: of the
    block's products 10 / 12 are saved (of all FLOPs of a ViT-B some 7 %).
    """
    first_B1D, _ = x_BND.split([1, x_BND.shape[1] - 1], dim=1)
    if not isinstance(block, Block) or not (asks := _asks(block.attn)):
        out_B1D, _ = block(x_BND).split([1, x_BND.shape[1] - 1], dim=1)
        return cast(Tensor, out_B1D)
    first_B1D = first_B1D + block.drop_path1(block.ls1(asks(block.norm1(x_BND), 1)))
    return cast(Tensor, first_B1D + block.drop_path2(block.ls2(block.mlp(block.norm2(first_B1D)))))


def attention_pool(pool: AttentionPoolLatent, x_BND: Tensor) -> Tensor:
    """(B, D) what timm's attention with one learned query makes of the tokens."""

    def split(x_BNI: Tensor) -> Tensor:
        return x_BNI.reshape(*x_BNI.shape[:2], pool.num_heads, -1).transpose(1, 2)

    k_BNI, v_BNI = pool.kv(x_BND).chunk(2, dim=-1)
    q_1HQW = pool.q_norm(split(pool.q(pool.latent))) * pool.scale
    q_BHQW = q_1HQW.expand(x_BND.shape[0], -1, -1, -1)
    weights_BHQN = (q_BHQW @ pool.k_norm(split(k_BNI)).transpose(-2, -1)).softmax(dim=-1)
    out_BQD = pool.proj_drop(pool.proj((weights_BHQN @ split(v_BNI)).transpose(1, 2).flatten(2)))
    if pool.mlp is not None:
        out_BQD = out_BQD + pool.mlp(pool.norm(out_BQD))
    return cast(Tensor, out_BQD.squeeze(1))


def _asks(attention: nn.Module) -> Callable[[Tensor, int], Tensor] | None:
    """The function that computes the first tokens only, if the attention has one."""
    if type(attention) is Attention and attention.gate is None:
        return lambda x_BND, queries: attend(attention, x_BND, queries)
    return getattr(attention, "of_first", None)
