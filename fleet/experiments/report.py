"""Reports of an experiment: tables for a terminal and in Markdown, and an HTML page with curves."""

from rich.console import Group, RenderableType
from rich.text import Text

from fleet.experiments.across import make_studies
from fleet.experiments.report_figures import (
    draw_attention,
    draw_costs,
    draw_curves,
    draw_embeddings,
    draw_gains,
    draw_novel,
    draw_spread,
    draw_study,
    list_attack_pictures,
)
from fleet.experiments.report_tables import (
    COST_UNITS,
    LEADER,
    VALIDATION,
    accuracy_sheet,
    cost_sheet,
    describe_missing,
    describe_spread,
    make_sections,
    privacy_lines,
    protocol_lines,
    search_note,
    search_sheet,
    search_title,
    setting_rows,
)
from profiles.report.experiment import ExperimentOutcome
from profiles.report.page import environment


def terminal_report(outcome: ExperimentOutcome) -> Group:
    """Draw accuracies and costs."""
    notes = [describe_spread(outcome), LEADER, *protocol_lines(outcome), *privacy_lines(outcome)]
    parts: list[RenderableType] = [accuracy_sheet(outcome).draw(f"{outcome.experiment}: accuracy")]
    parts += [Text(note, style="dim") for note in notes]
    for section in make_sections(outcome):
        parts += [Text(), section.sheet.draw(section.title), Text(section.note, style="dim")]
    parts += [Text(f"{search_title(search)}: {search_note(search)}") for search in outcome.searches]
    parts += [Text(), cost_sheet(outcome).draw("costs"), Text(COST_UNITS, style="dim")]
    if missing := describe_missing(outcome):
        parts += [Text(), Text(missing, style="bold")]
    return Group(*parts)


def markdown_report(outcome: ExperimentOutcome) -> str:
    """Write all tables, to be pasted into a document."""
    notes = [describe_spread(outcome), LEADER, *protocol_lines(outcome)]
    notes += [*privacy_lines(outcome), describe_missing(outcome)]
    parts = [accuracy_sheet(outcome).markdown(), "\n".join(f"{note}  " for note in notes if note)]
    for section in make_sections(outcome):
        parts += [*([section.title] if section.is_titled else []), section.sheet.markdown(), section.note]
    parts += [cost_sheet(outcome).markdown(), COST_UNITS]
    for search in outcome.searches:
        parts += [f"{search_title(search)}: {search_note(search)}", search_sheet(search).markdown()]
    if outcome.searches:
        parts.append(VALIDATION)
    return "\n\n".join(parts) + "\n"


def html_report(outcome: ExperimentOutcome) -> str:
    """Make one page that needs no other file."""
    page = environment("fleet.experiments").get_template("report.html")
    return page.render(
        outcome=outcome,
        settings=setting_rows(outcome),
        accuracy=accuracy_sheet(outcome),
        notes=[describe_spread(outcome), LEADER, *protocol_lines(outcome), *privacy_lines(outcome)],
        sections=[
            (section.title if ":" in section.title else section.title.capitalize(), section.sheet, section.note)
            for section in make_sections(outcome)
        ],
        cost_table=cost_sheet(outcome),
        costs=COST_UNITS,
        searches=[(search_title(search), search_note(search), search_sheet(search)) for search in outcome.searches],
        validation=VALIDATION,
        missing=describe_missing(outcome),
        studies=[(study.name, study.option, draw_study(study)) for study in make_studies(outcome)],
        figures=[
            (
                partition,
                draw_curves(outcome, partition),
                draw_costs(outcome, partition),
                draw_spread(outcome, partition),
                draw_gains(outcome, partition),
                draw_novel(outcome, partition),
                draw_embeddings(outcome, partition),
                draw_attention(outcome, partition),
                list_attack_pictures(outcome, partition),
            )
            for partition in dict.fromkeys(entry.partition for entry in outcome.comparisons)
        ],
    )
