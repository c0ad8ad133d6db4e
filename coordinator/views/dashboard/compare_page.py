"""Runs and experiments side by side: settings that differ, and curves over each other."""

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from coordinator.record.record import Record
from coordinator.run_view import RunView, list_progress, read_run
from coordinator.views.dashboard import charts
from coordinator.views.dashboard.frame import Figures, Part, Site, follow, page
from coordinator.views.dashboard.series import (
    CellGroup,
    Series,
    find_differences,
    group_cells,
    make_group_series,
    make_run_series,
)
from fedvit.errors import ConfigError
from profiles.report.curves import COSTS, curve
from profiles.report.tables import Column, Sheet, format_value

MOST = 8
"""Side by side: as many as there are colours."""
CHOICES = 100
"""Runs to choose from, the newest first; and as many methods of experiments."""


def read_details(store: Record, names: tuple[str, ...]) -> list[RunView]:
    """Read these runs. Raises ConfigError if there is no such run."""
    return [read_run(store, name, accuracy_of=0, refusals_of=0) for name in names]


def _against(x_name: str) -> Callable[[list[Series]], charts.Options]:
    def draw(chosen: list[Series]) -> charts.Options:
        curves = {one.name: curve(one.points, COSTS[x_name]) for one in chosen}
        return charts.overlay_lines(curves, x_name=x_name, y_name="accuracy")

    return draw


FACTS = {
    "status": "status",
    "rounds": "rounds",
    "devices": "devices",
    "accuracy": "accuracy",
    "bytes_down": "sent down",
    "bytes_up": "sent up",
    "peak_rss_bytes": "peak memory",
    "energy_j": "energy",
}


def _fact_sheet(chosen: list[Series]) -> Sheet:
    rows = [(heading, *(format_value(name, one.facts[name]) for one in chosen)) for name, heading in FACTS.items()]
    return _series_sheet("figure", chosen, rows)


def _setting_sheet(chosen: list[Series]) -> Sheet:
    settings = find_differences(chosen).items()
    rows = [(name, *("default" if value is None else value for value in values)) for name, values in settings]
    return _series_sheet("setting", chosen, rows)


def _series_sheet(heading: str, chosen: list[Series], rows: list[tuple[Any, ...]]) -> Sheet:
    """Make a table with a column for each series."""
    names = [Markup('<a href="{}">{}</a>').format(one.address, one.name) if one.address else one.name for one in chosen]
    return Sheet(rows, [Column("value", name, itemgetter(place)) for place, name in enumerate([heading, *names])])


FIGURES = {f"Accuracy against {name}": _against(name) for name in COSTS}


async def show(site: Site, runs: list[str], methods: list[str]) -> None:
    """Show the page."""
    chosen_runs = tuple(dict.fromkeys(runs))[:MOST]
    chosen_methods = list(dict.fromkeys(methods))[: MOST - len(chosen_runs)]
    with page("Compare", "/compare"):
        form = Part("compare.html", "form")
        form.show(
            runs=(await site.reader(list_progress))[:CHOICES],
            methods=list((await _read_groups(site)).values())[:CHOICES],
            chosen=[*chosen_runs, *chosen_methods],
            most=MOST,
        )
        if not (chosen_runs or chosen_methods):
            return
        table = Part("compare.html", "body")
        figures = Figures(FIGURES)

        async def refresh() -> None:
            groups = await _read_groups(site)
            if unknown := [name for name in chosen_methods if name not in groups]:
                raise ConfigError("FV1803", f"the folder of experiments has no results of {', '.join(unknown)}")
            chosen = [*map(make_run_series, await site.reader(read_details, chosen_runs))]
            chosen += [make_group_series(groups[name]) for name in chosen_methods]
            table.show(compared=_fact_sheet(chosen), differing=_setting_sheet(chosen), several=len(chosen) > 1)
            figures.show(chosen)

        await follow(refresh)


async def _read_groups(site: Site) -> dict[str, CellGroup]:
    return group_cells(await asyncio.to_thread(site.experiments.read_outcomes))
