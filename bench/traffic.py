"""`python -m bench bytes`: the bytes of a round with each codec, for real models.

State, references and uploads are really made and written. Only training is replaced: tensors change by noise of a
hundredth of their size, which does not change the number of bytes of any codec.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from rich import box
from rich.console import RenderableType
from rich.table import Table

from bench.cases import Case
from coordinator.compute.checkpoint import save_state
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import RunConfig, UpdatesConfig
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.methods.base import ServerState
from fedvit.tensors import Array, Tensors, pack
from fedvit.updates import NONE, make_codec

MEGA = 1e6
DOWN = (
    UpdatesConfig(),
    UpdatesConfig(down="fp16"),
    UpdatesConfig(down="int8"),
    UpdatesConfig(down="top_k:share=0.05"),
    UpdatesConfig(down_whole="int8"),
)
UP = ("none", "fp16", "int8", "top_k:share=0.05", "top_k:share=0.01")


class Traffic(Struct, frozen=True, kw_only=True):
    """Bytes of a round in one direction, of the tensors that its codec codes."""

    case: str
    direction: str = field(name="way")  # "down" or "up"
    codec: str
    first_bytes: int  # of a device's first round
    round_bytes: int  # of any other round
    share: float  # round_bytes / those without a codec


def run_bytes_bench(cases: list[Case], progress: Callable[[str], None] = lambda line: None) -> list[Traffic]:
    """Every case with every codec, in each direction in which the method sends such tensors."""
    return [row for case in cases for row in _of_case(case, progress)]


def _of_case(case: Case, progress: Callable[[str], None]) -> Iterator[Traffic]:
    config = RunConfig(
        method=case.method, options=case.options, model=case.model, model_options=case.model_options, accelerator="cpu"
    )
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
        classes = tuple(map(str, range(case.classes)))
        plan = make_plan(config, classes, BlobStore(Path(made) / "plan"), progress=progress)
        yield from _down(case, plan, Path(made), progress)
        yield from _up(case, plan, progress)


def _down(case: Case, plan: Plan, home: Path, progress: Callable[[str], None]) -> Iterator[Traffic]:
    """A device in its first round, and the same device a round later."""
    later = ServerState({name: _updated(name, value) for name, value in plan.state.tensors.items()})
    uncoded = 0
    for updates in DOWN if plan.groups else ():
        codec = updates.down if updates.down_whole == NONE else f"whole {updates.down_whole}"
        progress(f"{case.name}: down, {codec}")
        with tempfile.TemporaryDirectory(dir=home) as folder:
            blobs, sizes, had, saved = BlobStore(Path(folder)), [], set[str](), None
            for state in (plan.state, later):
                saved = save_state(state, plan.groups, blobs, updates, saved)
                sizes.append(sum(_fetched(saved, group, blobs, had) for group in plan.groups))
                had = set(map(saved.sent, plan.groups))
        first, second = sizes
        uncoded = uncoded or second
        yield Traffic(
            case=case.name, direction="down", codec=codec, first_bytes=first, round_bytes=second, share=second / uncoded
        )


def _fetched(saved: SavedState, group: str, blobs: BlobStore, had: set[str]) -> int:
    """Bytes that a device fetches of a group whose newest values it does not have."""
    target = blobs.manifest(saved.sent(group))
    steps = saved.references[group].delta_chain(blobs) if group in saved.references else ()
    for step in steps:
        if not step.base or step.base in had:
            return min(step.patch.size, target.size)
    return 0 if target.digest in had else target.size


def _up(case: Case, plan: Plan, progress: Callable[[str], None]) -> Iterator[Traffic]:
    """The trained tensors that devices send back; generated tensors and features are not counted."""
    sent = [
        name
        for role, names in plan.method.groups(plan.vit).values()
        for name in names
        if role.is_sent_back and name in plan.values
    ]
    deltas: Tensors = {name: np.subtract(_updated(name, plan.values[name]), plan.values[name]) for name in sent}
    uncoded = 0
    for text in UP if sent else ():
        progress(f"{case.name}: up, {text}")
        size = len(pack(make_codec(text).encode(deltas)))
        uncoded = uncoded or size
        yield Traffic(
            case=case.name, direction="up", codec=text, first_bytes=size, round_bytes=size, share=size / uncoded
        )


def _updated(name: str, value: Array) -> Array:
    """A tensor after a round; the same at every call."""
    draw = np.random.default_rng(list(name.encode()))
    numbers: Array = np.asarray(value, np.float32)
    size = np.float32(0.01) * max(np.float32(0.01), np.abs(numbers).mean(dtype=np.float32))
    updated: Array = np.add(numbers, size * draw.standard_normal(numbers.shape, np.float32))
    return updated


def bytes_table(rows: list[Traffic]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("case", "direction", "codec"):
        table.add_column(heading)
    for heading in ("first round MB", "round MB", "of uncoded"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (f"{size / MEGA:.2f}" for size in (row.first_bytes, row.round_bytes))
        table.add_row(row.case, row.direction, row.codec, *sizes, f"{row.share:.3f}")
    return table
