"""The catalogue of boards: `devices/*.toml`, every figure with its source and a mark.

A file describes a board, or several that differ only in memory (`[variants]`: their names end in the variant's). Marks:

    measured    by this project
    published   from a source in `sources.toml`, which `source` names
    derived     computed from others by the formula in `source`
    unverified  general knowledge without a source

Devices train on their processors, to which the speeds belong; GPUs and accelerators are listed for information.
"""

import difflib
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec
from msgspec import Struct

from fedvit.errors import ConfigError
from fedvit.resources import Budget, ProductKind, ProductRate, Speed

Mark = Literal["measured", "published", "derived", "unverified"]


class Figure(Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its source."""

    value: float
    mark: Mark
    source: str

    @property
    def whole(self) -> int:
        return round(self.value)


class Cores(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal cores of a processor."""

    kind: str
    count: Figure
    clock_hz: Figure  # the highest
    flops_per_cycle: Figure  # of one core, fp32, 1 multiply-add = 2
    trains: bool = True  # products are split evenly among cores, so slow cores beside fast ones are not used


class BoardMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    ram_bytes: Figure
    cache_bytes: Figure  # of the last level
    usable_bytes: Figure | None = None  # available to one process on a headless system
    bytes_per_s: Figure | None = None  # by the data sheet
    memcpy_bytes_per_s: Figure | None = None  # bytes copied, so twice as many move


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    fp32_flops_per_s: Figure | None = None
    fp16_flops_per_s: Figure | None = None
    fp16_tensor_flops_per_s: Figure | None = None  # dense


class Accelerator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    int8_ops_per_s: Figure


class Power(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Power of the whole board, unless a note says otherwise."""

    idle_w: Figure | None = None
    load_w: Figure | None = None
    notes: tuple[str, ...] = ()


class PowerMode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A power mode; other settings are those of the default. Mark and source are those of all its figures."""

    mark: Mark
    source: str
    cores: dict[str, int] = {}  # by kind
    clock_hz: dict[str, float] = {}  # by kind
    gpu_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    load_w: float | None = None  # the mode's limit


class Connections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    storage: tuple[str, ...]
    network: tuple[str, ...]


class Software(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    system: str
    glibc: str
    python: str
    installs: bool  # whether `pip install fedvit` works without a container
    mark: Mark
    source: str
    cuda: str | None = None
    notes: tuple[str, ...] = ()


class Board(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One board of the catalogue."""

    id: str
    name: str
    family: str
    cores: tuple[Cores, ...]
    memory: BoardMemory
    power: Power
    connections: Connections
    efficiency: dict[int, Figure]  # by model width: share of the peak that fp32 training of a ViT reaches
    software: Software
    gpu: Gpu | None = None
    accelerator: Accelerator | None = None
    modes: dict[str, PowerMode] = {}
    default_mode: str | None = None

    @property
    def usable_bytes(self) -> Figure:
        """Memory for one process on a headless system, estimated if the file does not have it."""
        if self.memory.usable_bytes is not None:
            return self.memory.usable_bytes
        ram = self.memory.ram_bytes.value
        left = max(ram - SYSTEM_BYTES, ram * USABLE_SHARE)
        return Figure(left, "unverified", "memory without 512 MiB for the system, at least 0.8 of it")

    def mode(self, name: str | None = None) -> PowerMode | None:
        """The power mode `name`, or the one that the board starts with. Raises ConfigError when it has none such."""
        if name is None:
            name = self.default_mode
        if name is None:
            return None
        if name not in self.modes:
            known = ", ".join(f"{self.id}@{mode}" for mode in self.modes) or self.id
            raise ConfigError("FV1902", f"board {self.id!r} has no power mode {name!r}; choose one of: {known}")
        return self.modes[name]

    def training_cores(self, mode: str | None = None) -> list[tuple[Cores, int, float]]:
        """Kinds of cores that training uses in a mode, each with its number and its clock in Hz."""
        chosen = self.mode(mode)
        counts, clocks = (chosen.cores, chosen.clock_hz) if chosen else ({}, {})
        all_cores = [
            (kind, counts.get(kind.kind, kind.count.whole), clocks.get(kind.kind, kind.clock_hz.value))
            for kind in self.cores
            if kind.trains
        ]
        return [(kind, count, clock) for kind, count, clock in all_cores if count]

    def peak_flops_per_s(self, mode: str | None = None) -> float:
        """fp32 FLOPs of the cores that training uses, 1 multiply-add = 2."""
        return sum(count * clock_hz * kind.flops_per_cycle.value for kind, count, clock_hz in self.training_cores(mode))

    def training_flops_per_s(self, width: int, mode: str | None = None) -> float:
        """The rate of fp32 training of a ViT with one of the widths in `efficiency`."""
        return self.peak_flops_per_s(mode) * self.efficiency[width].value

    def speed(self, mode: str | None = None) -> Speed:
        """The board's speed in a power mode, as a device would measure it.

        Products follow from peak and efficiency at each width; other operators from what memcpy was measured at (read
        and written), or half of the data sheet's rate, and are slower where they compute much. How much they compute,
        and the time of one operator, are rules of thumb (constants below), as nothing was published on them.

        Raises ConfigError when the board has no such mode.
        """
        cores = self.training_cores(mode)
        cycles_per_s = sum(count * clock_hz for _, count, clock_hz in cores)
        stream = self.stream_bytes_per_s.value
        computed = {op: BYTES_PER_ELEMENT * cycles_per_s / cycles for op, cycles in CYCLES_PER_ELEMENT.items()}
        return Speed(
            threads=sum(count for _, count, _ in cores),
            products=tuple(
                ProductRate(kind, *sizes(width), self.training_flops_per_s(width, mode))
                for kind, sizes in PRODUCTS.items()
                for width in sorted(self.efficiency)
            ),
            bytes_per_s={"Add": stream} | {op: min(stream, rate) for op, rate in computed.items()},
            node_s=NODE_CYCLES / max(clock_hz for _, _, clock_hz in cores),
        )

    @property
    def stream_bytes_per_s(self) -> Figure:
        """Read and written by elementwise work on tensors larger than any cache."""
        copied, sheet = self.memory.memcpy_bytes_per_s, self.memory.bytes_per_s
        if copied is not None:
            return Figure(2 * copied.value, "derived", f"2 x memcpy ({copied.mark}, {copied.source})")
        if sheet is None:
            raise ConfigError(
                "FV1902", f"board {self.id!r}: neither memory.memcpy_bytes_per_s nor memory.bytes_per_s is given"
            )
        return Figure(sheet.value / 2, "derived", f"half of the data sheet's rate ({sheet.mark}, {sheet.source})")

    def load_w(self, mode: str | None = None) -> float | None:
        """Watts under load: a power mode's limit, else what was measured; None where neither is known."""
        chosen = self.mode(mode)
        if chosen is not None and chosen.load_w is not None:
            return chosen.load_w
        return self.power.load_w.value if self.power.load_w else None

    def power_w(self, mode: str | None = None) -> tuple[float, float] | None:
        """Watts (idle, under load) in a power mode; None where one of them is not known."""
        load_w = self.load_w(mode)
        if self.power.idle_w is None or load_w is None:
            return None
        return self.power.idle_w.value, load_w

    def budget(self) -> Budget:
        """The limit of the board: its usable memory."""
        return Budget(memory_bytes=self.usable_bytes.whole)

    def figures(self) -> dict[str, Figure]:
        """Every figure of the board by its place, such as `memory.ram_bytes`."""
        return dict(_figures(self, ""))

    def doubts(self, mode: str | None = None) -> list[str]:
        """The unverified figures behind a prediction."""
        used: dict[str, Figure] = {"usable memory": self.usable_bytes, "memory rate": self.stream_bytes_per_s}
        used |= {f"{kind.kind} FLOPs per cycle": kind.flops_per_cycle for kind, _, _ in self.training_cores(mode)}
        if self.power.load_w is not None:
            used["power under load"] = self.power.load_w
        weak = [name for name, figure in used.items() if figure.mark == "unverified"]
        if any(figure.mark == "unverified" for figure in self.efficiency.values()):
            weak.append("share of the peak that training reaches")
        chosen = self.mode(mode)
        if chosen is not None and chosen.mark == "unverified":
            weak.append("clocks of the power mode")
        return weak


PRODUCT_ROWS = 256
"""Rows of the products that a board's rates stand for: a few images' tokens."""
PRODUCTS: dict[ProductKind, Callable[[int], tuple[int, int, int, int]]] = {
    "weights": lambda width: (1, PRODUCT_ROWS, width, width),
    "gradient": lambda width: (1, width, PRODUCT_ROWS, width),
    "attention": lambda width: (width // 64, PRODUCT_ROWS, 64, PRODUCT_ROWS),
}
"""Batch, rows, inner and columns at a model's width. All kinds are as fast: what was published is their sum."""
BYTES_PER_ELEMENT = 8
"""Read and written."""
CYCLES_PER_ELEMENT = {"Softmax": 8, "LayerNormalization": 6, "Gelu": 12, "Erf": 12, "Exp": 6}
"""Rate of one core."""
NODE_CYCLES = 20_000
"""Cycles that a runtime needs to start and end one operator, including threads."""
SYSTEM_BYTES = 512 << 20
USABLE_SHARE = 0.8


def boards() -> list[Board]:
    """All boards, sorted by family and name as files are."""
    return list(_catalogue().values())


def load(id: str) -> Board:
    """The board of that id; memory may have its unit: rpi5-8gb is rpi5-8.

    Raises ConfigError naming those with a similar one when there is none.
    """
    catalogue = _catalogue()
    for known in (id, id.removesuffix("gb")):
        if known in catalogue:
            return catalogue[known]
    begin_alike = [known for known in catalogue if known.startswith(id)]
    near = begin_alike or difflib.get_close_matches(id, catalogue, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(catalogue)}"
    raise ConfigError("FV1902", f"no board {id!r} in the catalogue; {hint}")


def in_mode(text: str) -> tuple[Board, str | None]:
    """The board of ID or ID@MODE, and that power mode or the default one. Raises ConfigError for an unknown one."""
    id, _, mode = text.partition("@")
    board = load(id)
    board.mode(mode or None)
    return board, mode or board.default_mode


@cache
def sources() -> dict[str, str]:
    """The full references of published figures."""
    return tomllib.loads((files("profiles") / "sources.toml").read_text())


@cache
def _catalogue() -> dict[str, Board]:
    found: dict[str, Board] = {}
    folder = files("profiles") / "devices"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            for board in read_boards(file.name.removesuffix(".toml"), file.read_text()):
                found[board.id] = board
    return found


def read_boards(stem: str, text: str) -> list[Board]:
    """The boards of one file's text. Raises ConfigError naming the file and what is wrong in it."""
    try:
        raw = tomllib.loads(text)
        variants = raw.pop("variants", {})
        merged = {f"{stem}-{suffix}": _over(raw, values) for suffix, values in variants.items()} or {stem: raw}
        return [msgspec.convert({**values, "id": id}, Board, str_keys=True) for id, values in merged.items()]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError("FV1902", f"devices/{stem}.toml: {error}") from error


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A file's tables with those of a variant over them; figures are replaced as a whole."""
    merged = {**below}
    for key, value in above.items():
        inner = below.get(key)
        mergeable = isinstance(value, dict) and isinstance(inner, dict) and "mark" not in value
        merged[key] = _over(inner, value) if mergeable and isinstance(inner, dict) else value
    return merged


def _figures(value: object, place: str) -> list[tuple[str, Figure]]:
    if isinstance(value, Figure):
        return [(place, value)]
    dot = f"{place}." if place else ""
    if isinstance(value, Struct):
        inner = [(f"{dot}{name}", getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, dict):
        inner = [(f"{dot}{name}", one) for name, one in value.items()]
    elif isinstance(value, tuple):
        inner = [(f"{dot}{getattr(one, 'kind', number)}", one) for number, one in enumerate(value)]
    else:
        return []
    return [figure for name, one in inner for figure in _figures(one, name)]
