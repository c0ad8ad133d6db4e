"""The verdict of a report: one sentence, and a line for each problem."""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fedvit.resources import BudgetKind
from profiles.report.document import CrossCheck, ProfiledDevice, ProfileDocument, RunDocument
from profiles.report.page import share

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
    """Which pairs of device and variant fit, and why others do not."""
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


def run_verdict(document: RunDocument) -> Verdict:
    """How far the run came; budgets that were broken, results that are missing, and refusals."""
    reached = document.mean_accuracy
    accuracy = "not evaluated" if reached is None else f"accuracy {share(reached)}"
    sentence = f"{document.status}: {len(document.rounds)} of {document.rounds_planned} rounds, {accuracy}".capitalize()
    lines = [f"why it ended: {document.reason}"] if document.reason else []
    broken = [(device, kind, rounds) for device in document.devices for kind, rounds in device.broken.items()]
    for device, kind, rounds in broken[:MOST_LINES]:
        lines.append(f"{device.device} broke its budget of {BUDGETS[kind]} in {times(rounds, 'round')}")
    if len(broken) > MOST_LINES:
        lines.append(f"{times(len({device.device for device, *_ in broken}), 'device')} broke a budget in all")
    if document.dropouts:
        lost = {entry.device for entry in document.dropouts}
        missing = sum(entry.times for entry in document.dropouts)
        lines.append(f"{times(missing, 'result')} of {times(len(lost), 'device')} never came")
    if document.refusals:
        lines.append(f"{times(sum(entry.times for entry in document.refusals), 'refusal')}, listed below")
    if document.status == "failed":
        return Verdict("bad", sentence, lines)
    return Verdict("mild" if lines or document.status != "finished" else "good", sentence, lines)


def settings_words(settings: Mapping[str, Any]) -> str:
    """
    >>> settings_words({"devices": 4, "images.flip": True}), settings_words({})
    ('settings: devices = 4, images.flip = true', 'settings: all at their defaults')
    """
    listed = ", ".join(f"{name} = {setting_words(value)}" for name, value in settings.items())
    return f"settings: {listed or 'all at their defaults'}"


def setting_words(value: Any) -> str:
    """A long list, as of all classes, by its length."""
    return f"{len(value)} values" if isinstance(value, list) and len(value) > 12 else json.dumps(value)


NEARLY_EQUAL = 0.01
"""Difference between devices' generated values, as a share of their size, below which a generator has no effect."""


def generator_words(document: RunDocument) -> list[str]:
    """The state of a method's generator in the newest round that has one."""
    newest = next((entry for entry in reversed(document.rounds) if entry.generator), None)
    if newest is None or newest.generator is None:
        return []
    difference = newest.generator.difference
    lines = [f"generated values differ between devices by {difference:.2g} of their size in round {newest.round}"]
    if difference < NEARLY_EQUAL:
        lines[0] += ": the generator makes nearly the same for all devices"
    if (attention := newest.generator.attention) is not None:
        lines.append(
            f"entropy of the generator's attention: {attention.mean:.2f} of its maximum in the mean over devices "
            f"({attention.lowest:.2f} to {attention.highest:.2f}); 0 is a single key"
        )
    return lines


def feature_words(document: RunDocument) -> list[str]:
    """The features that devices sent in the newest round that has some."""
    newest = next((entry for entry in reversed(document.rounds) if entry.features), None)
    if newest is None or (sent := newest.features) is None:
        return []
    line = f"{sent.features} features in {times(sent.uploads, 'upload')} in round {newest.round}"
    if sent.unequal:
        line += f"; {sent.unequal} with more of one class than of another, which tells their class distribution"
    return [line]


def privacy_words(document: RunDocument) -> list[str]:
    """The privacy of a run so far, a line for each kind of noise."""
    asked = document.privacy
    if asked is None:
        return []
    lines = []
    if asked.noise_multiplier:
        epsilon = next((entry.epsilon for entry in reversed(document.rounds) if entry.epsilon is not None), None)
        who = "any device may have been in every round" if asked.accounting == "every_round" else "cohorts are secret"
        spent = "no round is closed yet" if epsilon is None else f"epsilon {epsilon:.3g} over all rounds so far"
        lines.append(
            f"privacy of devices' updates: {spent} (delta {asked.delta:g}, noise {asked.noise_multiplier:g} x clip "
            f"{asked.clip or 0:g}, {who})"
        )
    if asked.feature_noise:
        newest = next((entry for entry in reversed(document.rounds) if entry.device_epsilon is not None), None)
        spent = "no round is closed yet"
        if newest is not None:
            spent = (
                f"epsilon {newest.device_epsilon:.3g} over all rounds so far, {newest.upload_epsilon or 0:.3g} in the "
                f"last one, {newest.row_epsilon or 0:.3g} of a single row"
            )
        lines.append(
            f"privacy of one device's features: {spent} (delta {asked.delta:g}, noise {asked.feature_noise:g} x clip "
            f"{asked.feature_clip or 0:g})"
        )
    if asked.deterministic_noise:
        lines.append("deterministic noise: every device knows the seed that it follows from; it protects nobody")
    return lines


def device_name(device: ProfiledDevice) -> str:
    return f"{device.id} at {device.mode}" if device.mode else device.id


def times(number: int, what: str) -> str:
    """
    >>> times(1, "round"), times(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def crosscheck_words(check: CrossCheck) -> str:
    """One sentence, for pages and terminals."""
    return (
        f"{check.tool} counts {check.macs / 1e9:.3f} GMAC for one image, {check.product_macs / 1e9:.3f} of them in "
        f"matrix products; the graph that answers has {check.ours_macs / 1e9:.3f}. Its convention: {check.convention}. "
        f"It does not count {', '.join(check.not_counted)}."
    )
