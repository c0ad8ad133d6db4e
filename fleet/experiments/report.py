"""Reports of an experiment: tables for a terminal and in Markdown, and an HTML page with curves."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleet.experiments.report_figures import (
    draw_attention,
    draw_costs,
    draw_curves,
    draw_embeddings,
    draw_gains,
    draw_spread,
)
from fleet.experiments.report_tables import (
    COST_HEADINGS,
    COST_UNITS,
    LEADER,
    SEARCH_HEADINGS,
    VALIDATION,
    accuracy_rows,
    cost_rows,
    describe_missing,
    describe_spread,
    make_sections,
    privacy_lines,
    protocol_lines,
    search_note,
    search_rows,
    search_title,
    setting_rows,
)
from profiles.report.experiment import ExperimentOutcome
from profiles.report.page import Grid, environment
from profiles.report.terminal import table as new_table


def terminal_report(outcome: ExperimentOutcome) -> Group:
    """Accuracies and costs."""
    accuracy = _table(f"{outcome.experiment}: accuracy", ("method", *outcome.partitions))
    for method, cells in accuracy_rows(outcome, before_interval="\n"):
        accuracy.add_row(Text(method), *(Text(text, style="bold" if leads else "") for text, leads in cells))
    notes = [describe_spread(outcome), LEADER, *protocol_lines(outcome), *privacy_lines(outcome)]
    parts: list[RenderableType] = [accuracy, *(Text(note, style="dim") for note in notes)]
    for section in make_sections(outcome, before_interval="\n"):
        table = _table(section.title, section.headings, section.rows)
        parts += [Text(), table, Text(section.note, style="dim")]
    parts += [Text(f"{search_title(search)}: {search_note(search)}") for search in outcome.searches]
    parts += [Text(), _table("costs", COST_HEADINGS, cost_rows(outcome)), Text(COST_UNITS, style="dim")]
    if missing := describe_missing(outcome):
        parts += [Text(), Text(missing, style="bold")]
    return Group(*parts)


def markdown_report(outcome: ExperimentOutcome) -> str:
    """All tables, to be pasted into a document."""
    rows = [
        (method, *(f"**{text}**" if leads else text for text, leads in cells))
        for method, cells in accuracy_rows(outcome)
    ]
    notes = [describe_spread(outcome), LEADER, *protocol_lines(outcome)]
    notes += [*privacy_lines(outcome), describe_missing(outcome)]
    parts = [
        _markdown_table(("method", *outcome.partitions), rows),
        "\n".join(f"{note}  " for note in notes if note),
    ]
    for section in make_sections(outcome):
        title = [section.title] if section.is_titled else []
        parts += [*title, _markdown_table(section.headings, section.rows), section.note]
    parts += [_markdown_table(COST_HEADINGS, cost_rows(outcome)), COST_UNITS]
    for search in outcome.searches:
        parts += [
            f"{search_title(search)}: {search_note(search)}",
            _markdown_table(SEARCH_HEADINGS, search_rows(search)),
        ]
    if outcome.searches:
        parts.append(VALIDATION)
    return "\n\n".join(parts) + "\n"


def html_report(outcome: ExperimentOutcome) -> str:
    """One page that needs no other file."""
    page = environment("fleet.experiments").get_template("report.html")
    return page.render(
        outcome=outcome,
        settings=setting_rows(outcome),
        accuracy=accuracy_rows(outcome),
        notes=[describe_spread(outcome), LEADER, *protocol_lines(outcome), *privacy_lines(outcome)],
        sections=[
            (
                section.title if ":" in section.title else section.title.capitalize(),
                Grid(section.headings, section.rows, names=section.names),
                section.note,
            )
            for section in make_sections(outcome)
        ],
        cost_table=Grid(COST_HEADINGS, cost_rows(outcome), names=2),
        costs=COST_UNITS,
        searches=[
            (search_title(search), search_note(search), Grid(SEARCH_HEADINGS, search_rows(search), names=2))
            for search in outcome.searches
        ],
        validation=VALIDATION,
        missing=describe_missing(outcome),
        figures=[
            (
                partition,
                draw_curves(outcome, partition),
                draw_costs(outcome, partition),
                draw_spread(outcome, partition),
                draw_gains(outcome, partition),
                draw_embeddings(outcome, partition),
                draw_attention(outcome, partition),
            )
            for partition in dict.fromkeys(entry.partition for entry in outcome.comparisons)
        ],
    )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Table:
    table = new_table(title)
    for heading in headings:
        name = heading in ("method", "partition")
        # Text: brackets in a name are no markup; names that do not fit are folded, numbers never
        table.add_column(
            Text(heading if name else heading.replace(" ", "\n")),
            justify="left" if name else "right",
            no_wrap=not name,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
