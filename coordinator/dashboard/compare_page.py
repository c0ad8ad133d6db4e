"""Runs side by side: settings that differ, and curves over each other."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from nicegui import ui

from coordinator.dashboard import charts
from coordinator.dashboard.frame import Chart, Part, Site, follow, page
from coordinator.record.store import Store
from coordinator.record.summary import RoundSummary, RunSummary, progress, summarise

MOST = 8
"""Runs side by side: as many as there are colours."""
CHOICES = 100
"""Runs to choose from, the newest first."""


def view(store: Store, names: tuple[str, ...]) -> list[RunSummary]:
    """Raises ConfigError if there is no such run."""
    return [summarise(store, name, accuracy_of=0, refusals_of=0) for name in names]


def differing(runs: list[RunSummary]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, with a value for each; None: the default."""
    held = [{"method": run.method, "model": run.model, "seed": run.seed, **run.settings} for run in runs]
    names = sorted({name for settings in held for name in settings})
    found = {name: [settings.get(name) for settings in held] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def curve(run: RunSummary, cost: Callable[[RoundSummary], float]) -> list[tuple[float, float]]:
    """Accuracy against a cost that adds up over rounds."""
    spent = accumulate(cost(entry) for entry in run.rounds)
    return [
        (at, entry.accuracy_mean)
        for at, entry in zip(spent, run.rounds, strict=True)
        if entry.accuracy_mean is not None
    ]


COSTS: tuple[tuple[str, str, Callable[[RoundSummary], float]], ...] = (
    ("Accuracy by round", "round", lambda entry: 1.0),
    ("Accuracy against megabytes", "MB down and up", lambda entry: (entry.bytes_down + entry.bytes_up) / 1e6),
    ("Accuracy against work on devices", "TFLOP", lambda entry: entry.flops / 1e12),
    ("Accuracy against time", "s", lambda entry: (entry.devices_s or 0.0) + (entry.server_s or 0.0)),
)


async def show(site: Site, names: list[str]) -> None:
    chosen = tuple(dict.fromkeys(names))[:MOST]
    with page("Compare", "/compare"):
        form = Part("compare_form.html")
        form.show(runs=(await site.reader(progress))[:CHOICES], chosen=chosen, most=MOST)
        if not chosen:
            return
        table = Part("compare.html")
        with ui.element("div").classes("figures"):
            shown = [Chart(name) for name, _, _ in COSTS]

        async def refresh() -> None:
            runs = await site.reader(view, chosen)
            table.show(runs=runs, differing=differing(runs), energies=[_energy(run) for run in runs])
            for chart, (_, x_name, cost) in zip(shown, COSTS, strict=True):
                curves = {run.run: curve(run, cost) for run in runs}
                chart.show(charts.overlaid(curves, x_name=x_name, y_name="accuracy"))

        await follow(refresh)


def _energy(run: RunSummary) -> float | None:
    known = [entry.energy_j for entry in run.rounds if entry.energy_j is not None]
    return sum(known) if known else None
