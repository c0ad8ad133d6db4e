"""Parts of a Vision Transformer as name patterns, and the two tables of roles that many methods have.

Patterns are anchored; `*` also matches dots, so that `blocks.*.attn.*` is all of every block's attention.
"""

from fedvit.methods.base import GroupRule
from fedvit.program import Role

Patterns = tuple[str, ...]

PATCH_EMBED: Patterns = ("patch_embed.*",)
POS_EMBED: Patterns = ("pos_embed",)
# norms of queries and keys, which few models have, are LayerNorms like the others
NORMS: Patterns = (
    "norm.*",
    "norm_pre.*",
    "fc_norm.*",
    "stem.norm?.*",
    "blocks.*.norm?.*",
    "blocks.*.shortcut_norm.*",
    "blocks.*.attn.*norm.*",
    "blocks.*.mlp.norm.*",
)
ATTENTION: Patterns = ("blocks.*.attn.*",)
QKV: Patterns = ("blocks.*.attn.qkv.weight",)
MLP: Patterns = ("blocks.*.mlp.*",)
HEAD: Patterns = ("head.*",)
BIASES: Patterns = ("*.bias",)


def personal(*patterns: str) -> tuple[GroupRule, ...]:
    """Matching tensors are local, all others are averaged."""
    return (GroupRule("personal", Role.LOCAL, patterns), GroupRule("shared", Role.SHARED, ("*",)))


def on_frozen_backbone(*patterns: str, tuned: Role = Role.SHARED, head: Role = Role.SHARED) -> tuple[GroupRule, ...]:
    """The head and matching tensors are trained; all others are frozen, and sent once."""
    return (
        GroupRule("head", head, HEAD),
        GroupRule("tuned", tuned, patterns),
        GroupRule("backbone", Role.FROZEN, ("*",)),
    )
