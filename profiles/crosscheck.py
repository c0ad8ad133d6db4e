"""Cross-check of the forward pass with fvcore, which counts operators in its own trace."""

import logging
import warnings
from importlib.metadata import version

import torch
from torch import Tensor, nn

from fedvit.models.text import TextModel
from fedvit.models.vit import PatchViT
from profiles.prediction import ProgramCost
from profiles.report.document import CrossCheck

PRODUCTS = ("linear", "matmul", "addmm", "bmm", "einsum", "conv")
"""Operators of fvcore that are matrix products."""


def fvcore_check(vit: PatchViT, cost: ProgramCost) -> CrossCheck:
    """fvcore's count of one image through the model, beside that of the graph with which a device answers.

    fvcore counts a multiply-add as one, norms at 5 per element, and does not count softmax, GELU and additions;
    attention is written out here, as it does not count torch's fused one. It hooks into every layer, and with a hook
    the last block asks for all tokens instead of the class token: (tokens - 1) x width^2 more. Tensors that a method
    keeps beside the model (prompts, twins) are in the graph alone.
    """

    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit.vit

        def forward(self, read: Tensor) -> Tensor:
            return vit.classify(vit.run_to_class(vit.embed(read, None), 0))

    read = (
        torch.zeros(1, vit.context, dtype=torch.int64)
        if isinstance(vit, TextModel)
        else torch.zeros(1, vit.patches, 3 * vit.patch_size**2)
    )
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch.jit, which fvcore uses, also when it is imported
        from fvcore.nn import FlopCountAnalysis

        counted = FlopCountAnalysis(Answer().eval(), read)
        counted.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        by_operator, unsupported = counted.by_operator(), counted.unsupported_ops()
    return CrossCheck(
        tool=f"fvcore {version('fvcore')}",
        convention="1 per multiply-add of products, 5 per element of norms; the last block's queries of all tokens",
        macs=int(sum(by_operator.values())),
        product_macs=int(sum(by_operator.get(name, 0) for name in PRODUCTS)),
        ours_macs=cost.flops_evaluate // 2,
        not_counted=sorted(name.removeprefix("aten::") for name in unsupported),
    )
