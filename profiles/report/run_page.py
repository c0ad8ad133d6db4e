"""A page on what a run cost and reached, beside what was predicted."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from profiles.report.confusion import confusion, taken_for
from profiles.report.device_columns import device_table
from profiles.report.document import DeviceRound, RunDevice, RunDocument
from profiles.report.figures import svg
from profiles.report.page import (
    Bar,
    Chart,
    Grid,
    Segment,
    duration,
    environment,
    percent,
    quantity,
    share,
    size,
)
from profiles.report.profile_page import budget_words
from profiles.report.verdict import (
    BUDGETS,
    feature_words,
    generator_words,
    privacy_words,
    run_verdict,
    setting_words,
    times,
)

MOST_ROWS = 400
"""Of the table of all devices and rounds; the JSON has all."""
MOST_DEVICES = 12
"""Devices that are shown one by one; of more, the page has their distribution and the extremes."""
LOWEST = 10
"""Of many devices, those with the lowest accuracy, or the highest costs, that are shown."""
BIN = 0.05
"""Width of a bar of the distribution of accuracies."""
MOST_MISSING = 50
"""Refused and missing results that are listed; the JSON has all."""
PREDICTED = Segment(0, "c7", "predicted")
MEASURED = Segment(0, "c0", "measured")
EPSILONS: dict[str, dict[str, str]] = {
    "updates": {"epsilon": "of a device, all rounds"},
    "features": {
        "device_epsilon": "of a device, all rounds",
        "upload_epsilon": "of an upload",
        "row_epsilon": "of a row",
    },
}
"""By what is protected: fields of a round, and what they are the epsilon of."""


def run_page(document: RunDocument) -> str:
    """One page that needs no other file."""
    pages = environment()
    pages.filters["setting"] = setting_words
    rows = [(device, entry) for device in document.devices for entry in device.rounds]
    return pages.get_template("run.html").render(
        document=document,
        verdict=run_verdict(document),
        tiles=_tiles(document),
        accuracy=_accuracy(document),
        loss=_loss(document),
        generator=generator_words(document),
        features=feature_words(document),
        generator_pictures=[drawn for drawn in (_difference(document), _entropy(document)) if drawn],
        privacy=privacy_words(document),
        epsilons=[drawn for kind in EPSILONS if (drawn := _epsilons(document, kind))],
        privacy_table=_privacy_table(document),
        distribution=_distribution(document),
        lowest=_lowest(document),
        class_table=_class_table(document),
        confusion=confusion(document.classes),
        device_table=device_table(document),
        few=len(document.devices) <= MOST_DEVICES,
        most_devices=MOST_DEVICES,
        compared=[
            (figure, _compared(document, figure))
            for figure in ("training of a round", "peak memory", "energy of a round")
        ],
        comparisons=[(device, device.comparisons()) for device in document.devices],
        missing=(document.refusals + document.dropouts)[:MOST_MISSING],
        predicted=has_predictions(document),
        budgets=_budgets(document),
        round_table=_round_table(document),
        detail_table=_detail_table(rows) if len(rows) <= MOST_ROWS else None,
        details=len(rows),
    )


def run_piece(document: RunDocument) -> str:
    """What a notebook shows of a run: a piece of a page, without the page's style."""
    return (
        environment()
        .get_template("run_piece.html")
        .render(
            document=document,
            verdict=run_verdict(document),
            accuracy=_accuracy(document),
            round_table=_round_table(document),
            device_table=device_table(document),
        )
    )


def has_predictions(document: RunDocument) -> bool:
    return any(entry.expected for device in document.devices for entry in device.rounds)


def _tiles(document: RunDocument) -> list[tuple[str, str]]:
    peaks = [device.peak_rss_bytes for device in document.devices if device.peak_rss_bytes is not None]
    return [
        (share(document.mean_accuracy), "accuracy, mean over devices"),
        (size(sum(entry.bytes_down for entry in document.devices)), "down, all devices"),
        (size(sum(entry.bytes_up for entry in document.devices)), "up, all devices"),
        *([(size(max(peaks)), "memory of a device at its highest")] if peaks else []),
        *([(duration(document.duration_s), "from the first round to the last")] if document.duration_s else []),
    ]


# --- pictures -------------------------------------------------------------------------------------------


def _accuracy(document: RunDocument) -> str | None:
    """Mean over devices, with a band of a standard deviation, and the lowest and the highest device; None where no
    round was evaluated."""
    known = [
        (entry.round, entry.accuracy_mean, entry.accuracy_lowest, entry.accuracy_highest, entry.accuracy_std or 0.0)
        for entry in document.rounds
        if entry.accuracy_mean is not None
    ]
    if not known:
        return None
    rounds, means, lowest, highest, spread = zip(*known, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(rounds, means, color="C0", marker="." if len(rounds) < 40 else "")
        below = [mean - std for mean, std in zip(means, spread, strict=True)]
        above = [mean + std for mean, std in zip(means, spread, strict=True)]
        axes.fill_between(rounds, below, above, color="C0", alpha=0.2, linewidth=0)
        for extreme in (lowest, highest):
            axes.plot(rounds, extreme, color="C0", linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 1)
        axes.set_ylabel("accuracy")
        _round_axis(axes)

    return svg(draw)


def _distribution(document: RunDocument) -> str | None:
    """How many devices have which accuracy; None for so few devices that the table shows it."""
    known = [device.accuracy for device in document.devices if device.accuracy is not None]
    if len(known) <= MOST_DEVICES:
        return None

    def draw(axes: Axes) -> None:
        first = math.floor(min(known) / BIN)
        last = max(math.ceil(max(known) / BIN), first + 1)
        axes.hist(known, bins=last - first, range=(first * BIN, last * BIN), color="C0")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("accuracy of the last evaluation")
        axes.set_ylabel("devices")

    return svg(draw)


def _loss(document: RunDocument) -> str | None:
    known = [(entry.round, entry.train_loss) for entry in document.rounds if entry.train_loss is not None]
    if not known:
        return None
    rounds, losses = zip(*known, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(rounds, losses, color="C1", marker="." if len(rounds) < 40 else "")
        axes.set_ylim(0, 1.05 * max(losses))
        axes.set_ylabel("training loss")
        _round_axis(axes)

    return svg(draw)


def _epsilons(document: RunDocument, kind: str) -> str | None:
    """What was spent by round, of updates or of features; None where there is no such noise."""
    lines = {
        name: [(entry.round, value) for entry in document.rounds if (value := getattr(entry, field)) is not None]
        for field, name in EPSILONS[kind].items()
    }
    if not any(lines.values()):
        return None

    def draw(axes: Axes) -> None:
        for place, (name, points) in enumerate(lines.items()):
            if not points:
                continue
            rounds, values = zip(*points, strict=True)
            axes.plot(rounds, values, color=f"C{place}", marker="." if len(rounds) < 40 else "", label=name)
        if kind == "features":  # a row and a device are orders of magnitude apart
            axes.set_yscale("log")
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(f"epsilon of {kind}")
        _round_axis(axes)

    return svg(draw)


def _difference(document: RunDocument) -> str | None:
    """Difference between devices' generated values by round; None for a method without a generator."""
    points = [(entry.round, entry.generator.difference) for entry in document.rounds if entry.generator]
    if not points:
        return None
    rounds, differences = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(rounds, differences, color="C0", marker="." if len(rounds) < 40 else "")
        axes.set_ylim(0, max(1e-3, 1.05 * max(differences)))
        axes.set_ylabel("difference between devices / size")
        _round_axis(axes)

    return svg(draw)


def _entropy(document: RunDocument) -> str | None:
    """Entropy of the attention's weights by round, its mean and range over devices; None without attention."""
    points = [
        (entry.round, entropy.mean, entropy.lowest, entropy.highest)
        for entry in document.rounds
        if entry.generator and (entropy := entry.generator.attention)
    ]
    if not points:
        return None
    rounds, means, lowest, highest = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(rounds, means, color="C2", marker="." if len(rounds) < 40 else "")
        for extreme in (lowest, highest):
            axes.plot(rounds, extreme, color="C2", linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 1)
        axes.set_ylabel("entropy of attention / log K")
        _round_axis(axes)

    return svg(draw)


def _privacy_table(document: RunDocument) -> Grid:
    """Every round's epsilons, of the kinds that the run has."""
    known = {
        field: f"{kind}: {name}"
        for kind, fields in EPSILONS.items()
        for field, name in fields.items()
        if any(getattr(entry, field) is not None for entry in document.rounds)
    }
    rows = [
        (str(entry.round), *("" if (value := getattr(entry, field)) is None else f"{value:.3g}" for field in known))
        for entry in document.rounds
    ]
    return Grid(("round", *known.values()), rows, names=0)


def _round_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def _compared(document: RunDocument, figure: str) -> Chart | None:
    """One figure of the devices with the most of it, predicted above measured; None where it was never measured."""
    bars: list[Bar] = []
    limits = {"peak memory": "memory_bytes", "training of a round": "round_deadline_s"}
    found = [
        (device, entry, entry.measured)
        for device in document.devices
        for entry in device.comparisons()
        if entry.figure == figure and entry.measured is not None
    ]
    if len(found) > MOST_DEVICES:
        found = sorted(found, key=lambda one: one[2], reverse=True)[:LOWEST]
    for device, entry, measured in found:
        limit = getattr(device.budget, limits[figure]) if device.budget and figure in limits else None
        if entry.predicted is not None:
            text = quantity(entry.predicted, entry.unit)
            bars.append(Bar(device.device, (Segment(entry.predicted, "c7", "predicted"),), text))
        error = f" ({percent(entry.relative_error)})" if entry.relative_error is not None else ""
        label = "" if entry.predicted is not None else device.device
        text = quantity(measured, entry.unit) + error
        bars.append(Bar(label, (Segment(measured, "c0", "measured"),), text, limit=limit))
    predicted = any(segment.colour == PREDICTED.colour for bar in bars for segment in bar.segments)
    return Chart(tuple(bars), (PREDICTED, MEASURED) if predicted else (MEASURED,), "budget") if bars else None


# --- tables ---------------------------------------------------------------------------------------------


def _lowest(document: RunDocument) -> Grid | None:
    """The devices with the lowest accuracy; None where few devices are easily compared."""
    known = [(device.accuracy, device) for device in document.devices if device.accuracy is not None]
    if len(known) <= MOST_DEVICES:
        return None
    known.sort(key=lambda entry: entry[0])
    rows = [
        (
            device.device,
            share(accuracy),
            str(device.train_samples),
            str(device.test_samples),
            str(device.rounds_that_were("accepted")),
        )
        for accuracy, device in known[:LOWEST]
    ]
    return Grid(("device", "accuracy", "training images", "test images", "rounds"), rows)


def _class_table(document: RunDocument) -> Grid | None:
    """Accuracy by class, which can be sorted; None where no device counted."""
    if not document.classes:
        return None
    values = [(entry.name, entry.accuracy, entry.images, entry.devices, taken_for(entry)) for entry in document.classes]
    rows = [
        (name, share(accuracy), str(images), str(devices), wrong) for name, accuracy, images, devices, wrong in values
    ]
    return Grid(("class", "accuracy", "test images", "devices", "taken for"), rows, values=values)


def _budgets(document: RunDocument) -> Grid | None:
    """Kept or broken, by device and kind, of many devices only broken ones; None where there is nothing to show."""
    rows = []
    for device in document.devices:
        broken = device.broken
        limits = budget_words(device.budget) if device.budget else {}
        for kind, name in BUDGETS.items():
            if kind in broken or (kind in limits and len(document.devices) <= MOST_DEVICES):
                outcome = f"broken in {times(broken[kind], 'round')}" if kind in broken else "kept"
                rows.append((device.device, name, limits.get(kind, "kept by the device alone"), outcome))
    return Grid(("device", "budget", "limit", "outcome"), rows, names=4) if rows else None


def _round_table(document: RunDocument) -> Grid:
    headings = (
        "round", "devices", "accepted", "accuracy", "lowest", "highest", "by image", "loss", "down", "up",
        "devices took", "server took",
    )  # fmt: skip
    rows = [
        (
            str(entry.round),
            str(entry.cohort),
            str(entry.accepted),
            *(
                "" if value is None else f"{value:.3f}"
                for value in (
                    entry.accuracy_mean, entry.accuracy_lowest, entry.accuracy_highest, entry.accuracy_weighted,
                    entry.train_loss,
                )
            ),
            size(entry.bytes_down),
            size(entry.bytes_up),
            "" if entry.devices_s is None else duration(entry.devices_s),
            "" if entry.server_s is None else duration(entry.server_s),
        )
        for entry in document.rounds
    ]  # fmt: skip
    return Grid(headings, rows, names=0)


def _detail_table(entries: list[tuple[RunDevice, DeviceRound]]) -> Grid:
    headings = (
        "device", "round", "outcome", "training predicted", "measured", "error", "memory predicted", "measured",
        "error", "energy", "accuracy",
    )  # fmt: skip
    return Grid(headings, [_detail_row(device, entry) for device, entry in entries])


def _detail_row(device: RunDevice, entry: DeviceRound) -> tuple[str, ...]:
    alone = RunDevice(
        device=device.device, train_samples=0, test_samples=0, accuracy=None, rounds=[entry], bytes_down=0, bytes_up=0,
        peak_rss_bytes=None,
    )  # fmt: skip
    found = {comparison.figure: comparison for comparison in alone.comparisons()}
    cells: list[str] = []
    for figure in ("training of a round", "peak memory"):
        one = found.get(figure)
        if one is None:
            cells += ["", "", ""]
        else:
            predicted = "" if one.predicted is None else quantity(one.predicted, one.unit)
            cells += [predicted, quantity(one.measured, one.unit), percent(one.relative_error)]
    energy = found.get("energy of a round")
    return (
        device.device,
        str(entry.round),
        f"{entry.status}: {entry.reason}" if entry.reason else entry.status,
        *cells,
        "" if energy is None else quantity(energy.measured, "J"),
        "" if entry.accuracy is None else f"{entry.accuracy:.3f}",
    )
