"""The list of runs: search, filter, order."""

from coordinator.run_view import RunProgress
from coordinator.views.dashboard.runs_page import RunQuery, make_headings, select_runs


def run(name: str, status: str = "finished", accuracy: float | None = 0.5, method: str = "fedavg") -> RunProgress:
    return RunProgress(
        run=name, created_at=f"2026-11-2{name[-1]}", status=status, reason=None, method=method, model="vit_tiny",
        seed=1, rounds_planned=4, settings={}, rounds=2, mean_accuracy=accuracy,
    )  # fmt: skip


RUNS = [run("r1", accuracy=None), run("r2", "running", 0.9), run("r3", method="fedper")]


def names(choice: RunQuery) -> list[str]:
    return [one.run for one in select_runs(RUNS, choice)]


def test_runs_are_searched_and_sorted() -> None:
    assert names(RunQuery()) == ["r3", "r2", "r1"]
    assert names(RunQuery(text="FEDPER tiny")) == ["r3"]
    assert names(RunQuery(text="r2 fedper")) == []
    assert names(RunQuery(status="finished", order="run")) == ["r1", "r3"]
    assert names(RunQuery(order="-accuracy")) == ["r2", "r3", "r1"]
    assert names(RunQuery(order="nonsense")) == ["r1", "r2", "r3"], "by date"


def test_heading_turns_its_order_around() -> None:
    headings = {
        heading.name: heading for heading in make_headings(RunQuery(order="-accuracy", status="failed", page=3))
    }
    assert headings["accuracy"].direction == "descending"
    assert headings["accuracy"].address == "/runs?status=failed&order=accuracy"
    assert headings["run"].direction == ""
