"""The types with which both sides describe the cost of training; units are in the names.

A missing measurement is None, never 0.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

BudgetKind = Literal["memory", "flops", "time", "upload", "temperature"]
"""Kinds of budgets."""

# Hellos and results bring these values from outside: impossible ones are refused with the message.
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Measure = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Neither negative, nor infinite, nor not a number."""
Text = Annotated[str, Meta(max_length=255)]


class Budget(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The budgets of a device in a run. None: not limited."""

    memory_bytes: Amount | None = None  # resident memory of the whole process at its highest
    flops_per_round: Amount | None = None  # of a round's training
    round_deadline_s: Measure | None = None  # of a round's training on the device, without transfers
    upload_bytes: Amount | None = None  # of one round's result

    def tightest(self, other: "Budget") -> "Budget":
        """The tighter limit of each kind.

        >>> Budget(memory_bytes=5, upload_bytes=2).tightest(Budget(memory_bytes=3)).memory_bytes
        3
        """
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        return Budget(
            **{name: min((one for one in pair if one is not None), default=None) for name, pair in both.items()}
        )


IMAGE_CACHE_BYTES = 64 << 20


def image_cache_bytes(memory_budget_bytes: int | None) -> int:
    """Bytes of decoded images that a device may keep in memory, for training and for test images each.

    >>> image_cache_bytes(None), image_cache_bytes(256_000_000)
    (67108864, 8000000)
    """
    return IMAGE_CACHE_BYTES if memory_budget_bytes is None else min(IMAGE_CACHE_BYTES, memory_budget_bytes // 32)


class ResourceUse(Struct, frozen=True, kw_only=True):
    """The cost of one task, as measured on the device."""

    train_s: Measure | None = None  # wall time of the task's work, without transfers
    step_s: Measure | None = None  # median wall time of one training step
    steps: Amount = 0
    flops: Amount | None = None  # forward and backward, counted from the graphs that ran
    peak_rss_bytes: Amount | None = None  # the highest resident memory of the whole process during the task
    received_bytes: Amount | None = None  # payload bytes since the process started
    sent_bytes: Amount | None = None
    fetched_bytes: Amount | None = None  # blobs that had to be fetched for the task
    upload_bytes: Amount | None = None  # of the result's tensors, packed
    sustained: Measure | None = None  # median step of the last tenth of a task divided by that of its first tenth
    energy_j: Measure | None = None  # as measured by `energy_source` during the task: mostly of the whole device
    energy_source: Text | None = None  # the sensor; one of a processor alone says so ("rapl package")
    temperature_c: Annotated[float, Meta(ge=-300.0, le=1e4)] | None = None  # the highest sample
    throttled: bool | None = None  # whether the system slowed the processor down meanwhile
    broke: Annotated[tuple[BudgetKind, ...], Meta(max_length=5)] = ()  # budgets that the task exceeded
    battery_percent: Annotated[int, Meta(ge=0, le=100)] | None = None  # of a battery, at the end of the task
    charging: bool | None = None  # whether its battery is charged, or a charger is connected
    fetch_s: Measure | None = None  # wall time from the task's receipt until its blobs were there


ProductKind = Literal["weights", "gradient", "attention", "integers", "halves"]
"""Products by what limits them: with a matrix of weights; over samples into a weight's gradient (the left operand is
transposed, and the product is added to); many small ones side by side; of integers; of float16."""


Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MAX_RATES = 256
"""Measured rates of one kind: a prediction looks at them for each node of a graph."""


class ProductRate(Struct, frozen=True, array_like=True):
    """Speed of `batch` matrix products (rows x inner) (inner x columns); 1 multiply-add = 2 FLOPs."""

    kind: ProductKind
    batch: Length
    rows: Length
    inner: Length
    columns: Length
    flops_per_s: Annotated[float, Meta(le=1e18)]


class Speed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The compute speed of a device with the threads that training uses: measured, or from the catalogue."""

    threads: Length
    # at some sizes; others lie in between
    products: Annotated[tuple[ProductRate, ...], Meta(max_length=MAX_RATES)]
    bytes_per_s: Annotated[
        dict[str, float], Meta(max_length=MAX_RATES)
    ]  # read and written by an operator, by ONNX name; "Add" stands for all others
    node_s: Measure  # that every operator takes, however small its tensors
    load_per_core: Measure | None = None  # processes of others that wanted a core while it was measured
    kernels: bool = False  # graphs run with the optional kernels

    def __post_init__(self) -> None:
        """Raises ValueError for figures that allow no prediction: a hello brings them from outside."""
        rates = [*(product.flops_per_s for product in self.products), *self.bytes_per_s.values()]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"rates must be positive and finite, the lowest is {min(rates)}")
        if not (math.isfinite(self.node_s) and self.node_s >= 0):
            raise ValueError(f"node_s = {self.node_s} must not be negative")
        if "weights" not in {product.kind for product in self.products} or "Add" not in self.bytes_per_s:
            raise ValueError("products of kind 'weights' and the rate of 'Add' must be there")


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """The description of a device in its hello."""

    host: Text
    machine: Text  # x86_64, aarch64, ...
    cores: Length
    threads: Length  # how many of them training may use
    ram_bytes: Amount | None = None
    board: Text | None = None  # as the device tree names it
    base_rss_bytes: Amount | None = None  # of this process when it was ready; with a memory budget, engine included
    free_disk_bytes: Amount | None = None  # where its state is
    speed: Speed | None = None
    budget: Budget = Budget()
    feature_bytes: Amount | None = None  # on its disk, for features of layers that are not trained; None: keeps none
