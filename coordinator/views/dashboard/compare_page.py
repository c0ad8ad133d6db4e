"""Runs and experiments side by side: settings that differ, and curves over each other."""

import asyncio
from collections.abc import Callable

from coordinator.record.record import Record
from coordinator.record.summary import RunSummary, progress, summarise
from coordinator.views.dashboard import charts
from coordinator.views.dashboard.frame import Figures, Part, Site, follow, page
from coordinator.views.dashboard.series import Series, Tried, differing, of_run, of_tried, tried
from fedvit.errors import ConfigError
from profiles.report.curves import COSTS, curve

MOST = 8
"""Side by side: as many as there are colours."""
CHOICES = 100
"""Runs to choose from, the newest first; and as many methods of experiments."""


def view(store: Record, names: tuple[str, ...]) -> list[RunSummary]:
    """Raises ConfigError if there is no such run."""
    return [summarise(store, name, accuracy_of=0, refusals_of=0) for name in names]


def _against(x_name: str) -> Callable[[list[Series]], charts.Options]:
    def draw(chosen: list[Series]) -> charts.Options:
        curves = {one.name: curve(one.points, COSTS[x_name]) for one in chosen}
        return charts.overlaid(curves, x_name=x_name, y_name="accuracy")

    return draw


FIGURES = {f"Accuracy against {name}": _against(name) for name in COSTS}


async def show(site: Site, runs: list[str], methods: list[str]) -> None:
    chosen_runs = tuple(dict.fromkeys(runs))[:MOST]
    chosen_methods = list(dict.fromkeys(methods))[: MOST - len(chosen_runs)]
    with page("Compare", "/compare"):
        form = Part("compare_form.html")
        form.show(
            runs=(await site.reader(progress))[:CHOICES],
            methods=list((await _tried(site)).values())[:CHOICES],
            chosen=[*chosen_runs, *chosen_methods],
            most=MOST,
        )
        if not (chosen_runs or chosen_methods):
            return
        table = Part("compare.html")
        figures = Figures(FIGURES)

        async def refresh() -> None:
            known = await _tried(site)
            if unknown := [name for name in chosen_methods if name not in known]:
                raise ConfigError(f"the folder of experiments has no results of {', '.join(unknown)}")
            chosen = [*map(of_run, await site.reader(view, chosen_runs))]
            chosen += [of_tried(known[name]) for name in chosen_methods]
            table.show(chosen=chosen, differing=differing(chosen))
            figures.show(chosen)

        await follow(refresh)


async def _tried(site: Site) -> dict[str, Tried]:
    return tried(await asyncio.to_thread(site.experiments.outcomes))
