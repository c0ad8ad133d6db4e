"""The report of a plan: each device's configuration, and other candidates."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.compute.planning.configuration_search import HEADROOM, Candidate, Choice
from coordinator.compute.planning.profiling import NothingFits
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget
from profiles.report.tables import Column, Sheet
from profiles.report.verdict import BUDGETS


def plan_report(chosen: Sequence[Choice | NothingFits], width: int) -> Group:
    """One table per device: the chosen candidate first, then the others."""
    parts: list[RenderableType] = []
    for each in chosen:
        parts.append(Text(f"{each.device}: {_limits(each.budget)}", style="bold"))
        if isinstance(each, NothingFits):
            parts.append(Text(each.refused, style="bold red"))
        else:
            parts.append(_draw_choice(each, width))
        parts.append(Text())
    parts.append(
        Text(f"A plan fills at most {HEADROOM:.0%} of a memory budget: predictions are not exact.", style="dim")
    )
    return Group(*parts)


def _draw_choice(choice: Choice, width: int) -> Table:
    rows = [("gets", choice.chosen), *(("", candidate) for candidate in choice.runners_up)]
    rows += [("no", candidate) for candidate in choice.rejected]
    return Sheet(rows, [column._replace(style=_find_style) for column in _COLUMNS], unknown="-").draw(None, width)


def _find_style(row: tuple[str, Candidate]) -> str:
    return "bold" if row[0] == "gets" else ""


_COLUMNS = (
    Column("mark", "", itemgetter(0)),
    Column("options", "options", lambda row: _options(row[1].changes), is_long=True),
    Column("quality", "quality", lambda row: f"{row[1].quality:.0%}"),
    Column("memory", "memory", lambda row: format_bytes(row[1].prediction.peak_rss_bytes)),
    Column("step", "step", lambda row: _format_time(row[1].prediction.step_s)),
    Column("round", "round", lambda row: _format_time(row[1].prediction.train_s)),
    Column("later", "later round", lambda row: _format_time(row[1].prediction.usual_train_s)),
    Column(
        "over", "over budget", lambda row: ", ".join(BUDGETS[kind] for kind in row[1].prediction.over), is_long=True
    ),
)


def _format_time(time_s: float | None) -> str | None:
    return None if time_s is None else format_seconds(time_s)


def _options(changes: dict[str, Any]) -> str:
    """
    >>> _options({"mask": 0.85, "recompute": True}), _options({})
    ('mask = 0.85, recompute = true', 'as configured')
    """
    words = (f"{name} = {str(value).lower()}" for name, value in changes.items())
    return ", ".join(words) or "as configured"


def _limits(budget: Budget) -> str:
    given = (
        ("memory", budget.memory_bytes, format_bytes),
        ("a round", budget.flops_per_round, format_flops),
        ("a round", budget.round_deadline_s, format_seconds),
        ("upload", budget.upload_bytes, format_bytes),
    )
    limits = [f"{name} {show(limit)}" for name, limit, show in given if limit is not None]
    return ", ".join(limits) or "no budget"
