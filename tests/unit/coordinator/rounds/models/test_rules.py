"""The rules of promotion, with counts of all kinds and with those of real small models."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from coordinator.config import PromoteConfig
from coordinator.record.tables import DeviceModelRecord
from coordinator.rounds.models import rules
from coordinator.rounds.models.rules import Wanted
from fedvit.comparison import Comparison
from fedvit.wire.messages import WantedState

RULES = PromoteConfig()
COUNTS = st.builds(Comparison, *(st.integers(0, 300) for _ in range(4)))
SEEDS = 20


def on(device: str, compared: Comparison | None = None, *, paired: bool = True, **values: object) -> DeviceModelRecord:
    settings: dict[str, object] = {"model": "r-2", "device": device, "comparison": compared, "paired": paired, **values}
    return DeviceModelRecord(**settings)  # type: ignore[arg-type]


# --- the fleet and single devices ---------------------------------------------------------------------


@given(COUNTS, st.integers(0, 300))
def test_a_better_challenger_is_never_refused_where_a_worse_one_passes(compared: Comparison, more: int) -> None:
    """Images that only the challenger answers right in place of those that nobody does make it no worse."""
    moved = min(more, compared.neither)
    better = Comparison(
        compared.both, compared.only_challenger + moved, compared.only_champion, compared.neither - moved
    )
    if rules.judge(compared, RULES).passes:
        assert rules.judge(better, RULES).passes


@given(COUNTS)
def test_promoted_challenger_was_right_more_often(compared: Comparison) -> None:
    verdict = rules.judge(compared, RULES)
    if verdict.passes:
        assert compared.only_challenger > compared.only_champion
        assert compared.images >= RULES.min_images
        assert not rules.is_worse(compared, RULES)


@given(COUNTS, st.integers(2, 100))
def test_first_model_is_clearly_better_than_chance(alone: Comparison, classes: int) -> None:
    alone = Comparison(0, alone.only_challenger, 0, alone.neither)
    if rules.judge_first(alone, classes, RULES).passes:
        assert alone.challenger_accuracy > 1 / classes + rules.FIRST_MARGIN * (1 - 1 / classes)


def test_devices_with_a_champion_and_those_without_are_judged_apart() -> None:
    """A device where the challenger is surely worse keeps its model."""
    good, bad = Comparison(60, 30, 5, 5), Comparison(20, 0, 40, 40)
    rows = [on(f"d{number}", good) for number in range(9)]
    rows += [on("worse", bad), on("new", Comparison(0, 15, 0, 85), paired=False), on("silent")]
    selected = rules.select_devices(rows, 10, RULES)
    assert selected.devices == [f"d{number}" for number in range(9)]
    assert "1 keep theirs" in selected.reason
    assert selected.score is not None
    assert (selected.score.images, selected.score.champion) == (1000, pytest.approx(0.645))
    first = rules.select_devices([on("new", Comparison(0, 70, 0, 30), paired=False)], 10, RULES)
    assert first.devices == ["new"]
    assert rules.select_devices([on("silent")], 10, RULES) == ([], None, "no device has compared it")


def test_too_few_images_promote_nothing() -> None:
    assert not rules.judge(Comparison(0, 49, 0, 0), RULES).passes
    assert rules.judge(Comparison(0, 50, 0, 0), RULES).passes
    assert not rules.judge_first(Comparison(0, 49, 0, 0), 2, RULES).passes


# --- canaries -----------------------------------------------------------------------------------------


def test_canaries_are_chosen_by_labels_and_share() -> None:
    rows = [on(f"d{number}", labels={"site": "berlin" if number < 4 else "rome"}) for number in range(6)]
    devices = [row.device for row in rows if row.device != "d0"]
    berlin = PromoteConfig(canary="site=berlin")
    assert rules.select_canaries(rows, devices, {}, berlin) == ["d1", "d2", "d3"]
    assert rules.select_canaries(rows, devices, {"d5": {"site": "berlin"}}, berlin)[-1] == "d5"
    assert rules.select_canaries(rows, devices, {}, PromoteConfig(canary="site=berlin", canary_share=0.5)) == [
        "d1",
        "d2",
    ]
    assert rules.select_canaries(rows, devices, {}, PromoteConfig(canary_share=0.01)) == ["d1"]
    assert rules.select_canaries(rows, devices, {}, PromoteConfig(canary="site=oslo")) == []


def test_canary_passes_after_its_time_if_a_device_uses_it() -> None:
    canary = [on("a", actual="canary"), on("b", actual="challenger")]
    short = PromoteConfig(after="10m")
    assert rules.judge_canary(canary, {}, None, short)[0] == "waits"
    assert rules.judge_canary(canary, {}, 599.0, short)[0] == "waits"
    assert rules.judge_canary(canary, {}, 600.0, short)[0] == "passes"
    assert rules.judge_canary(canary[1:], {}, 600.0, short)[0] == "waits"


def test_canary_fails_by_a_device_that_stopped_it_or_by_its_confidence() -> None:
    failed = on("a", actual="former", failed=True, reason="it ended 3 times")
    assert rules.judge_canary([failed, on("b", actual="canary")], {}, 1e9, RULES) == ("fails", "a: it ended 3 times")
    before = on("a", answered=100, confidence=90.0)
    for answered, confidence, outcome in ((100, 60.0, "fails"), (100, 86.0, "passes"), (49, 10.0, "passes")):
        row = on("a", actual="canary", answered=answered, confidence=confidence)
        assert rules.judge_canary([row], {"a": before}, 1e9, RULES)[0] == outcome
    much = on("a", answered=10_000, confidence=9000.0)
    for confidence, outcome in ((8400.0, "fails"), (8600.0, "passes")):  # max_worse is 0.05
        row = on("a", actual="canary", answered=10_000, confidence=confidence)
        assert rules.judge_canary([row], {"a": much}, 1e9, RULES)[0] == outcome
    few = on("a", answered=49, confidence=49.0)
    assert rules.judge_canary([on("a", actual="canary", answered=100, confidence=10.0)], {"a": few}, 1e9, RULES)[0] == (
        "passes"
    )


def test_a_confidence_that_cannot_be_does_not_end_the_judging() -> None:
    """A device may report any sum; the sum of an honest one may be a little above its pictures, by rounding."""
    before = on("a", answered=100, confidence=2.0**31)
    for confidence, outcome in ((2.0**31, "passes"), (100.00001, "passes"), (50.0, "fails")):
        row = on("a", actual="canary", answered=100, confidence=confidence)
        assert rules.judge_canary([row], {"a": before}, 1e9, RULES)[0] == outcome


@pytest.mark.parametrize("pictures", [50, 200, 2000])
def test_a_canary_that_is_no_worse_does_not_fail_by_chance(pictures: int) -> None:
    """It is judged after each of its pictures; confidences are 0.8 on average, with a deviation of 0.2."""
    draw = np.random.default_rng(pictures)
    failed = 0
    for _ in range(200):
        before = on("a", answered=pictures, confidence=float(draw.beta(2.4, 0.6, pictures).sum()))
        for count, total in enumerate(np.cumsum(draw.beta(2.4, 0.6, 1000)), start=1):
            if rules.find_fall(on("a", answered=count, confidence=float(total)), before, RULES):
                failed += 1
                break
    assert failed <= 1


# --- wanted states ------------------------------------------------------------------------------------

STATES: list[WantedState] = ["canary", "champion", "former", "retired"]
MODELS = st.sampled_from(["a-1", "b-2", "c-3", "d-4"])


@given(st.lists(st.tuples(st.sampled_from(["canary", "champion", "back"]), MODELS), max_size=12))
def test_device_never_is_to_have_two_champions_or_canaries(acts: list[tuple[str, str]]) -> None:
    wanted: Wanted = {}
    change = {"canary": rules.want_canary, "champion": rules.want_champion, "back": rules.want_back}
    promoted: set[str] = set()
    for act, model in acts:
        wanted = change[act](wanted, model)
        promoted |= {model} if act != "back" else set()
        values = list(wanted.values())
        assert all(values.count(state) <= 1 for state in ("canary", "champion", "former"))
        assert {name for name, state in wanted.items() if state in ("canary", "champion")} <= promoted
        if act == "champion":
            assert wanted[model] == "champion"
            assert "canary" not in values
        if act == "back" and wanted[model] != "retired":
            assert wanted[model] == "champion"
            assert "former" not in values


def test_stage_of_a_model_is_the_furthest_of_its_devices() -> None:
    assert rules.find_stage([]) == "challenger"
    assert rules.find_stage([on("a"), on("b", wanted="retired")]) == "challenger"
    assert rules.find_stage([on("a", wanted="retired")]) == "retired"
    assert rules.find_stage([on("a", wanted="canary"), on("b", wanted="former")]) == "canary"
    assert rules.find_stage([on("a", wanted="canary"), on("b", wanted="champion")]) == "champion"


# --- real models --------------------------------------------------------------------------------------


class Digits:
    """Pictures of digits, of which 600 train and the others are the test images of six devices."""

    def __init__(self, seed: int) -> None:
        pictures, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        self.pictures = torch.tensor(pictures[order] / 16.0, dtype=torch.float32)
        self.labels = torch.tensor(labels[order])
        self.seed = seed

    def train(self, count: int, *, shuffled: bool = False) -> torch.nn.Module:
        """Train a small model on the first images; with `shuffled` labels it learns nothing that holds elsewhere."""
        torch.manual_seed(self.seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        labels = self.labels[:count]
        if shuffled:
            labels = labels[torch.randperm(count)]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(self.pictures[:count]), labels).backward()
            optimizer.step()
        return model

    def compare(self, challenger: torch.nn.Module, champion: torch.nn.Module | None) -> list[DeviceModelRecord]:
        """Count right answers of both models on the test images of each device."""
        rows = []
        for number, places in enumerate(np.array_split(np.arange(600, len(self.labels)), 6)):
            images, labels = self.pictures[places], self.labels[places]
            new = challenger(images).argmax(dim=1) == labels
            old = champion(images).argmax(dim=1) == labels if champion else torch.zeros_like(new)
            counts = ((new & old), (new & ~old), (~new & old), (~new & ~old))
            compared = Comparison(*(int(each.sum()) for each in counts))
            rows.append(on(f"d{number}", compared, paired=champion is not None))
        return rows


def test_poisoned_challenger_is_never_promoted() -> None:
    """Over 20 seeds, by devices with a champion and by those without; an honest challenger is, each time."""
    promoted, honest = [], []
    for seed in range(SEEDS):
        digits = Digits(seed)
        poisoned, champion = digits.train(600, shuffled=True), digits.train(60)
        for rival in (champion, None):
            promoted += rules.select_devices(digits.compare(poisoned, rival), 10, RULES).devices
        selected = rules.select_devices(digits.compare(digits.train(600), champion), 10, RULES)
        honest.append(len(selected.devices))
    assert promoted == []
    assert min(honest) == 6
