"""Rows, headings and notes of an experiment's report, the same for a terminal, Markdown and HTML."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import fmean, median
from typing import Any, NamedTuple

from fleet.experiments.across import Study, make_studies
from fleet.experiments.cells import as_text
from fleet.experiments.outcome import CONFIDENCE, find_leader
from profiles.report.experiment import ExperimentOutcome, Interval, MethodComparison, SearchOutcome
from profiles.report.tables import Column, Sheet

COST_HEADINGS = (
    "method", "partition", "accuracy", "± devices", "by image", "down MB", "up MB", "GFLOP", "wall s", "memory MB",
)  # fmt: skip
COST_UNITS = (
    "bytes, with engine onnx those of tests among them, and FLOPs of training: per device and round in which it trained"
    "; wall seconds of a whole run; memory of its process, all devices in it"
)
DIFFERENCES = (
    f"mean over seeds of the difference on the same seed, and its {CONFIDENCE:.0%} interval (Student's t, paired),"
    " not corrected for the number of comparisons"
)
PROGRESS = (
    "mean over seeds; ± evaluations is the population standard deviation over the evaluations of one run; rounds are"
    " those until the first evaluation with the accuracy, where every seed reached it; s: of each one's slowest device"
)
GAINS = (
    'of single devices over the same device with the same seed, all seeds together; "ahead" is the share of devices'
    " that gain"
)
LEADER = f"bold: ahead of every other method in its column, shown by {CONFIDENCE:.0%} intervals of paired differences"
GAIN_COLUMNS = ("mean", "lowest", "median", "highest", "ahead")
GENERIC = (
    "accuracy of the server's one model on images that no device has, mean over seeds and its"
    f" {CONFIDENCE:.0%} interval; - where each device has a part of its own"
)
NOVEL = (
    "accuracy of devices that joined after the training and learnt their own part alone, mean over them, then over"
    f" seeds, and its {CONFIDENCE:.0%} interval; what all devices share stood still"
)
GENERATED = (
    "difference between the tensors that the server makes for two devices, as a share of their size, in the last round:"
    f" mean over seeds and its {CONFIDENCE:.0%} interval; 0: all devices get the same"
)
NOVEL_ROUNDS = "mean accuracy of these devices after each of their rounds, then over seeds"
ATTACK_COLUMNS = {
    "patches once": "seen_once",
    "error once": "error_once",
    "patches ever": "seen_ever",
    "error ever": "error_ever",
    "member AUC": "membership",
    "class distance": "class_distance",
    "if even": "even_distance",
}
"""Heading -> field of an attack."""
ATTACKS = (
    "mean over devices, first seed. The attacker has the device's own blocks, or their first values, and images of"
    " other devices; error: of images that it rebuilds linearly from the features of one epoch, or of all epochs of a"
    " round, relative to the mean image; member AUC: it tells images of the device from others, 0.5 is a guess; class"
    " distance: between the class distributions of a device and of its upload, 0 is told, and beside it that of"
    " equally many of each class"
)
ACROSS = (
    "accuracy, mean over devices and seeds, of late evaluations where the experiment has them; methods without this"
    " option have one figure"
)
CLASSES = (
    "classes of a device weigh equally: mean over devices, each on its own test images, then over seeds, and its"
    f" {CONFIDENCE:.0%} interval; - where devices do not count their answers by class"
)
VALIDATION = (
    "validation accuracy: on images set apart from each device's training images, mean over devices after the last"
    " round, then over the search's seeds; no test image of these seeds was seen"
)
OF_MEAN = f" of the mean over devices, [ ] is its {CONFIDENCE:.0%} interval over seeds (Student's t)"

MOST_NAMED = 10
"""Most unfinished cells that a line names."""

Rows = list[tuple[str, ...]]


class ReportSection(NamedTuple):
    """A table with its title and the note below it."""

    name: str  # of its file
    title: str
    sheet: Sheet
    note: str
    is_titled: bool = True  # in Markdown


_Figure = Callable[[MethodComparison], tuple[float | None, Interval | None]]
_CLASS_SCORES: tuple[tuple[str, str, _Figure], ...] = (
    ("balanced", "balanced accuracy", lambda entry: (entry.balanced_accuracy, entry.balanced_interval)),
    ("macro-f1", "macro F1", lambda entry: (entry.macro_f1, entry.macro_f1_interval)),
    ("auc", "AUC", lambda entry: (entry.auc, entry.auc_interval)),
)


def make_sheet(headings: Sequence[str], rows: Sequence[tuple[str, ...]], names: int = 1) -> Sheet:
    """Make a table of texts; the first `names` columns are wrapped if they do not fit, figures never."""
    words = [Column("name", heading, itemgetter(at), is_long=True) for at, heading in enumerate(headings[:names])]
    figures = [
        Column("figure", heading.replace(" ", "\n"), itemgetter(at))
        for at, heading in enumerate(headings[names:], start=names)
    ]
    return Sheet(rows, words + figures)


def make_sections(outcome: ExperimentOutcome) -> list[ReportSection]:
    """Make the tables between accuracy and costs, as far as the experiment has their figures."""
    columns = ("method", *outcome.partitions)
    experiment = outcome.experiment
    sections = []
    if outcome.differences:
        sheet = make_sheet(columns, _difference_rows(outcome))
        title = f"{experiment}: difference in accuracy to {outcome.reference}"
        sections.append(ReportSection("differences", title, sheet, DIFFERENCES))
    if outcome.gains:
        sheet = make_sheet(("method", "partition", *GAIN_COLUMNS), _gain_rows(outcome), names=2)
        sections.append(ReportSection("gains", f"{experiment}: gain over {outcome.reference}", sheet, GAINS))
    if rows := _mean_rows(outcome, lambda entry: (entry.generic, entry.generic_interval)):
        sections.append(ReportSection("generic", "generic model", make_sheet(columns, rows), GENERIC))
    if rows := _mean_rows(outcome, lambda entry: (entry.novel, entry.novel_interval)):
        sections.append(ReportSection("novel", "novel devices", make_sheet(columns, rows), NOVEL))
    if rows := _curve_rows(outcome):
        sheet = make_sheet(("method", "partition", "accuracy"), rows, names=2)
        sections.append(ReportSection("novel-rounds", "novel devices by round", sheet, NOVEL_ROUNDS))
    if rows := _mean_rows(outcome, lambda entry: (entry.generated_difference, entry.generated_interval)):
        sections.append(ReportSection("generated", "generated tensors", make_sheet(columns, rows), GENERATED))
    for name, title, read in _CLASS_SCORES:
        if rows := _mean_rows(outcome, read):
            sections.append(ReportSection(name, title, make_sheet(columns, rows), CLASSES))
    if rows := _attack_rows(outcome):
        sheet = make_sheet(("method", "partition", "attacker has", *ATTACK_COLUMNS), rows, names=3)
        sections.append(ReportSection("attacks", "what features show", sheet, ATTACKS))
    for study in make_studies(outcome):
        columns = (study.option, *(line.name for line in study.lines), *study.levels, *_mean_heading(study))
        title = f"{study.name}: accuracy by {study.option}"
        sections.append(ReportSection(f"across-{study.name}", title, make_sheet(columns, _study_rows(study)), ACROSS))
    if rows := _progress_rows(outcome):
        sheet = make_sheet(_progress_headings(outcome), rows, names=2)
        sections.append(ReportSection("progress", "progress", sheet, PROGRESS, is_titled=False))
    return sections


def accuracy_sheet(outcome: ExperimentOutcome) -> Sheet:
    """Make the table of each method's accuracy on each partition; the leader of a partition is bold."""

    def read_accuracy(partition: str) -> Column:
        leader = find_leader(outcome, partition)
        return Column(
            "accuracy",
            partition,
            lambda method: _accuracy(outcome, method, partition),
            lambda method: "bold" if method == leader else "",
        )

    method = Column("name", "method", lambda method: method, is_long=True)
    return Sheet(outcome.methods, [method, *map(read_accuracy, outcome.partitions)])


def cost_sheet(outcome: ExperimentOutcome) -> Sheet:
    """Make the table with a row for each method on each partition."""
    return make_sheet(COST_HEADINGS, [_cost_row(entry) for entry in outcome.comparisons], names=2)


def describe_spread(outcome: ExperimentOutcome) -> str:
    """Explain ± in tables."""
    counts = {len(entry.seeds) for entry in outcome.comparisons}
    if counts == {1}:
        return (
            "single seed: ± is the standard deviation over devices within one run, not between runs; "
            "there are no intervals"
        )
    if 1 in counts:
        return f"± is the sample standard deviation over seeds{OF_MEAN}; without, a single seed is finished"
    seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts, default=0)}"
    return f"± is the sample standard deviation over {seeds} seeds{OF_MEAN}"


def search_title(search: SearchOutcome) -> str:
    """Title of a search's table."""
    return f"search for {search.method} on {search.partition}"


def search_note(search: SearchOutcome) -> str:
    """The chosen values, and whether other values may be better."""
    if search.chosen is None:
        return "no device could train with any of these values" if search.over else "not finished"
    edges = [
        f"{option} = {search.chosen[option]} is the {edge} value tried, {'lower' if edge == 'lowest' else 'higher'}"
        " ones may be better"
        for option, edge in search.at_edge.items()
    ]
    return "; ".join([f"chosen: {as_text(search.chosen)}", *edges])


def search_sheet(search: SearchOutcome) -> Sheet:
    """Make the table with a row for each combination of values."""
    rows = [
        (
            as_text(one.values),
            "chosen" if one.values == search.chosen else f"unusable: {one.unusable}" if one.unusable else "",
            str(one.rounds or "-"),
            _figure(one.accuracy),
        )
        for one in search.tried
    ]
    return make_sheet(("values", "", "rounds", "validation accuracy"), rows, names=2)


def protocol_lines(outcome: ExperimentOutcome) -> list[str]:
    """A line on the measurement of accuracy; if methods differ, a line for each protocol, naming its methods."""
    if len(outcome.protocols) < 2:
        return [f"accuracy: {protocol}" for protocol in outcome.protocols]
    methods = {
        protocol: dict.fromkeys(entry.method for entry in outcome.comparisons if entry.protocol == protocol)
        for protocol in outcome.protocols
    }
    return [f"accuracy of {', '.join(names)}: {protocol}" for protocol, names in methods.items()]


def privacy_lines(outcome: ExperimentOutcome) -> list[str]:
    """A line on the privacy of each method that adds noise."""
    lines = []
    for entry in outcome.comparisons:
        figures = (("updates", entry.epsilon), ("one device's features", entry.feature_epsilon))
        spent = [f"epsilon of {what} {epsilon:.3g}" for what, epsilon in figures if epsilon is not None]
        lines += [f"{entry.method} on {entry.partition}: {', '.join(spent)}, over all rounds"] if spent else []
    return lines


def describe_missing(outcome: ExperimentOutcome) -> str:
    """A line on the cells that are not finished; empty if all are."""
    missing = [cell for cell in outcome.cells if cell.result is None]
    if not missing:
        return ""
    failed = [f"{cell.name}: {cell.failure}" for cell in missing if cell.failure]
    others = [cell.name for cell in missing if not cell.failure]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    reasons = f"; failed: {'; '.join(failed)}" if failed else ""
    unfinished = f"; not run or interrupted: {', '.join(others[:MOST_NAMED])}{more}" if others else ""
    return f"{len(missing)} of {len(outcome.cells)} cells are not finished{reasons}{unfinished}"


def setting_rows(outcome: ExperimentOutcome) -> list[tuple[str, str]]:
    """All settings of the experiment, one line each."""
    lines = [
        (key, _format(value))
        for key, value in outcome.settings.items()
        if key not in ("methods", "partitions", "common")
    ]
    lines += [(f"partition {name}", _format(table)) for name, table in outcome.settings["partitions"].items()]
    lines += [(f"method {name}", _format(options)) for name, options in outcome.methods.items()]
    return lines


def _difference_rows(outcome: ExperimentOutcome) -> Rows:
    return [
        (method, *(_difference(outcome, method, partition) for partition in outcome.partitions))
        for method in outcome.methods
        if method != outcome.reference
    ]


def _gain_rows(outcome: ExperimentOutcome) -> Rows:
    rows = []
    for entry in outcome.comparisons:
        if gains := outcome.sort_gains(entry.method, entry.partition):
            figures = (fmean(gains), gains[0], median(gains), gains[-1])
            ahead = sum(gain > 0 for gain in gains) / len(gains)
            rows.append((entry.method, entry.partition, *(f"{figure:+.3f}" for figure in figures), f"{ahead:.0%}"))
    return rows


def _mean_rows(outcome: ExperimentOutcome, figure: _Figure) -> Rows:
    """One row for each method that has the figure on any partition."""
    rows = []
    for method in outcome.methods:
        entries = [outcome.comparison(method, partition) for partition in outcome.partitions]
        figures = [figure(entry) if entry else (None, None) for entry in entries]
        if any(mean is not None for mean, _ in figures):
            cells = [f"{_figure(mean)}{_interval(interval)}" for mean, interval in figures]
            rows.append((method, *cells))
    return rows


def _curve_rows(outcome: ExperimentOutcome) -> Rows:
    """One row for each comparison with more than one round of novel devices."""
    return [
        (entry.method, entry.partition, " ".join(f"{accuracy:.3f}" for accuracy in entry.novel_rounds))
        for entry in outcome.comparisons
        if len(entry.novel_rounds) > 1
    ]


def _attack_rows(outcome: ExperimentOutcome) -> Rows:
    """One row for each attacker of each method whose features were attacked."""
    return [
        (one.method, one.partition, one.attacker, *(_figure(getattr(one, field)) for field in ATTACK_COLUMNS.values()))
        for one in outcome.average_attacks()
    ]


def _mean_heading(study: Study) -> tuple[str, ...]:
    return ("mean of lines",) if len(study.lines) > 1 else ()


def _study_rows(study: Study) -> Rows:
    """One row for each value of the option."""
    rows = []
    for value in study.values:
        figures = [
            next((point.accuracy for point in line.points if point.value == value), None) for line in study.lines
        ]
        known = [figure for figure in figures if figure is not None]
        means = [fmean(known) if len(known) == len(figures) else None] if len(study.lines) > 1 else []
        rows.append((str(value), *map(_figure, [*figures, *study.levels.values(), *means])))
    return rows


def _progress_headings(outcome: ExperimentOutcome) -> tuple[str, ...]:
    late, target = outcome.settings.get("late_rounds"), outcome.settings.get("target_accuracy")
    columns = [f"mean of the last {late} rounds", "± evaluations"] if late else []
    return ("method", "partition", *columns, *([f"rounds to {target:g}", "s of training"] if target else []))


def _progress_rows(outcome: ExperimentOutcome) -> Rows:
    """One row for each method on each partition; none if the experiment asks for none of the figures."""
    late, target = outcome.settings.get("late_rounds"), outcome.settings.get("target_accuracy")
    rows = []
    for entry in outcome.comparisons if late or target else ():
        columns = [_figure(entry.late), _figure(entry.late_std)] if late else []
        rounds = entry.rounds_to_target
        reached = ["not reached", "-"] if rounds is None else [f"{rounds:g}", _figure(entry.seconds_to_target)]
        rows.append((entry.method, entry.partition, *columns, *(reached if target else [])))
    return rows


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _accuracy(outcome: ExperimentOutcome, method: str, partition: str) -> str:
    entry = outcome.comparison(method, partition)
    if entry is None:
        return "-"
    has_single_seeds = all(len(other.seeds) == 1 for other in outcome.comparisons)
    deviation = entry.std_over_devices if has_single_seeds else entry.std_over_seeds
    plus_minus = "" if deviation is None else f" ± {deviation:.3f}"
    return f"{entry.accuracy:.3f}{plus_minus}{_interval(entry.interval)}{note_missing_seeds(outcome, entry.seeds)}"


def _difference(outcome: ExperimentOutcome, method: str, partition: str) -> str:
    entry = outcome.difference(method, partition)
    if entry is None:
        return "-"
    return f"{entry.mean:+.3f}{_interval(entry.interval)}{note_missing_seeds(outcome, entry.seeds)}"


def _interval(interval: Interval | None) -> str:
    """Write an interval on a line of its own in a terminal."""
    return f"\n[{interval.low:.3f}, {interval.high:.3f}]" if interval else ""


def note_missing_seeds(outcome: ExperimentOutcome, seeds: Sequence[int]) -> str:
    """Write the number of finished seeds behind a figure; empty if all are."""
    return f" ({len(seeds)} of {len(outcome.seeds)} seeds)" if len(seeds) < len(outcome.seeds) else ""


def _cost_row(entry: MethodComparison) -> tuple[str, ...]:
    return (
        entry.method,
        entry.partition,
        f"{entry.accuracy:.3f}",
        f"{entry.std_over_devices:.3f}",
        f"{entry.accuracy_weighted:.3f}",
        f"{entry.bytes_down / 1e6:.3f}",
        f"{entry.bytes_up / 1e6:.3f}",
        "-" if entry.flops is None else f"{entry.flops / 1e9:.2f}",
        f"{entry.wall_s:.0f}",
        "-" if entry.peak_rss_bytes is None else f"{entry.peak_rss_bytes / 1e6:.0f}",
    )


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_format(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format, value)) or "-"
    return str(value)
