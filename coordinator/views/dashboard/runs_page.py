"""The list of runs: filtered by status, searched, sorted, and in pages."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coordinator.record.tables import RunStatus
from coordinator.run_view import RunProgress, list_progress, natural_order
from coordinator.views.dashboard.frame import Part, Site, follow, link, page

PER_PAGE = 50
STATUSES: tuple[RunStatus, ...] = ("running", "waiting", "queued", "interrupted", "failed", "finished", "cancelled")


class RunQuery(NamedTuple):
    """The part of the list that the page's address asks for."""

    text: str = ""  # part of a name, a method or a model
    status: str = ""
    order: str = ""  # a key of ORDERS, with a minus in front for the other direction
    page: int = 1

    def address(self, **changes: Any) -> str:
        """Return the address of the page with these changes."""
        chosen = self._replace(**changes)
        return link("/runs", **{name: value for name, value in chosen._asdict().items() if value not in ("", 1)})


ORDERS: dict[str, tuple[str, Callable[[RunProgress], Any]]] = {
    "run": ("Run", lambda run: natural_order(run.run)),
    "status": ("Status", lambda run: STATUSES.index(run.status)),
    "progress": ("Progress", lambda run: run.rounds / (run.rounds_planned or 1)),
    "accuracy": ("Accuracy", lambda run: -1.0 if run.mean_accuracy is None else run.mean_accuracy),
    "created": ("Created, UTC", lambda run: run.created_at),
}
"""Headings of the table and their keys for sorting."""
NEWEST = "-created"
_NUMBERS = ("accuracy", "progress", "created")
"""Columns that are first sorted by the largest."""


class Heading(NamedTuple):
    """The heading of a column."""

    name: str
    text: str
    address: str  # of the page in this order
    direction: str  # for aria-sort; "" if the table is in another order


def select_runs(runs: Sequence[RunProgress], choice: RunQuery) -> list[RunProgress]:
    """Select the runs with all words of the text, and sort them."""
    words = choice.text.lower().split()
    found = [
        run
        for run in runs
        if (not choice.status or run.status == choice.status)
        and all(word in f"{run.run} {run.method} {run.model}".lower() for word in words)
    ]
    order = choice.order or NEWEST
    key = ORDERS.get(order.lstrip("-"), ORDERS["created"])[1]
    return sorted(found, key=key, reverse=order.startswith("-"))


def make_headings(choice: RunQuery) -> list[Heading]:
    """Make the headings; each leads to the page in its order, or in the opposite one if it is sorted so already."""
    order = choice.order or NEWEST
    headings = []
    for name, (text, _) in ORDERS.items():
        first = f"-{name}" if name in _NUMBERS else name
        other = name if first.startswith("-") else f"-{name}"
        direction = {name: "ascending", f"-{name}": "descending"}.get(order, "")
        headings.append(
            Heading(name, text, choice.address(order=other if order == first else first, page=1), direction)
        )
    return headings


async def show(site: Site, choice: RunQuery) -> None:
    """Show the page."""
    with page("Runs", "/runs"):
        head = Part("runs.html", "head")
        head.show(choice=choice, may_submit=site.may("submit"))
        table = Part("runs.html", "table")

        async def refresh() -> None:
            runs = await site.reader(list_progress)
            found = select_runs(runs, choice)
            last = max(1, -(-len(found) // PER_PAGE))
            number = min(max(1, choice.page), last)
            table.show(
                runs=found[(number - 1) * PER_PAGE : number * PER_PAGE], found=len(found), all=len(runs),
                counts=Counter(run.status for run in runs), statuses=STATUSES, choice=choice._replace(page=number),
                last=last, first=(number - 1) * PER_PAGE + 1, headings=make_headings(choice),
            )  # fmt: skip

        await follow(refresh)
