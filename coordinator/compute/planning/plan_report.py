"""The report of a plan: each device's configuration, and other candidates."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.compute.planning.configuration_search import HEADROOM, Candidate, Choice
from coordinator.compute.planning.profiling import NothingFits
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget
from profiles.report.terminal import column, table
from profiles.report.verdict import BUDGETS


def plan_report(chosen: Sequence[Choice | NothingFits], width: int) -> Group:
    """One table per device: the chosen candidate first, then the others."""
    parts: list[RenderableType] = []
    for each in chosen:
        parts.append(Text(f"{each.device}: {_limits(each.budget)}", style="bold"))
        if isinstance(each, NothingFits):
            parts.append(Text(each.refused, style="bold red"))
        else:
            parts.append(_table(each))
        parts.append(Text())
    parts.append(
        Text(f"A plan fills at most {HEADROOM:.0%} of a memory budget: predictions are not exact.", style="dim")
    )
    return Group(*parts)


def _table(choice: Choice) -> Table:
    drawn = table(None)
    column(drawn, "", justify="left")
    drawn.add_column("options", overflow="fold")
    for heading in ("quality", "memory", "step", "round"):
        column(drawn, heading)
    drawn.add_column("over budget", overflow="fold")
    candidates = [("gets", choice.chosen), *(("", candidate) for candidate in choice.runners_up)]
    candidates += [("no", candidate) for candidate in choice.rejected]
    for mark, candidate in candidates:
        drawn.add_row(mark, *_cells(candidate), style="bold" if mark == "gets" else "")
    return drawn


def _cells(candidate: Candidate) -> tuple[str, ...]:
    prediction = candidate.prediction
    return (
        _options(candidate.changes),
        f"{candidate.quality:.0%}",
        format_bytes(prediction.peak_rss_bytes),
        "-" if prediction.step_s is None else format_seconds(prediction.step_s),
        "-" if prediction.train_s is None else format_seconds(prediction.train_s),
        ", ".join(BUDGETS[kind] for kind in prediction.over),
    )


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
