"""`bench pool`: what devices cost a simulation that are in its pool and not in a round.

The same run twice, each time in a process of its own: with as many devices as a round asks, and with many more of which
it asks as many. Both train the same number of devices on the same images, so what a round takes longer is the pool's.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table

from bench.child import run_child
from bench.machine import Machine, this_machine
from coordinator.record.record import open_record
from fedvit.models import SMALL
from fleet.datasets import read_samples
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate
from profiles.probes.host import peak_rss_bytes

RUN = "pool"
FOLDERS = 20
"""That all devices share, so that images take no more memory with more devices."""
SIZE = 16
"""Side of the images in pixels."""
TEST_SHARE = 0.2

Progress = Callable[[str], None]


class Side(Struct, frozen=True, kw_only=True):
    """One run."""

    devices: int
    round_s: float  # median over the rounds behind the first
    rounds_s: list[float]
    peak_rss_bytes: int | None


class PoolReport(Struct, frozen=True, kw_only=True):
    """What `bench pool` found."""

    machine: Machine
    engine: Engine
    cohort: int
    small: Side  # a pool of one cohort
    large: Side
    overhead_ms_per_device: float  # of a round, for each device that the larger pool has more
    memory_bytes: int | None  # that the larger pool takes more


def run_pool_bench(
    *, devices: int, cohort: int, rounds: int, engine: Engine, progress: Progress = lambda line: None
) -> PoolReport:
    """Raises FedvitError when a run fails."""
    with tempfile.TemporaryDirectory(prefix="bench-pool-") as made:
        parts = Path(made) / "parts"
        deal(
            read_samples("digits", SIZE), "iid", FOLDERS, parts, DealSettings(options={}, seed=0, test_share=TEST_SHARE)
        )
        small, large = (_side(parts, count, cohort, rounds, engine, progress) for count in (cohort, devices))
    both = small.peak_rss_bytes, large.peak_rss_bytes
    return PoolReport(
        machine=this_machine(),
        engine=engine,
        cohort=cohort,
        small=small,
        large=large,
        overhead_ms_per_device=1000 * (large.round_s - small.round_s) / (devices - cohort),
        memory_bytes=both[1] - both[0] if both[0] is not None and both[1] is not None else None,
    )


def _side(parts: Path, devices: int, cohort: int, rounds: int, engine: Engine, progress: Progress) -> Side:
    progress(f"{devices} devices, {cohort} of them a round: {rounds} rounds")
    arguments = (str(parts), str(devices), str(cohort), str(rounds), engine)
    side = msgspec.json.decode(run_child("bench.pool", *arguments, what=f"{devices} devices"), type=Side)
    progress(f"{devices} devices: {side.round_s:.2f} s a round")
    return side


def run(parts: Path, *, devices: int, cohort: int, rounds: int, engine: Engine) -> Side:
    """Simulate in this process; what a round takes is from its end to the end of the next."""
    folders = device_folders(parts, None)
    values: dict[str, Any] = {
        "method": "fedavg",
        "options": {"batch_size": 16, "epochs": 1, "optimizer": "sgd", "lr": 0.05},
        "model": SMALL,
        "model_options": {"image_size": SIZE, "patch_size": 8, "width": 16, "depth": 2, "heads": 2},
        "cohort": cohort,
        "rounds": rounds,
        "evaluate_every": rounds,
        "evaluation_cohort": cohort,
    }
    pool = {f"device-{number}": folders[number % len(folders)] for number in range(devices)}
    with tempfile.TemporaryDirectory(prefix="bench-pool-") as made:
        simulate(RunRequest(pool, values, out=Path(made), run=RUN, engine=engine))
        store = open_record(Path(made))
        try:
            ended = [datetime.fromisoformat(str(entry.closed_at)).timestamp() for entry in store.rounds.read_all(RUN)]
        finally:
            store.close()
    rounds_s = [after - before for before, after in itertools.pairwise(ended)]
    return Side(devices=devices, round_s=median(rounds_s), rounds_s=rounds_s, peak_rss_bytes=peak_rss_bytes())


def main() -> None:
    """Arguments: device folders, devices, cohort, rounds, engine. Prints one JSON object."""
    parts, devices, cohort, rounds, engine = sys.argv[1:]
    side = run(
        Path(parts),
        devices=int(devices),
        cohort=int(cohort),
        rounds=int(rounds),
        engine=msgspec.convert(engine, Engine),
    )
    sys.stdout.write(msgspec.json.encode(side).decode() + "\n")


def pool_report(report: PoolReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("devices in the pool", "asked per round", "s a round", "peak MB"):
        table.add_column(heading, justify="right")
    for side in (report.small, report.large):
        peak = "-" if side.peak_rss_bytes is None else f"{side.peak_rss_bytes / 1e6:.0f}"
        table.add_row(str(side.devices), str(report.cohort), f"{side.round_s:.2f}", peak)
    more = "" if report.memory_bytes is None else f", {report.memory_bytes / 1e6:.0f} MB more"
    table.caption = (
        f"engine {report.engine}: {report.overhead_ms_per_device:.2f} ms a round for each further device{more}"
    )
    return table
