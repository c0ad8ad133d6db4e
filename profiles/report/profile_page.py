"""The page on the predicted cost of a method's variants on devices."""

from collections.abc import Sequence
from typing import TypeVar

from fedvit.resources import Budget, BudgetKind
from profiles.prediction import MemoryPhase, Prediction, ProgramCost
from profiles.report.document import ProfiledDevice, ProfileDocument
from profiles.report.page import (
    BarChart,
    ChartBar,
    Segment,
    count,
    duration,
    environment,
    on_one_scale,
    percent,
    quantity,
    size,
)
from profiles.report.tables import Column, Sheet, columns
from profiles.report.verdict import BUDGETS, crosscheck_words, device_name, list_predictions, profile_verdict

T = TypeVar("T")

FORWARD = Segment(0, "c0", "forward")
BACKWARD = Segment(0, "c1", "backward")
FROZEN = Segment(0, "c7", "of blocks that are not trained", hatched=True)
SPEEDS = {"measured": "as devices measured them", "catalogue": "those of the catalogue"}
MEMORY_PHASES = {"train": "training", "upload": "uploading", "evaluate": "testing"}


def profile_page(document: ProfileDocument) -> str:
    """Make one page that needs no other file."""
    page, labels = environment().get_template("profile.html"), [variant.label for variant in document.variants]
    return page.render(
        document=document,
        limits=limits,
        speeds=" and ".join(sorted({SPEEDS[device.source] for device in document.devices})),
        warned=[f"{device_name(device)}: {line}" for device in document.devices for line in device.warnings],
        verdict=profile_verdict(document),
        tiles=_tiles(document),
        matrix=[(device, [_cell(prediction) for prediction in device.predictions]) for device in document.devices],
        flops=_flops_by_variant(document),
        bytes_=_bytes_by_variant(document),
        blocks=_pair_charts(labels, [_flops_by_block(variant.cost) for variant in document.variants]),
        times=_pair_charts(labels, [_times(document, number) for number in range(len(labels))]),
        energies=_pair_charts(labels, [_energies(document, number) for number in range(len(labels))])
        if any(prediction.energy_j is not None for device in document.devices for prediction in device.predictions)
        else [],
        memory=_pair_charts(document.devices, [_memory(document, device) for device in document.devices]),
        variant_table=Sheet(document.variants, _VARIANT_COLUMNS),
        prediction_table=Sheet(list_predictions(document), _PREDICTION_COLUMNS, unknown="not known"),
        memory_table=_memory_sheet(document),
        block_table=_block_sheet(document),
        published_table=_published_table(document),
        checked=crosscheck_words(document.crosscheck) if document.crosscheck else "",
    )


def per_image(cost: ProgramCost, flops: int) -> float:
    """FLOPs of one image, from those of an optimizer step."""
    return flops / cost.batch_size


def limits(device: ProfiledDevice) -> str:
    """Write a device's budget in words."""
    return ", ".join(budget_words(device.budget).values()) or "not limited"


def budget_words(budget: Budget) -> dict[BudgetKind, str]:
    """Write each limit of a budget."""
    words: dict[BudgetKind, str] = {}
    if budget.memory_bytes is not None:
        words["memory"] = f"{size(budget.memory_bytes)} of memory"
    if budget.round_deadline_s is not None:
        words["time"] = f"{duration(budget.round_deadline_s)} a round"
    if budget.flops_per_round is not None:
        words["flops"] = f"{count(budget.flops_per_round, 'FLOP')} a round"
    if budget.upload_bytes is not None:
        words["upload"] = f"{size(budget.upload_bytes)} up a round"
    return words


def _tiles(document: ProfileDocument) -> list[tuple[str, str]]:
    costs = [variant.cost for variant in document.variants]
    trained = sorted({cost.parameters_trained for cost in costs})
    flops = sorted(per_image(cost, cost.flops_forward + cost.flops_backward) for cost in costs)
    peaks = sorted(prediction.peak_rss_bytes for device in document.devices for prediction in device.predictions)
    return [
        (_format_span(trained, ""), "numbers trained on a device"),
        (_format_span(flops, "FLOP"), "for one image, forward and backward"),
        (_format_span([cost.bytes_up for cost in costs], "B"), "uploaded in a round"),
        (_format_span(peaks, "B"), "memory at its highest"),
    ]


def _format_span(values: list[int] | list[float], unit: str) -> str:
    """
    >>> _format_span([1_500_000, 3_000_000], "B"), _format_span([500, 3_000_000], "B"), _format_span([7], "B")
    ('1.50 to 3.00 MB', '500 B to 3.00 MB', '7 B')
    """
    low, high = count(min(values), unit), count(max(values), unit)
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1:] == high.split()[1:] else low} to {high}"


def _pair_charts(names: Sequence[T], charts: Sequence[BarChart]) -> list[tuple[T, BarChart]]:
    """Pair charts of one kind, on one scale, with their names."""
    return list(zip(names, on_one_scale(charts), strict=True))


# --- pictures -------------------------------------------------------------------------------------------


def _cell(prediction: Prediction) -> tuple[str, str, str]:
    """Class, words and small print of one combination."""
    small = f"{duration(prediction.train_s)}, {size(prediction.peak_rss_bytes)}"
    if prediction.over:
        return "bad", "over: " + ", ".join(BUDGETS[kind] for kind in prediction.over), small
    return "good", "fits", small


def _flops_by_variant(document: ProfileDocument) -> BarChart:
    bars = []
    for variant in document.variants:
        cost = variant.cost
        forward, backward = per_image(cost, cost.flops_forward), per_image(cost, cost.flops_backward)
        parts = (Segment(forward, "c0", "forward"), Segment(backward, "c1", "backward"))
        bars.append(ChartBar(variant.label, parts, count(forward + backward, "FLOP")))
    return BarChart(tuple(bars), (FORWARD, BACKWARD))


def _bytes_by_variant(document: ProfileDocument) -> BarChart:
    bars = [
        ChartBar(
            variant.label,
            (
                Segment(variant.cost.bytes_down, "c2", "down each round"),
                Segment(variant.cost.bytes_up, "c5", "up each round"),
            ),
            f"{size(variant.cost.bytes_down)} down, {size(variant.cost.bytes_up)} up",
        )
        for variant in document.variants
    ]
    return BarChart(tuple(bars), (Segment(0, "c2", "down each round"), Segment(0, "c5", "up each round")))


def _flops_by_block(cost: ProgramCost) -> BarChart:
    blocks: dict[str, list[float]] = {}
    trained: dict[str, bool] = {}
    for entry in cost.flops:
        sums = blocks.setdefault(entry.block, [0, 0])
        sums[0] += per_image(cost, entry.forward)
        sums[1] += per_image(cost, entry.backward)
        trained[entry.block] = trained.get(entry.block, False) or entry.trained is not False
    bars = tuple(
        ChartBar(
            block,
            (
                Segment(forward, "c0", f"forward {count(forward, 'FLOP')}", hatched=not trained[block]),
                Segment(backward, "c1", f"backward {count(backward, 'FLOP')}", hatched=not trained[block]),
            ),
            count(forward + backward, "FLOP"),
        )
        for block, (forward, backward) in blocks.items()
    )
    return BarChart(bars, (FORWARD, BACKWARD, *([] if all(trained.values()) else [FROZEN])))


def _times(document: ProfileDocument, variant: int) -> BarChart:
    bars = []
    for device in document.devices:
        prediction = device.predictions[variant]
        tested = prediction.evaluate_s
        trained = prediction.train_s or 0.0
        parts = [Segment(trained, "c0", f"training {duration(trained)}")]
        if tested is not None:
            parts.append(Segment(tested, "c4", f"testing {duration(tested)}"))
        bars.append(
            ChartBar(
                device_name(device),
                tuple(parts),
                duration(trained + (tested or 0.0)),
                limit=device.budget.round_deadline_s,
            )
        )
    return BarChart(
        tuple(bars), (Segment(0, "c0", "training"), Segment(0, "c4", "testing")), "time budget, of training"
    )


def _energies(document: ProfileDocument, variant: int) -> BarChart:
    known = [(device, device.predictions[variant].energy_j) for device in document.devices]
    bars = tuple(
        ChartBar(
            device_name(device),
            (Segment(energy_j or 0.0, "c6", count(energy_j, "J")),),
            "power not known" if energy_j is None else count(energy_j, "J"),
        )
        for device, energy_j in known
    )
    return BarChart(bars)


def _memory(document: ProfileDocument, device: ProfiledDevice) -> BarChart:
    names = _part_names(document)
    bars = []
    for variant, prediction in zip(document.variants, device.predictions, strict=True):
        for phase in prediction.memory:
            parts = tuple(
                Segment(phase.parts[name], f"c{number % 8}", f"{name} {size(phase.parts[name])}")
                for number, name in enumerate(names)
                if phase.parts.get(name)
            )
            label = _phase_label(variant.label, phase, many=len(document.variants) > 1)
            bars.append(ChartBar(label, parts, size(phase.total_bytes), limit=device.budget.memory_bytes))
    legend = tuple(Segment(0, f"c{number % 8}", name) for number, name in enumerate(names))
    return BarChart(tuple(bars), legend, f"memory budget, {size(device.budget.memory_bytes)}")


def _part_names(document: ProfileDocument) -> list[str]:
    """Parts of memory in the order in which they first come, so that a part has one colour on the page."""
    names = dict.fromkeys(
        name
        for device in document.devices
        for prediction in device.predictions
        for phase in prediction.memory
        for name in phase.parts
    )
    return list(names)


def _phase_label(variant: str, phase: MemoryPhase, *, many: bool) -> str:
    name = MEMORY_PHASES[phase.phase]
    return f"{variant}: {name}" if many else name


# --- tables ---------------------------------------------------------------------------------------------


_VARIANT_COLUMNS = (
    Column("variant", "variant", lambda variant: variant.label),
    *columns(
        {
            "kept_patches": "patches kept",
            "batch_size": "batch",
            "run_size": "of a run",
            "parameters_trained": "trained",
            "parameters_frozen": "frozen",
            "parameters_local": "stays local",
        },
        "cost",
    ),
    Column("flops", "forward / image", lambda variant: per_image(variant.cost, variant.cost.flops_forward)),
    Column("flops", "backward / image", lambda variant: per_image(variant.cost, variant.cost.flops_backward)),
    *columns(
        {
            "steps": "steps",
            "flops_round": "FLOP / round",
            "flops_evaluate": "FLOP / test image",
            "bytes_once": "once",
            "bytes_down": "down",
            "bytes_up": "up",
        },
        "cost",
    ),
)
_PREDICTION_COLUMNS = (
    *columns({"device": "device", "variant": "variant"}),
    *columns(
        {
            "step_s": "step",
            "train_s": "training",
            "later_train_s": "later round",
            "evaluate_s": "testing",
            "bound": "bound by",
            "peak_rss_bytes": "peak memory",
            "power_w": "power",
            "energy_j": "energy",
        },
        "prediction",
    ),
    Column("over", "over", lambda row: ", ".join(BUDGETS[kind] for kind in row.prediction.over) or "nothing"),
)


def _memory_sheet(document: ProfileDocument) -> Sheet:
    def read_part(name: str) -> Column:
        return Column("bytes", name, lambda row: row[1].parts.get(name, 0))

    rows = [(row, phase) for row in list_predictions(document) for phase in row.prediction.memory]
    return Sheet(
        rows,
        [
            Column("device", "device", lambda row: row[0].device),
            Column("variant", "variant", lambda row: row[0].variant),
            Column("phase", "phase", lambda row: MEMORY_PHASES[row[1].phase]),
            *map(read_part, _part_names(document)),
            Column("bytes", "together", lambda row: row[1].total_bytes),
        ],
    )


def _block_sheet(document: ProfileDocument) -> Sheet:
    return Sheet(
        [(variant, entry) for variant in document.variants for entry in variant.cost.flops],
        [
            Column("variant", "variant", lambda row: row[0].label),
            Column("block", "block", lambda row: row[1].block),
            Column("part", "part", lambda row: row[1].kind),
            Column("trained", "trained", lambda row: {True: "yes", False: "no", None: "not said"}[row[1].trained]),
            Column("flops", "forward / image", lambda row: per_image(row[0].cost, row[1].forward)),
            Column("flops", "backward / image", lambda row: per_image(row[0].cost, row[1].backward)),
        ],
    )


def _published_table(document: ProfileDocument) -> list[dict[str, str]]:
    return [
        {
            "figure": entry.figure,
            "published": quantity(entry.published, entry.unit),
            "reproduced": "no" if entry.reproduced is None else quantity(entry.reproduced, entry.unit),
            "ours": "" if entry.ours is None else quantity(entry.ours, entry.unit),
            "error": ""
            if entry.ours is None
            else percent((entry.published - entry.ours) / entry.ours if entry.ours else None),
            "convention": entry.convention,
            "source": entry.source,
        }
        for entry in document.published
    ]
