"""The rules of promotion: functions of counts, reports and times alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from coordinator.config import PromoteConfig, why_not_asked
from coordinator.record.tables import DeviceModelRecord, ModelStage
from fedvit.comparison import Comparison, ScoreInterval
from fedvit.wire.messages import WantedState

FALL_DEVIATIONS = 4.0
"""Standard deviations that a fall of the mean confidence must exceed: canaries are judged again and again."""
FIRST_MARGIN = 0.1
"""A device's first model must be better than chance by this share of what lies between chance and 1."""


class Score(NamedTuple):
    """The numbers of a decision."""

    challenger: float  # accuracy
    champion: float | None  # None: there is none
    images: int
    interval: ScoreInterval  # of the gain, or without a champion of the accuracy


class Judgement(NamedTuple):
    """The decision on devices that have a champion, or on those that have none."""

    passes: bool
    score: Score
    reason: str


def judge(compared: Comparison, rules: PromoteConfig) -> Judgement:
    """Decide whether a challenger replaces champions; `compared`: the counts of all devices with one."""
    gain = compared.gain_interval()
    score = Score(compared.challenger_accuracy, compared.champion_accuracy, compared.images, gain)
    if compared.images < rules.min_images:
        return Judgement(False, score, f"{compared.images} test images, min_images = {rules.min_images}")
    where = f"gain {compared.gain:+.3f}, 95 % between {gain.low:+.3f} and {gain.high:+.3f}"
    if gain.low <= rules.min_gain:
        return Judgement(False, score, f"{where}: not above min_gain = {rules.min_gain:g}")
    return Judgement(True, score, where)


def judge_first(alone: Comparison, classes: int, rules: PromoteConfig) -> Judgement:
    """Decide whether devices without a champion use a challenger: it must be clearly better than chance."""
    interval = alone.challenger_interval()
    score = Score(alone.challenger_accuracy, None, alone.images, interval)
    if alone.images < rules.min_images:
        return Judgement(False, score, f"{alone.images} test images, min_images = {rules.min_images}")
    chance = 1 / max(2, classes)
    least = chance + FIRST_MARGIN * (1 - chance) + min(0.0, rules.min_gain)
    where = f"accuracy {alone.challenger_accuracy:.3f}, 95 % between {interval.low:.3f} and {interval.high:.3f}"
    if interval.low <= least:
        return Judgement(False, score, f"{where}: not above {least:.3f}, chance is {chance:.3f}")
    return Judgement(True, score, f"{where}; a first model")


def is_worse(compared: Comparison, rules: PromoteConfig) -> bool:
    """Return whether a challenger is surely worse on one device, and by more than it may be."""
    return compared.gain < -rules.max_worse and compared.gain_interval().high < 0


class Selection(NamedTuple):
    """The devices that may use a challenger, and why."""

    devices: list[str]
    score: Score | None  # of the larger group of devices; None: nobody compared
    reason: str


def select_devices(rows: Iterable[DeviceModelRecord], classes: int, rules: PromoteConfig) -> Selection:
    """Decide on which devices a challenger may be used; devices with a champion and those without are two groups."""
    compared = [row for row in rows if row.comparison]
    paired, alone = [row for row in compared if row.paired], [row for row in compared if not row.paired]
    verdicts = []
    if paired:
        verdicts.append((paired, judge(add_up(paired), rules)))
    if alone:
        verdicts.append((alone, judge_first(add_up(alone), classes, rules)))
    if not verdicts:
        return Selection([], None, "no device has compared it")
    devices = [
        row.device
        for group, verdict in verdicts
        if verdict.passes
        for row in group
        if row.comparison and not (row.paired and is_worse(row.comparison, rules))
    ]
    kept = sum(len(group) for group, verdict in verdicts if verdict.passes) - len(devices)
    reasons = [verdict.reason for _, verdict in verdicts]
    if kept:
        reasons.append(f"{kept} keep theirs: it is worse there")
    _, largest = max(verdicts, key=lambda verdict: verdict[1].score.images)
    return Selection(sorted(devices), largest.score, "; ".join(reasons))


def add_up(rows: Iterable[DeviceModelRecord]) -> Comparison:
    """Add up the counts of devices."""
    return sum((row.comparison for row in rows if row.comparison), Comparison())


def select_canaries(
    rows: Iterable[DeviceModelRecord],
    allowed: Sequence[str],
    labels: Mapping[str, Mapping[str, str]],
    rules: PromoteConfig,
) -> list[str]:
    """Choose the devices that use a challenger first; `labels`: those that an operator set, by device."""
    matching = sorted(
        row.device
        for row in rows
        if row.device in allowed and why_not_asked(rules.canary, {**row.labels, **labels.get(row.device, {})}) is None
    )
    return matching[: math.ceil(rules.canary_share * len(matching) - 1e-9)]


Outcome = Literal["waits", "passes", "fails"]


def judge_canary(
    canaries: Sequence[DeviceModelRecord],
    champions: Mapping[str, DeviceModelRecord],
    since_s: float | None,
    rules: PromoteConfig,
) -> tuple[Outcome, str]:
    """Decide on a canary; `champions`: the models that the canary devices used before, by device.

    `since_s`: seconds since the first device used it; None: no device has.
    """
    for row in canaries:
        if row.failed:
            return "fails", f"{row.device}: {row.reason}"
        before = champions.get(row.device)
        if before and (fell := find_fall(row, before, rules)):
            return "fails", f"{row.device}: {fell}"
    serving = [row.device for row in canaries if row.actual == "canary"]
    if since_s is None or not serving or since_s < rules.after_s():
        return "waits", ""
    pictures = sum(row.answered for row in canaries)
    where = f"canary on {len(serving)} of {len(canaries)} devices for {since_s:.0f} s"
    return "passes", f"{where}, {pictures} pictures answered"


def find_fall(row: DeviceModelRecord, before: DeviceModelRecord, rules: PromoteConfig) -> str | None:
    """Return the words for a mean confidence that fell too far; None if it may be chance, or pictures are too few.

    A confidence lies between 0 and 1, so that its variance is at most mean * (1 - mean).
    """
    now, then = row.mean_confidence, before.mean_confidence
    if now is None or then is None or min(row.answered, before.answered) < rules.min_images:
        return None
    chance = math.sqrt(now * (1 - now) / row.answered + then * (1 - then) / before.answered)
    if now >= then - max(rules.max_worse, FALL_DEVIATIONS * chance):
        return None
    return f"mean confidence {now:.3f} over {row.answered} pictures, {then:.3f} with {before.model}"


# --- wanted states ------------------------------------------------------------------------------------

Wanted = dict[str, WantedState]
"""The wanted states of the models of one device, by model."""


def want_canary(wanted: Mapping[str, WantedState], model: str) -> Wanted:
    """Return the wanted states of a device whose canary is to be this model.

    >>> want_canary({"a-1": "champion", "b-2": "canary"}, "c-3")
    {'a-1': 'champion', 'b-2': 'retired', 'c-3': 'canary'}
    """
    changed: Wanted = {name: "retired" if state == "canary" else state for name, state in wanted.items()}
    return {**changed, model: "canary"}


def want_champion(wanted: Mapping[str, WantedState], model: str) -> Wanted:
    """Return the wanted states of a device whose champion is to be this model.

    >>> want_champion({"a-1": "former", "b-2": "champion", "c-3": "canary"}, "c-3")
    {'a-1': 'retired', 'b-2': 'former', 'c-3': 'champion'}
    """
    if wanted.get(model) == "champion":
        return {name: "retired" if state == "canary" else state for name, state in wanted.items()}
    has_champion = "champion" in wanted.values()
    changed: Wanted = {}
    for name, state in wanted.items():
        if state == "champion":
            changed[name] = "former"
        elif state == "canary" or (state == "former" and has_champion):
            changed[name] = "retired"
        else:
            changed[name] = state
    return {**changed, model: "champion"}


def want_back(wanted: Mapping[str, WantedState], model: str) -> Wanted:
    """Return the wanted states of a device that is to stop using a model: its former champion is used again.

    Without a former one nothing changes: the device goes on to answer.

    >>> want_back({"a-1": "former", "b-2": "champion"}, "b-2")
    {'a-1': 'champion', 'b-2': 'retired'}
    >>> want_back({"a-1": "champion"}, "a-1")
    {'a-1': 'champion'}
    """
    if wanted.get(model) != "champion":
        return {**wanted, model: "retired"}
    if "former" not in wanted.values():
        return dict(wanted)
    changed: Wanted = {name: "champion" if state == "former" else state for name, state in wanted.items()}
    return {**changed, model: "retired"}


def find_stage(rows: Iterable[DeviceModelRecord]) -> ModelStage:
    """Return the state of a model in the fleet: the furthest that a device is to have."""
    wanted = {row.wanted for row in rows}
    for stage in ("champion", "canary", "former"):
        if stage in wanted:
            return stage
    return "challenger" if None in wanted or not wanted else "retired"
