"""Settings of the engines on torch."""

from typing import NamedTuple

from fedvit.roles import ProductPrecision


class TorchSettings(NamedTuple):
    """The place and the manner in which torch computes."""

    accelerator: str  # torch device
    precision: ProductPrecision = "fp32"
    fused: bool | None = None  # compile steps; None: on a GPU for long runs
    is_eager: bool = False  # one device after the other, by backward() and torch.optim
    checks_export: bool = False  # also export the graphs that real devices would run
