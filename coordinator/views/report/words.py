"""The report of a run in words: the verdict, and what is told of generators, features, privacy and settings."""

import json
from collections.abc import Mapping
from typing import Any

from coordinator.run_view import RunView
from coordinator.views.report.document import RunReport
from fedvit.quantities import format_count
from profiles.report.page import share
from profiles.report.verdict import BUDGETS, MOST_LINES, Verdict


def run_verdict(report: RunReport) -> Verdict:
    """Say how far the run came, which budgets were broken, which results are missing, and what was refused."""
    run = report.run
    accuracy = "not evaluated" if run.mean_accuracy is None else f"accuracy {share(run.mean_accuracy)}"
    sentence = f"{run.status}: {count_rounds(run)}, {accuracy}"
    sentence = sentence[:1].upper() + sentence[1:]
    lines = [f"why it ended: {run.reason}"] if run.reason else []
    broken = [(device, kind, rounds) for device in report.devices for kind, rounds in device.broken.items()]
    for device, kind, rounds in broken[:MOST_LINES]:
        lines.append(f"{device.device} broke its budget of {BUDGETS[kind]} in {format_count(rounds, 'round')}")
    if len(broken) > MOST_LINES:
        lines.append(f"{format_count(len({device.device for device, *_ in broken}), 'device')} broke a budget in all")
    if report.dropouts:
        lost = {entry.device for entry in report.dropouts}
        missing = sum(entry.times for entry in report.dropouts)
        lines.append(f"{format_count(missing, 'result')} of {format_count(len(lost), 'device')} never came")
    if report.refusals:
        lines.append(f"{format_count(sum(entry.times for entry in report.refusals), 'refusal')}, listed below")
    if run.status == "failed":
        return Verdict("bad", sentence, lines)
    return Verdict("mild" if lines or run.status != "finished" else "good", sentence, lines)


def count_rounds(run: RunView) -> str:
    """Say how many rounds of a run are done, or which round of an earlier run it tests."""
    if run.tested is None:
        return f"{len(run.rounds)} of {run.rounds_planned} rounds"
    return f"tests {run.tested}" + (f" after round {run.rounds[-1].round}" if run.rounds else "")


def settings_words(settings: Mapping[str, Any]) -> str:
    """Write the settings of a run in one line.

    >>> settings_words({"devices": 4, "images.flip": True}), settings_words({})
    ('settings: devices = 4, images.flip = true', 'settings: all at their defaults')
    """
    listed = ", ".join(f"{name} = {setting_words(value)}" for name, value in settings.items())
    return f"settings: {listed or 'all at their defaults'}"


def setting_words(value: Any) -> str:
    """Write a setting; a long list, such as all classes, by its length."""
    return f"{len(value)} values" if isinstance(value, list) and len(value) > 12 else json.dumps(value)


NEARLY_EQUAL = 0.01
"""Difference between devices' generated values, as a share of their size, below which a generator has no effect."""


def generator_words(run: RunView) -> list[str]:
    """Describe the method's generator in the newest round that has one."""
    newest = next((entry for entry in reversed(run.rounds) if entry.generator), None)
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


def feature_words(run: RunView) -> list[str]:
    """Describe the features that devices sent in the newest round that has some."""
    newest = next((entry for entry in reversed(run.rounds) if entry.features), None)
    if newest is None or (sent := newest.features) is None:
        return []
    line = f"{sent.features} features in {format_count(sent.uploads, 'upload')} in round {newest.round}"
    if sent.unequal:
        line += f"; {sent.unequal} with more of one class than of another, which tells their class distribution"
    return [line]


def sum_words(run: RunView) -> list[str]:
    """Describe the secure sums of a run."""
    sums = [entry.sum for entry in run.rounds if entry.sum]
    if not sums:
        return []
    sizes = sorted({added.devices for added in sums})
    size = f"{sizes[0]} to {sizes[-1]} devices" if len(sizes) > 1 else format_count(sizes[0], "device")
    left = ", ".join(f"{step} {sum(added.left[step] for added in sums)}" for step in sums[0].left)
    repeated = sum(added.attempt - 1 for added in sums)
    return [
        "secure sums of updates, images, losses and right answers; revealed of a single device: none",
        f"updates of {size} in each of {format_count(len(sums), 'sum')}; devices that left, by step: {left}; "
        f"attempts that failed: {repeated}",
    ]


def privacy_words(report: RunReport) -> list[str]:
    """Describe the privacy of a run so far, a line for each kind of noise."""
    asked = report.privacy
    if asked is None:
        return []
    lines = []
    if asked.noise_multiplier:
        epsilon = next((entry.epsilon for entry in reversed(report.run.rounds) if entry.epsilon is not None), None)
        who = "any device may have been in every round" if asked.accounting == "every_round" else "cohorts are secret"
        spent = "no round is closed yet" if epsilon is None else f"epsilon {epsilon:.3g} over all rounds so far"
        lines.append(
            f"privacy of devices' updates: {spent} (delta {asked.delta:g}, noise {asked.noise_multiplier:g} x clip "
            f"{asked.clip or 0:g}, {who})"
        )
        if (added := next((entry.sum for entry in reversed(report.run.rounds) if entry.sum), None)) and added.clip:
            lines.append(
                f"devices added the noise themselves: in the last round {added.noise_multiplier or 0:.3g} x clip "
                f"{added.clip:.3g}, as the sum had more devices than the fewest that could make one"
            )
    if asked.feature_noise:
        newest = next((entry for entry in reversed(report.run.rounds) if entry.device_epsilon is not None), None)
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
