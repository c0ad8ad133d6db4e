"""The precision in which torch computes products of float32 tensors."""

import torch

from fedvit.roles import ProductPrecision


def products_in(precision: ProductPrecision, device: torch.device) -> torch.autocast:
    """Compute products on `device` in `precision` within the context, and their later backward passes, too.

    torch keeps the choice between fp32 and tf32 for the whole process: it holds until the next call.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
