"""`python -m bench budget`: does a real device keep the memory budget that its Program was planned for? Two rounds."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.cases import Case
from bench.edge import noise_folder
from bench.machine import Machine, this_machine
from bench.one_round import RUN, one_round
from bench.profile import PATIENCE_S, STEPS, TEST_IMAGES, image_size, run_of
from fedvit.quantities import format_bytes

ROUNDS = 2
"""In the second round the device has also evaluated, and its memory is fragmented."""


class BudgetResult(Struct, frozen=True, kw_only=True):
    name: str
    budget_bytes: int
    refused: str | None  # why nothing was planned
    changes: dict[str, Any]  # options that were changed to fit the budget
    quality: float | None = field(name="kept_share")  # of the plan; 1: as configured
    predicted_bytes: int | None
    peak_bytes: int | None  # resident, over all rounds and evaluations
    kept: bool  # whether the peak is within the budget; also true where nothing was planned


class BudgetReport(Struct, frozen=True, kw_only=True):
    machine: Machine
    results: list[BudgetResult]


def run_budget_bench(
    cases: Sequence[Case], budgets: Sequence[int], progress: Callable[[str], None] = lambda line: None
) -> BudgetReport:
    """Plan each case for each budget and let a real device train it. Raises FedvitError when a run fails."""
    results = []
    for case in cases:
        for budget_bytes in budgets:
            with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
                results.append(_run(case, budget_bytes, Path(made), progress))
    return BudgetReport(machine=this_machine(), results=results)


def _run(case: Case, budget_bytes: int, home: Path, progress: Callable[[str], None]) -> BudgetResult:
    progress(f"{case.name}: {format_bytes(budget_bytes)}")
    images = STEPS * case.batch_size + TEST_IMAGES
    data = noise_folder(
        home / "parts", images=images, size=image_size(case), classes=2, test_share=TEST_IMAGES / images
    )
    # a device with a budget measures its speed at its start
    flags = ("--memory-budget", str(budget_bytes))
    with one_round(home, run_of(case, rounds=ROUNDS), data, extra=flags) as session:
        reason = session.wait(PATIENCE_S, report=progress)
        peaks = [result.use.peak_rss_bytes or 0 for result in session.store.tasks.read_results(RUN)]
        expected = session.store.tasks.read_expected(RUN)
    planned = next(iter(expected.values()), None)
    peak = max(peaks, default=None)
    return BudgetResult(
        name=case.name,
        budget_bytes=budget_bytes,
        refused=reason,
        changes=planned.changes if planned else {},
        quality=planned.quality if planned else None,
        predicted_bytes=planned.prediction.peak_rss_bytes if planned else None,
        peak_bytes=peak,
        kept=peak is None or peak <= budget_bytes,
    )


def budget_table(report: BudgetReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("case", "budget", "planned", "peak", "kept"):
        table.add_column(heading, justify="right" if heading in ("budget", "planned", "peak") else "left", no_wrap=True)
    table.add_column("changed options", overflow="fold")
    for result in report.results:
        changes = ", ".join(f"{name} = {value}" for name, value in result.changes.items())
        table.add_row(
            result.name,
            format_bytes(result.budget_bytes),
            "" if result.predicted_bytes is None else format_bytes(result.predicted_bytes),
            "" if result.peak_bytes is None else format_bytes(result.peak_bytes),
            "yes" if result.kept else "NO",
            result.refused or changes or "as configured",
        )
    return Group(table, Text(f"{report.machine.cpu}, {ROUNDS} rounds with evaluations", style="dim"))
