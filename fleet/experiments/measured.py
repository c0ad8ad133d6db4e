"""The page of all kept results, a table for each experiment. `make verdicts` writes it."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fleet.experiments.cells import as_text
from fleet.experiments.kept_results import KeptAccuracy, KeptResults, describe_difference, describe_interval
from fleet.experiments.report_tables import ATTACK_COLUMNS
from profiles.report.experiment import MeanAttack

PAGE = "measured.md"
_HEAD = """# Measured

Written by `make verdicts` from [docs/results](../../docs/results). Accuracies and differences are means over seeds,
with 95 % intervals ([what each figure is](../../docs/experiments.md#results)). Training, down and up are per device and
round; time is that of a whole run on processors that did other work, too. Chosen: by a search. Edge: the best value was
the lowest or the highest tried. Late: the mean of the evaluations in the last rounds. Novel: accuracy of devices that
joined after the training. Rounds to a target, and seconds of each one's slowest device, are those that every seed
reached. Generated apart: the difference between the tensors that a generator makes for two devices, as a share of their
size.
[Attacks](../../docs/experiments.md#what-features-show) are means over devices. [Verdicts](README.md#what-holds).
"""


def render_measured(results: Iterable[KeptResults], folder: Path) -> str:
    """Render the page for a folder that has the experiments' files, to which its sections lead."""
    files = {path.stem: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.toml"))}
    return "\n".join([_HEAD, *(_render_results(one, files.get(one.experiment)) for one in results if one.accuracies)])


def _render_results(kept: KeptResults, file: str | None) -> str:
    scale = f"[{kept.scale}]({file})" if file else kept.scale
    names = Counter(name for one in kept.differences for name in (one.method, one.reference))
    reference = max(names, key=lambda name: names[name], default="")
    columns = [
        "partition", "method", "accuracy", f"less {reference}", "late", "novel", "rounds to target", "s to target",
        "chosen", "edge", "generated apart", "training", "down", "up", "time",
    ]  # fmt: skip
    tables = [_render_table(columns, [_list_cells(kept, one, reference) for one in kept.accuracies])]
    if kept.attacks:
        columns = ["partition", "method", "attacker has", *ATTACK_COLUMNS]
        tables.append(_render_table(columns, [_list_attack_cells(one) for one in kept.attacks]))
    seeds = max(one.seeds for one in kept.accuracies)
    return f"## {kept.experiment}\n\n{scale}; {seeds} seed{'s' * (seeds > 1)}.\n\n" + "\n".join(tables)


def _render_table(columns: list[str], rows: list[list[str]]) -> str:
    """Render the columns that are used."""
    used = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    lines = (columns, ["---"] * len(columns), *rows)
    return "".join(f"| {' | '.join(row[place] for place in used)} |\n" for row in lines)


def _list_cells(kept: KeptResults, one: KeptAccuracy, reference: str) -> list[str]:
    difference = None
    with suppress(ConfigError):  # none was kept of a single method, and of the reference
        difference = kept.find_difference(one.method, reference, one.partition)
    return [
        one.partition,
        one.method,
        f"{one.mean:.3f}{describe_interval(one.interval)}",
        describe_difference(difference) if difference else "",
        "" if one.late is None else f"{one.late:.3f}",
        "" if one.novel is None else f"{one.novel:.3f}{describe_interval(one.novel_interval)}",
        "" if one.rounds_to_target is None else f"{one.rounds_to_target:g}",
        "" if one.seconds_to_target is None else f"{one.seconds_to_target:.1f}",
        as_text(one.chosen),
        ", ".join(f"{option}: {edge}" for option, edge in one.at_edge.items()),
        "" if one.generated_difference is None else f"{one.generated_difference:.3f}",
        "" if one.flops is None else format_flops(one.flops),
        "" if one.bytes_down is None else format_bytes(one.bytes_down),
        "" if one.bytes_up is None else format_bytes(one.bytes_up),
        "" if one.wall_s is None else format_seconds(one.wall_s),
    ]


def _list_attack_cells(one: MeanAttack) -> list[str]:
    figures = (f"{getattr(one, field):.3f}" for field in ATTACK_COLUMNS.values())
    return [one.partition, one.method, one.attacker, *figures]
