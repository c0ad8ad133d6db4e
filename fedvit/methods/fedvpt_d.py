"""FedVPT-D: every block has prompts of its own, which are trained and averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedvit.methods.fed_prompt import FedPrompt


@dataclass(frozen=True, kw_only=True)
class FedVptDeep(FedPrompt):
    """Fed-Prompt with deep prompts: what a block makes of its prompts gives way to the next block's.

    Source: Jia et al., "Visual Prompt Tuning", arXiv:2203.12119; baseline of pFedPG, arXiv:2308.15367, whose
    published traffic is that of `tokens` = 1.
    """

    source: ClassVar[str] = "Jia et al., arXiv:2203.12119; baseline of pFedPG, arXiv:2308.15367"
    placement: ClassVar[Literal["shallow", "deep"]] = "deep"

    head: Literal["shared", "local"] = "local"
