"""The page on the predicted cost of a method's variants on devices."""

from collections.abc import Sequence
from typing import TypeVar

from fedvit.resources import Budget, BudgetKind
from profiles.prediction import MemoryPhase, Prediction, ProgramCost
from profiles.report.document import ProfiledDevice, ProfileDocument
from profiles.report.page import (
    Bar,
    Chart,
    Grid,
    Segment,
    count,
    duration,
    environment,
    on_one_scale,
    percent,
    quantity,
    size,
)
from profiles.report.verdict import BUDGETS, crosscheck_words, device_name, profile_verdict

T = TypeVar("T")

FORWARD = Segment(0, "c0", "forward")
BACKWARD = Segment(0, "c1", "backward")
FROZEN = Segment(0, "c7", "of blocks that are not trained", hatched=True)
SPEEDS = {"measured": "as devices measured them", "catalogue": "those of the catalogue"}
MEMORY_PHASES = {"train": "training", "upload": "uploading", "evaluate": "testing"}


def profile_page(document: ProfileDocument) -> str:
    """One page that needs no other file."""
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
        blocks=_compared(labels, [_flops_by_block(variant.cost) for variant in document.variants]),
        times=_compared(labels, [_times(document, number) for number in range(len(labels))]),
        energies=_compared(labels, [_energies(document, number) for number in range(len(labels))])
        if any(prediction.energy_j is not None for device in document.devices for prediction in device.predictions)
        else [],
        memory=_compared(document.devices, [_memory(document, device) for device in document.devices]),
        variant_table=variant_table(document),
        prediction_table=prediction_table(document),
        memory_table=_memory_table(document),
        block_table=_block_table(document),
        published_table=_published_table(document),
        checked=crosscheck_words(document.crosscheck) if document.crosscheck else "",
    )


def per_image(cost: ProgramCost, flops: int) -> float:
    """Of one image, from FLOPs of an optimizer step."""
    return flops / cost.batch_size


def limits(device: ProfiledDevice) -> str:
    """A device's budget in words."""
    return ", ".join(budget_words(device.budget).values()) or "not limited"


def budget_words(budget: Budget) -> dict[BudgetKind, str]:
    """Each limit that there is."""
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
        (_span(trained, ""), "numbers trained on a device"),
        (_span(flops, "FLOP"), "for one image, forward and backward"),
        (_span([cost.bytes_up for cost in costs], "B"), "uploaded in a round"),
        (_span(peaks, "B"), "memory at its highest"),
    ]


def _span(values: list[int] | list[float], unit: str) -> str:
    """
    >>> _span([1_500_000, 3_000_000], "B"), _span([500, 3_000_000], "B"), _span([7], "B")
    ('1.50 to 3.00 MB', '500 B to 3.00 MB', '7 B')
    """
    low, high = count(min(values), unit), count(max(values), unit)
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1:] == high.split()[1:] else low} to {high}"


def _compared(names: Sequence[T], charts: Sequence[Chart]) -> list[tuple[T, Chart]]:
    """Charts of one kind, on one scale."""
    return list(zip(names, on_one_scale(charts), strict=True))


# --- pictures -------------------------------------------------------------------------------------------


def _cell(prediction: Prediction) -> tuple[str, str, str]:
    """Class, words and small print of one combination."""
    small = f"{duration(prediction.train_s)}, {size(prediction.peak_rss_bytes)}"
    if prediction.over:
        return "bad", "over: " + ", ".join(BUDGETS[kind] for kind in prediction.over), small
    return "good", "fits", small


def _flops_by_variant(document: ProfileDocument) -> Chart:
    bars = []
    for variant in document.variants:
        cost = variant.cost
        forward, backward = per_image(cost, cost.flops_forward), per_image(cost, cost.flops_backward)
        parts = (Segment(forward, "c0", "forward"), Segment(backward, "c1", "backward"))
        bars.append(Bar(variant.label, parts, count(forward + backward, "FLOP")))
    return Chart(tuple(bars), (FORWARD, BACKWARD))


def _bytes_by_variant(document: ProfileDocument) -> Chart:
    bars = [
        Bar(
            variant.label,
            (
                Segment(variant.cost.bytes_down, "c2", "down each round"),
                Segment(variant.cost.bytes_up, "c5", "up each round"),
            ),
            f"{size(variant.cost.bytes_down)} down, {size(variant.cost.bytes_up)} up",
        )
        for variant in document.variants
    ]
    return Chart(tuple(bars), (Segment(0, "c2", "down each round"), Segment(0, "c5", "up each round")))


def _flops_by_block(cost: ProgramCost) -> Chart:
    blocks: dict[str, list[float]] = {}
    trained: dict[str, bool] = {}
    for entry in cost.flops:
        sums = blocks.setdefault(entry.block, [0, 0])
        sums[0] += per_image(cost, entry.forward)
        sums[1] += per_image(cost, entry.backward)
        trained[entry.block] = trained.get(entry.block, False) or entry.trained is not False
    bars = tuple(
        Bar(
            block,
            (
                Segment(forward, "c0", f"forward {count(forward, 'FLOP')}", hatched=not trained[block]),
                Segment(backward, "c1", f"backward {count(backward, 'FLOP')}", hatched=not trained[block]),
            ),
            count(forward + backward, "FLOP"),
        )
        for block, (forward, backward) in blocks.items()
    )
    return Chart(bars, (FORWARD, BACKWARD, *([] if all(trained.values()) else [FROZEN])))


def _times(document: ProfileDocument, variant: int) -> Chart:
    bars = []
    for device in document.devices:
        prediction = device.predictions[variant]
        tested = prediction.evaluate_s
        trained = prediction.train_s or 0.0
        parts = [Segment(trained, "c0", f"training {duration(trained)}")]
        if tested is not None:
            parts.append(Segment(tested, "c4", f"testing {duration(tested)}"))
        bars.append(
            Bar(
                device_name(device),
                tuple(parts),
                duration(trained + (tested or 0.0)),
                limit=device.budget.round_deadline_s,
            )
        )
    return Chart(tuple(bars), (Segment(0, "c0", "training"), Segment(0, "c4", "testing")), "time budget, of training")


def _energies(document: ProfileDocument, variant: int) -> Chart:
    known = [(device, device.predictions[variant].energy_j) for device in document.devices]
    bars = tuple(
        Bar(
            device_name(device),
            (Segment(energy_j or 0.0, "c6", count(energy_j, "J")),),
            "power not known" if energy_j is None else count(energy_j, "J"),
        )
        for device, energy_j in known
    )
    return Chart(bars)


def _memory(document: ProfileDocument, device: ProfiledDevice) -> Chart:
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
            bars.append(Bar(label, parts, size(phase.total_bytes), limit=device.budget.memory_bytes))
    legend = tuple(Segment(0, f"c{number % 8}", name) for number, name in enumerate(names))
    return Chart(tuple(bars), legend, f"memory budget, {size(device.budget.memory_bytes)}")


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


def variant_table(document: ProfileDocument) -> Grid:
    """What follows from the Programs alone."""
    headings = (
        "variant", "patches kept", "batch", "of a run", "trained", "frozen", "stays local", "forward / image",
        "backward / image", "steps", "FLOP / round", "FLOP / test image", "once", "down", "up",
    )  # fmt: skip
    rows = [
        (
            variant.label,
            str(cost.kept_patches),
            str(cost.batch_size),
            str(cost.run_size),
            f"{cost.parameters_trained:,}",
            f"{cost.parameters_frozen:,}",
            f"{cost.parameters_local:,}",
            count(per_image(cost, cost.flops_forward), "FLOP"),
            count(per_image(cost, cost.flops_backward), "FLOP"),
            f"{cost.steps:,}",
            count(cost.flops_round, "FLOP"),
            count(cost.flops_evaluate, "FLOP"),
            size(cost.bytes_once),
            size(cost.bytes_down),
            size(cost.bytes_up),
        )
        for variant in document.variants
        for cost in (variant.cost,)
    ]
    return Grid(headings, rows)


def prediction_table(document: ProfileDocument) -> Grid:
    """One row for each device and variant."""
    headings = (
        "device", "variant", "step", "training", "testing", "bound by", "peak memory", "power", "energy", "over",
    )  # fmt: skip
    rows = [
        (
            device_name(device),
            variant.label,
            duration(prediction.step_s),
            duration(prediction.train_s),
            duration(prediction.evaluate_s),
            prediction.bound or "not known",
            size(prediction.peak_rss_bytes),
            quantity(prediction.power_w, "W"),
            quantity(prediction.energy_j, "J"),
            ", ".join(BUDGETS[kind] for kind in prediction.over) or "nothing",
        )
        for device in document.devices
        for variant, prediction in zip(document.variants, device.predictions, strict=True)
    ]
    return Grid(headings, [tuple(cell.replace("not measured", "not known") for cell in row) for row in rows], names=2)


def _memory_table(document: ProfileDocument) -> Grid:
    names = _part_names(document)
    rows = [
        (
            device_name(device),
            variant.label,
            MEMORY_PHASES[phase.phase],
            *(size(phase.parts.get(name, 0)) for name in names),
            size(phase.total_bytes),
        )
        for device in document.devices
        for variant, prediction in zip(document.variants, device.predictions, strict=True)
        for phase in prediction.memory
    ]
    return Grid(("device", "variant", "phase", *names, "together"), rows, names=3)


def _block_table(document: ProfileDocument) -> Grid:
    rows = [
        (
            variant.label,
            entry.block,
            entry.kind,
            {True: "yes", False: "no", None: "not said"}[entry.trained],
            count(per_image(variant.cost, entry.forward), "FLOP"),
            count(per_image(variant.cost, entry.backward), "FLOP"),
        )
        for variant in document.variants
        for entry in variant.cost.flops
    ]
    return Grid(("variant", "block", "part", "trained", "forward / image", "backward / image"), rows, names=4)


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
