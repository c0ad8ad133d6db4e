"""Reports for a terminal of `width` columns.

Units stand in the headings or beside the numbers; numbers are never cut or wrapped, and what does not fit is left out
as a whole column; the JSON has everything.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from profiles.report.document import ProfileDocument
from profiles.report.page import count
from profiles.report.tables import Column, Sheet
from profiles.report.verdict import BUDGETS, DevicePrediction, crosscheck_words, list_predictions, profile_verdict

STYLES = {"good": "bold green", "mild": "bold yellow", "bad": "bold red"}


def profile_report(document: ProfileDocument, width: int) -> Group:
    """Draw the verdict, the cost of the variants, and their cost per device."""
    tone, sentence, lines = profile_verdict(document)
    parts: list[RenderableType] = [Text(document.title), Text(sentence, style=STYLES[tone])]
    parts += [Text(f"  {line}") for line in lines]
    variants = Sheet(document.variants, _VARIANT_COLUMNS)
    devices = Sheet(list_predictions(document), _DEVICE_COLUMNS, unknown="not known")
    parts += [Text(), variants.draw("variants", width, optional=("bytes_down", "bytes_up"))]
    parts += [Text(), devices.draw("devices", width, optional=("energy_j", "later_train_s"))]
    checked = [crosscheck_words(document.crosscheck)] if document.crosscheck else []
    warnings = [
        *document.warnings,
        *checked,
        *(f"{entry.id}: {line}" for entry in document.devices for line in entry.warnings),
    ]
    if warnings:
        parts += [Text(), *(Text(f"note: {line}", style="dim") for line in warnings)]
    return Group(*parts)


def _find_budgets(row: DevicePrediction) -> str:
    return f"over: {', '.join(BUDGETS[kind] for kind in row.prediction.over)}" if row.prediction.over else "fits"


_VARIANT_COLUMNS = (
    Column("variant", "variant", lambda variant: variant.label),
    Column("patches", "patches\nkept", lambda variant: variant.cost.kept_patches),
    Column("parameters", "numbers\ntrained", lambda variant: count(variant.cost.parameters_trained)),
    Column("flops", "of an image\nforward", lambda variant: variant.cost.flops_forward / variant.cost.batch_size),
    Column("flops", "of an image\nbackward", lambda variant: variant.cost.flops_backward / variant.cost.batch_size),
    Column("bytes_down", "down\na round", lambda variant: variant.cost.bytes_down),
    Column("bytes_up", "up\na round", lambda variant: variant.cost.bytes_up),
)
_DEVICE_COLUMNS = (
    Column("device", "device"),
    Column("variant", "variant"),
    Column("step_s", "step", lambda row: row.prediction.step_s),
    Column("train_s", "round", lambda row: row.prediction.train_s),
    Column("later_train_s", "later\nround", lambda row: row.prediction.usual_train_s),
    Column("energy_j", "energy\na round", lambda row: row.prediction.energy_j),
    Column("peak_rss_bytes", "memory", lambda row: row.prediction.peak_rss_bytes),
    Column("budget", "budget", _find_budgets, style=lambda row: "red" if row.prediction.over else "green"),
)
