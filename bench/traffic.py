"""`python -m bench bytes`: the bytes of a round with each codec, for real models.

State, references and uploads are really made and written. Only training is replaced: tensors change by noise of a
hundredth of their size, which does not change the number of bytes of any codec.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.cases import Case
from bench.reporting import Progress, Report
from coordinator.compute.checkpoint import save_state
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import RunConfig, UpdatesConfig
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.methods.base import ServerState
from fedvit.tensors import Array, Tensors, pack
from fedvit.updates import NONE, make_codec

DOWN = (
    UpdatesConfig(),
    UpdatesConfig(down="fp16"),
    UpdatesConfig(down="int8"),
    UpdatesConfig(down="top_k:share=0.05"),
    UpdatesConfig(down_whole="int8"),
)
UP = ("none", "fp16", "int8", "top_k:share=0.05", "top_k:share=0.01")


def run_bytes_bench(cases: list[Case], progress: Progress = lambda line: None) -> list[Report]:
    """Write every case with every codec, in each direction in which the method sends such tensors."""
    return [row for case in cases for row in _write_case(case, progress)]


def _make_row(case: Case, way: str, codec: str, sizes: tuple[int, int], uncoded: int) -> Report:
    """Bytes of a device's first round and of any other, and the share of what is sent without a codec."""
    first, later = sizes
    return {"case": case.name, "way": way, "codec": codec, "first_bytes": first, "round_bytes": later,
            "share": later / uncoded}  # fmt: skip


def _write_case(case: Case, progress: Progress) -> Iterator[Report]:
    config = RunConfig(
        method=case.method, options=case.options, model=case.model, model_options=case.model_options, accelerator="cpu"
    )
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        classes = tuple(map(str, range(case.classes)))
        plan = make_plan(config, classes, BlobStore(Path(folder) / "plan"), progress=progress)
        yield from _send_down(case, plan, Path(folder), progress)
        yield from _send_up(case, plan, progress)


def _send_down(case: Case, plan: Plan, home: Path, progress: Progress) -> Iterator[Report]:
    """Count what a device fetches in its first round, and a round later."""
    later = ServerState({name: _train(name, value) for name, value in plan.state.tensors.items()})
    uncoded = 0
    for updates in DOWN if plan.groups else ():
        codec = updates.down if updates.down_whole == NONE else f"whole {updates.down_whole}"
        progress(f"{case.name}: down, {codec}")
        with tempfile.TemporaryDirectory(dir=home) as folder:
            blobs, sizes, owned, saved = BlobStore(Path(folder)), [], set[str](), None
            for state in (plan.state, later):
                saved = save_state(state, plan.groups, blobs, updates, saved)
                sizes.append(sum(_count_fetched(saved, group, blobs, owned) for group in plan.groups))
                owned = set(map(saved.find_sent_digest, plan.groups))
        first, second = sizes
        uncoded = uncoded or second
        yield _make_row(case, "down", codec, (first, second), uncoded)


def _count_fetched(saved: SavedState, group: str, blobs: BlobStore, owned: set[str]) -> int:
    """Count the bytes of a group whose newest values the device does not have."""
    target = blobs.manifest(saved.find_sent_digest(group))
    steps = saved.references[group].delta_chain(blobs) if group in saved.references else ()
    for step in steps:
        if not step.base or step.base in owned:
            return min(step.patch.size, target.size)
    return 0 if target.digest in owned else target.size


def _send_up(case: Case, plan: Plan, progress: Progress) -> Iterator[Report]:
    """Count the trained tensors that devices send back, without generated tensors and features."""
    sent = [
        name
        for role, names in plan.method.groups(plan.vit).values()
        for name in names
        if role.is_sent_back and name in plan.values
    ]
    deltas: Tensors = {name: np.subtract(_train(name, plan.values[name]), plan.values[name]) for name in sent}
    uncoded = 0
    for text in UP if sent else ():
        progress(f"{case.name}: up, {text}")
        size = len(pack(make_codec(text).encode(deltas)))
        uncoded = uncoded or size
        yield _make_row(case, "up", text, (size, size), uncoded)


def _train(name: str, value: Array) -> Array:
    """Change a tensor as a round might; the same at every call."""
    draw = np.random.default_rng(list(name.encode()))
    numbers: Array = np.asarray(value, np.float32)
    size = np.float32(0.01) * max(np.float32(0.01), np.abs(numbers).mean(dtype=np.float32))
    result: Array = np.add(numbers, size * draw.standard_normal(numbers.shape, np.float32))
    return result
