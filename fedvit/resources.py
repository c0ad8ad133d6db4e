"""The words in which both sides speak of what training costs; units are in the names.

A missing measurement is None, never 0.
"""

import math
from typing import Literal

from msgspec import Struct

BudgetKind = Literal["memory", "flops", "time", "upload", "temperature"]
"""What can be exceeded."""


class Budget(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device may spend on a run. None: not limited."""

    memory_bytes: int | None = None  # resident memory of the whole process at its highest
    flops_per_round: int | None = None  # of a round's training
    round_deadline_s: float | None = None  # of a round's training on the device, without transfers
    upload_bytes: int | None = None  # of one round's result

    def tightest(self, other: "Budget") -> "Budget":
        """Both at once.

        >>> Budget(memory_bytes=5, upload_bytes=2).tightest(Budget(memory_bytes=3)).memory_bytes
        3
        """
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        return Budget(
            **{name: min((one for one in pair if one is not None), default=None) for name, pair in both.items()}
        )


IMAGE_CACHE_BYTES = 64 << 20


def image_cache_bytes(memory_budget_bytes: int | None) -> int:
    """Decoded images that a device may keep, of its training and of its test images each.

    >>> image_cache_bytes(None), image_cache_bytes(256_000_000)
    (67108864, 8000000)
    """
    return IMAGE_CACHE_BYTES if memory_budget_bytes is None else min(IMAGE_CACHE_BYTES, memory_budget_bytes // 32)


class ResourceUse(Struct, frozen=True, kw_only=True):
    """What one task really cost a device, as measured on that device."""

    train_s: float | None = None  # wall time of the task's work, without transfers
    step_s: float | None = None  # median wall time of one training step
    steps: int = 0
    flops: int | None = None  # forward and backward, counted from the graphs that ran
    peak_rss_bytes: int | None = None  # the highest resident memory of the whole process during the task
    received_bytes: int | None = None  # payload bytes since the process started
    sent_bytes: int | None = None
    fetched_bytes: int | None = None  # blobs that had to be fetched for the task
    upload_bytes: int | None = None  # of the result's tensors, packed
    sustained: float | None = None  # median step of the last tenth of a task divided by that of its first tenth
    energy_j: float | None = None  # of whatever `energy_source` sees during the task: mostly the whole device
    energy_source: str | None = None  # the sensor; one of a processor alone says so ("rapl package")
    temperature_c: float | None = None  # the highest that was seen
    throttled: bool | None = None  # whether the system slowed the processor down meanwhile
    broke: tuple[BudgetKind, ...] = ()  # budgets that the task exceeded


ProductKind = Literal["weights", "gradient", "attention", "integers"]
"""Products by what limits them: with a matrix of weights; over samples into a weight's gradient (the left operand is
transposed, and the product is added to); many small ones side by side; of integers."""


class ProductRate(Struct, frozen=True, array_like=True):
    """How fast `batch` matrix products (rows x inner) (inner x columns) are; 1 multiply-add = 2 FLOPs."""

    kind: ProductKind
    batch: int
    rows: int
    inner: int
    columns: int
    flops_per_s: float


class Speed(Struct, frozen=True, kw_only=True):
    """How fast a device computes with the threads that training uses: as it measured, or by the catalogue."""

    threads: int
    products: tuple[ProductRate, ...]  # at some sizes; others lie in between
    bytes_per_s: dict[str, float]  # read and written by an operator, by ONNX name; "Add" stands for all others
    node_s: float  # that every operator takes, however small its tensors

    def __post_init__(self) -> None:
        """Raises ValueError for figures that nothing can be predicted from: a hello brings them from outside."""
        rates = [*(product.flops_per_s for product in self.products), *self.bytes_per_s.values()]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"rates must be positive and finite, the lowest is {min(rates)}")
        if not (math.isfinite(self.node_s) and self.node_s >= 0):
            raise ValueError(f"node_s = {self.node_s} must not be negative")
        if "weights" not in {product.kind for product in self.products} or "Add" not in self.bytes_per_s:
            raise ValueError("products of kind 'weights' and the rate of 'Add' must be there")


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """What a device says about itself when it joins."""

    host: str
    machine: str  # x86_64, aarch64, ...
    cores: int
    threads: int  # how many of them training may use
    ram_bytes: int | None = None
    board: str | None = None  # as the device tree names it
    base_rss_bytes: int | None = None  # of this process when it was ready; with a memory budget, engine included
    free_disk_bytes: int | None = None  # where its state is
    speed: Speed | None = None
    budget: Budget = Budget()
