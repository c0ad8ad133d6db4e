"""The verdict of a report: one sentence, and a line for each problem."""

from typing import Literal, NamedTuple

from fedvit.resources import BudgetKind
from profiles.prediction import Prediction
from profiles.report.document import CrossCheck, ProfiledDevice, ProfileDocument

Tone = Literal["good", "mild", "bad"]

BUDGETS: dict[BudgetKind, str] = {
    "memory": "memory",
    "flops": "FLOPs",
    "time": "time",
    "upload": "upload",
    "temperature": "temperature",
}
"""Kinds of budgets in words."""


MOST_LINES = 10
"""Broken budgets that are named one by one."""


class Verdict(NamedTuple):
    tone: Tone
    sentence: str
    lines: list[str]


def profile_verdict(document: ProfileDocument) -> Verdict:
    """Pairs of device and variant that fit, and reasons why others do not."""
    pairs = len(document.devices) * len(document.variants)
    lines = []
    for device in document.devices:
        over = [prediction for prediction in device.predictions if prediction.over]
        if over:
            kinds = dict.fromkeys(BUDGETS[kind] for prediction in over for kind in prediction.over)
            all_of_them = len(over) == len(device.predictions)
            which = "no variant fits" if all_of_them else f"{len(over)} of {len(device.predictions)} do not fit"
            lines.append(f"{device_name(device)}: {which}, over its budget of {' and '.join(kinds)}")
    if document.fitting == pairs:
        return Verdict("good", "Every variant fits the budget of every device.", lines)
    if document.fitting == 0:
        return Verdict("bad", "No variant fits the budget of any device.", lines)
    return Verdict("mild", f"{document.fitting} of {pairs} pairs of device and variant fit their budgets.", lines)


def device_name(device: ProfiledDevice) -> str:
    return f"{device.id} at {device.mode}" if device.mode else device.id


class DevicePrediction(NamedTuple):
    """The predicted cost of a variant on a device."""

    device: str
    variant: str
    prediction: Prediction


def list_predictions(document: ProfileDocument) -> list[DevicePrediction]:
    """List all pairs of a device and a variant, by device."""
    return [
        DevicePrediction(device_name(device), variant.label, prediction)
        for device in document.devices
        for variant, prediction in zip(document.variants, device.predictions, strict=True)
    ]


def crosscheck_words(check: CrossCheck) -> str:
    """One sentence, for pages and terminals."""
    return (
        f"{check.tool} counts {check.macs / 1e9:.3f} GMAC for one image, {check.product_macs / 1e9:.3f} of them in "
        f"matrix products; the graph that answers has {check.ours_macs / 1e9:.3f}. Its convention: {check.convention}. "
        f"It does not count {', '.join(check.not_counted)}."
    )
