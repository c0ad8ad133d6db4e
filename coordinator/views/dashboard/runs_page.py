"""The list of runs."""

from markupsafe import Markup

from coordinator.run_view import RunProgress, list_progress
from coordinator.views.dashboard.frame import Part, Site, anchor, follow, page
from profiles.report.tables import Column, Sheet, columns

_TONES = {"finished": "good", "failed": "bad", "interrupted": "mild", "cancelled": "mild"}


def _show_status(run: RunProgress) -> Markup:
    return Markup('<span class="state {}">{}</span>').format(_TONES.get(run.status, ""), run.status)


def _show_progress(run: RunProgress) -> Markup:
    percent = min(100, 100 * run.rounds // run.rounds_planned) if run.rounds_planned else 0
    return Markup('<span class="bar" aria-hidden="true"><i style="width: {}%"></i></span>').format(percent)


_COLUMNS = [
    Column("run", "run", lambda run: anchor("/run", run.run, run=run.run)),
    Column("status", "status", _show_status),
    *columns({"method": "method", "model": "model"}),
    Column("rounds", "rounds", lambda run: f"{run.rounds} of {run.rounds_planned}"),
    Column("progress", "progress", _show_progress),
    *columns({"mean_accuracy": "accuracy", "created_at": "created"}),
]


async def show(site: Site) -> None:
    """Show the page."""
    with page("Runs", "/"):
        part = Part("runs.html", "body")

        async def refresh() -> None:
            part.show(runs=Sheet(await site.reader(list_progress), _COLUMNS), folder=str(site.folder))

        await follow(refresh)
