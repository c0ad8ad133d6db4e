"""The words in which both sides speak of what training costs; units are in the names.

A missing measurement is None, never 0.
"""

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

        >>> Budget(memory_bytes=5, upload_bytes=2).tightest(Budget(memory_bytes=3))
        Budget(memory_bytes=3, upload_bytes=2)
        """
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        return Budget(
            **{name: min((one for one in pair if one is not None), default=None) for name, pair in both.items()}
        )


class ResourceUse(Struct, frozen=True, kw_only=True):
    """What one task really cost a device, as measured on that device."""

    train_s: float | None = None  # wall time of the task's work, without transfers
    step_s: float | None = None  # median wall time of one training step
    steps: int = 0
    flops: int | None = None  # forward and backward, counted from the graphs that ran
    peak_rss_bytes: int | None = None  # the highest resident memory of the whole process during the task
    received_bytes: int | None = None  # payload bytes since the process started
    sent_bytes: int | None = None
    sustained: float | None = None  # median step of the last tenth of a task divided by that of its first tenth
    energy_j: float | None = None  # of whatever `energy_source` sees during the task: mostly the whole device
    energy_source: str | None = None  # the sensor; one of a processor alone says so ("rapl package")
    temperature_c: float | None = None  # the highest that was seen
    throttled: bool | None = None  # whether the system slowed the processor down meanwhile
    broke: tuple[BudgetKind, ...] = ()  # budgets that the task exceeded


class ProductRate(Struct, frozen=True, array_like=True):
    """How fast matrix products (rows x inner) (inner x columns) are; 1 multiply-add = 2 FLOPs."""

    rows: int
    inner: int
    columns: int
    flops_per_s: float


class Speed(Struct, frozen=True, kw_only=True):
    """How fast a device computes with the threads that training uses: as it measured, or by the catalogue."""

    threads: int
    products: tuple[ProductRate, ...]  # at some sizes; others lie in between
    stream_bytes_per_s: float  # read and written by elementwise work on tensors that are larger than any cache
    cached_bytes_per_s: float  # on tensors that fit into a cache
    cache_bytes: int  # up to which tensors count as cached
    elements_per_s: dict[str, float]  # of operators that do more than read and write, by ONNX name
    node_s: float  # that every operator takes, however small its tensors


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
