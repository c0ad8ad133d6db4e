"""FedPerfix: attention is averaged, and every device corrects its keys and values with an adapter of its own."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD, personal
from fedvit.models.kv_adapter import KVAdapter
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedPerfix(FedAvg):
    """Adapters and head are local; all parameters are trained together by plain SGD.

    Source: Sun et al., "FedPerfix: Towards Partial Model Personalization of Vision Transformers in Federated
    Learning", arXiv:2308.09160. `mode` "add" is the released code, "concat" the paper's equations. The paper's text
    does not know `with_last_block`: the released configuration for CIFAR-100 keeps the last block local, too.
    """

    source: ClassVar[str] = "Sun et al., arXiv:2308.09160"

    epochs: Annotated[int, Meta(ge=1)] = 10
    batch_size: Annotated[int, Meta(ge=1)] = 64

    mode: Literal["add", "concat"] = "add"
    bottleneck: Annotated[int, Meta(ge=1)] = 256  # of the adapter (paper: b)
    scale: float = 1.5  # of what the adapter gives (paper: s)
    with_last_block: bool = False

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (KVAdapter(bottleneck=self.bottleneck, scale=self.scale, mode=self.mode),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        last_block = (f"blocks.{vit.depth - 1}.*",) if self.with_last_block else ()
        return personal("blocks.*.attn.adapter.*", *HEAD, *last_block)
