"""From a run's record to its report: a record made by hand."""

import io
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from coordinator.config import make_config
from coordinator.record.record import Record, open_record
from coordinator.record.tables import SUM, DeviceTotals, RefusalRecord, SavedState, TaskRecord
from coordinator.run_view import FeatureRound, view_device
from coordinator.views.report.classes import class_sheet
from coordinator.views.report.document import (
    ClassAccuracy,
    DeviceReport,
    DeviceRound,
    RunPrivacy,
    RunReport,
    encode_report,
    read_report,
)
from coordinator.views.report.page import run_page
from coordinator.views.report.words import feature_words
from coordinator.views.terminal import draw_report, draw_run
from fedvit.errors import ConfigError
from fedvit.label_forms import TaskName
from fedvit.resources import Budget, ResourceUse
from fedvit.wire.messages import ClassCount, Result
from profiles.prediction import Expected
from tests.support.codes import has_code
from tests.support.records import SUM_LINES, add_result, make_summed_run
from tests.support.reports import cost, prediction, run_report

RUN = "20261122-eftvit"


@pytest.fixture
def store(runs: Path) -> Iterator[Record]:
    """Two closed rounds and an open one. In round 1 c came too late; in round 2 b's result was refused."""
    made = open_record(runs)
    made.runs.create(RUN, {"method": "eftvit", "model": "vit_base_patch16_224", "seed": 3, "rounds": 5})
    made.runs.update(RUN, status="running", classes=["ant", "bee"], protocol="p")

    def trained(number: int, device: str, **use: Any) -> None:
        add_result(made, device, Result(RUN, number, "train", 20, {"loss": 1.5}, ResourceUse(**use)))

    made.rounds.open(RUN, 1, ["a", "b", "c"])
    trained(1, "a", step_s=2.0, train_s=20.0, energy_j=90.0, energy_source="INA3221", peak_rss_bytes=5 * 10**8)
    trained(1, "b", step_s=4.0, train_s=40.0, throttled=True, broke=("time",))
    add_result(made, "a", Result(RUN, 1, "evaluate", 10, {"correct": 9.0}, ResourceUse()))
    add_result(made, "b", Result(RUN, 1, "evaluate", 10, {"correct": 5.0}, ResourceUse()))
    made.devices.add_refusal(RUN, RefusalRecord(1, "c", "train", "no result: deadline", lost=True))
    made.devices.add_refusal(RUN, RefusalRecord(1, "c", "evaluate", "no result: offline", lost=True))
    made.rounds.close(RUN, 1, SavedState({}, None, {}), {"devices_s": 41.0, "server_s": 2.0})
    made.rounds.close_evaluation(RUN, 1)
    made.rounds.open(RUN, 2, ["a", "b"])
    trained(2, "a", step_s=3.0, train_s=30.0)
    for _ in range(2):
        made.devices.add_refusal(RUN, RefusalRecord(2, "b", "train", "'head.bias' holds [3] values that are NaN"))
    made.rounds.close(RUN, 2, SavedState({}, None, {}), {})
    made.rounds.open(RUN, 3, ["a", "c"])
    trained(3, "a", step_s=2.0, train_s=20.0)
    made.devices.add_refusal(RUN, RefusalRecord(None, "x", "hello", "unknown class 'wasp'"))
    yield made
    made.close()


def device(report: RunReport, name: str) -> DeviceReport:
    return next(entry for entry in report.devices if entry.device == name)


def test_what_became_of_every_task(store: Record) -> None:
    """c has not answered round 3, which is open: that is no dropout yet."""
    report = read_report(store, RUN)
    found = {entry.device: [(one.round, one.status, one.reason) for one in entry.rounds] for entry in report.devices}
    assert found == {
        "a": [(1, "accepted", None), (2, "accepted", None), (3, "accepted", None)],
        "b": [(1, "accepted", None), (2, "refused", "'head.bias' holds [3] values that are NaN")],
        "c": [(1, "dropped out", "no result: deadline")],
    }


def test_figures_of_the_run(store: Record) -> None:
    """Accuracies .9 and .5; round 2 was not evaluated."""
    report = read_report(store, RUN)
    first, second, _ = report.run.rounds
    assert (first.accuracy_lowest, first.accuracy_mean, first.accuracy_highest) == (0.5, pytest.approx(0.7), 0.9)
    assert (first.devices_s, first.server_s) == (41.0, 2.0)
    assert (second.accuracy_mean, second.accuracy_lowest, second.devices_s) == (None, None, None)
    assert report.run.mean_accuracy == pytest.approx(0.7)
    assert (report.run.method, report.run.status, report.run.rounds_planned) == ("eftvit", "running", 5)
    assert device(report, "b").rounds[0].accuracy == 0.5
    assert device(report, "b").broken == {"time": 1}
    assert device(report, "a").comparisons()[0].measured == 2.0


def test_refusals_and_dropouts_are_counted_apart(store: Record) -> None:
    report = read_report(store, RUN)
    assert [(entry.device, entry.times) for entry in report.refusals] == [("b", 2), ("x", 1)]
    assert [(entry.device, entry.kind) for entry in report.dropouts] == [("c", "train"), ("c", "evaluate")]


def test_what_was_expected_stands_beside_it(store: Record) -> None:
    one = cost(0.75, 2)
    expected = Expected(
        prediction=prediction(one, "rpi5-8"), flops=one.flops_round, bytes_down=1, bytes_up=2,
        budget=Budget(memory_bytes=10**9),
    )  # fmt: skip
    store.tasks.add(RUN, [TaskRecord(1, "a", "blake3:" + "5" * 64, {}, expected)])
    report = read_report(store, RUN)
    entry = device(report, "a").rounds[0]
    assert entry.expected == expected
    assert device(report, "a").rounds[1].expected is None
    assert device(report, "a").budget == Budget(memory_bytes=10**9)
    step = device(report, "a").comparisons()[0]
    assert (step.predicted, step.measured) == (expected.prediction.step_s, 2.0)
    assert report.warnings[0].startswith("Some predictions use the catalogue's speeds")


def test_report_shows_what_features_tell_of_class_distributions(runs: Path) -> None:
    """In round 2 one of two uploads had more features of one class than of another."""
    with open_record(runs) as made:
        made.runs.create(RUN, {"method": "eftvit", "model": "vit_base_patch16_224", "seed": 3, "rounds": 2})
        for number, unequal in ((1, 0.0), (2, 1.0)):
            made.rounds.open(RUN, number, ["a", "b"])
            for name in ("a", "b"):
                add_result(made, name, Result(RUN, number, "train", 20, {"loss": 1.5}, ResourceUse()))
            figures = {"uploaded_features": 12.0, "unequal_uploads": unequal}
            made.rounds.close(RUN, number, SavedState({}, None, {}), figures)
        report = read_report(made, RUN)
    assert [entry.features for entry in report.run.rounds] == [
        FeatureRound(uploads=2, features=12, unequal=n) for n in (0, 1)
    ]
    [line] = feature_words(report.run)
    assert line.startswith("12 features in 2 uploads in round 2; 1 with more of one class")
    assert line in run_page(report)


def test_report_and_show_describe_secure_sums(tmp_path: Path) -> None:
    """Sizes, devices that left by step, failed attempts; and no number of a single device."""
    with closing(make_summed_run(tmp_path)) as made:
        report = read_report(made, made.runs.read_all()[0].id)
    assert [(entry.sum.devices, entry.sum.attempt, entry.sum.clipped) for entry in report.run.rounds if entry.sum] == [
        (10, 1, 3), (12, 2, 0),
    ]  # fmt: skip
    page, console = run_page(report), Console(file=io.StringIO(), width=200)
    console.print(draw_run(report.run, 200), draw_report(report, 200))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for line in SUM_LINES:
        assert line in page
        assert shown.count(line) == 2
    document = msgspec.json.decode(encode_report(report))
    assert [entry["sum"]["left"] for entry in document["rounds"]] == [
        {"keys": 0, "shares": 1, "masked": 1, "agree": 0, "reveal": 0},
        {"keys": 0, "shares": 0, "masked": 0, "agree": 0, "reveal": 2},
    ]
    assert [entry.accepted for entry in report.run.rounds] == [12, 12]
    assert SUM not in {one.device for one in report.devices}


@pytest.mark.parametrize(("load_per_core", "warns"), [(None, False), (0.1, False), (4.0, True)])
def test_report_says_whose_speed_was_measured_on_a_busy_machine(
    store: Record, load_per_core: float | None, warns: bool
) -> None:
    """A speed of another program's leftovers makes predictions too long; the figure alone would look like a fault."""
    one = cost(0.75, 2)
    predicted = msgspec.structs.replace(prediction(one, "rpi5-8"), device="a", load_per_core=load_per_core)
    expected = Expected(prediction=predicted, flops=one.flops_round, bytes_down=1, bytes_up=2, budget=Budget())
    store.tasks.add(RUN, [TaskRecord(1, "a", "blake3:" + "5" * 64, {}, expected)])
    warnings = read_report(store, RUN).warnings
    assert any("the speed of a was measured" in warning for warning in warnings) == warns


def test_report_warns_of_missing_measurements(store: Record) -> None:
    assert read_report(store, RUN).warnings == [
        "b was throttled in 1 of 1 rounds.",
        "Energy was not measured on b.",
    ]


def test_answers_by_class_are_added_up(store: Record) -> None:
    """Round 1 is the newest evaluation; b has no test image of the second class, and c does not count."""
    assert read_report(store, RUN).classes == []
    counts = {
        "a": (ClassCount(0, 4, 5, ((1, 1),)), ClassCount(1, 5, 5)), "b": (ClassCount(0, 5, 10, ((1, 5),)),), "c": (),
    }  # fmt: skip
    for name, by_class in counts.items():
        store.tasks.drop_result(RUN, 1, "evaluate", name)
        right = float(sum(count.correct for count in by_class))
        add_result(store, name, Result(RUN, 1, "evaluate", 10, {"correct": right}, ResourceUse(), by_class=by_class))
    assert read_report(store, RUN).classes == [
        ClassAccuracy(name="ant", devices=2, images=15, correct=9, wrong={"bee": 6}),
        ClassAccuracy(name="bee", devices=1, images=5, correct=5),
    ]
    store.runs.update(RUN, config={**store.runs.read(RUN).config, "task": "segmentation"})
    assert {entry.task for entry in read_report(store, RUN).classes} == {"segmentation"}


@pytest.mark.parametrize(
    ("task", "headings"),
    [
        ("classification", ("accuracy", "test images")),
        ("multi_label", ("found", "test images")),
        ("segmentation", ("accuracy", "test patches")),
    ],
)
def test_headings_of_classes_are_those_of_the_task(task: TaskName, headings: tuple[str, str]) -> None:
    sheet = class_sheet([ClassAccuracy(name="ant", devices=1, images=4, correct=3, task=task)])
    assert tuple(column.heading for column in sheet.columns)[1:3] == headings


def test_duration_is_from_the_first_round_to_the_newest_closed_one(store: Record) -> None:
    rounds = store.rounds.read_all(RUN)
    begin, end = (datetime.fromisoformat(at) for at in (rounds[0].opened_at, rounds[1].closed_at or ""))
    assert read_report(store, RUN).duration_s == (end - begin).total_seconds()


def test_an_unknown_run_is_named(store: Record) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1601", "'nope'")):
        read_report(store, "nope")


def test_what_was_spent_of_privacy_by_round(tmp_path: Path, store: Record) -> None:
    """The report repeats the record; a run without noise has no such part."""
    with open_record(tmp_path / "private") as made:
        asked = {"noise_multiplier": 2.0, "clip": 0.5, "delta": 1e-3, "accounting": "sampled"}
        private = make_config({"method": "fedavg", "devices": 4, "privacy": asked}, "test").run
        made.runs.create(RUN, msgspec.to_builtins(private))
        made.rounds.open(RUN, 1, ["a"])
        made.rounds.close(RUN, 1, SavedState({}, None, {}), {"dp_epsilon": 3.5})
        report = read_report(made, RUN)
    assert report.privacy == RunPrivacy(noise_multiplier=2.0, clip=0.5, delta=1e-3, accounting="sampled")
    [entry] = report.run.rounds
    assert (entry.epsilon, entry.device_epsilon) == (3.5, None)
    assert read_report(store, RUN).privacy is None


def device_of(*rounds: DeviceRound) -> DeviceReport:
    return DeviceReport(totals=view_device("pi", DeviceTotals()), rounds=list(rounds))


def entry(number: int, measured: ResourceUse | None) -> DeviceRound:
    status = "accepted" if measured else "dropped out"
    return DeviceRound(round=number, status=status, expected=None, measured=measured, accuracy=None)


def test_medians_skip_what_was_not_measured() -> None:
    """Steps of 1, 9 and 2 s: 2; one round without, one that dropped out. Energy was never measured: no such line."""
    steps = (1.0, 9.0, None, 2.0)
    rounds = [entry(number, ResourceUse(step_s=step)) for number, step in enumerate(steps)]
    found = {one.figure: one for one in device_of(*rounds, entry(9, None)).comparisons()}
    assert found["step"].measured == 2.0
    assert found["step"].predicted is None
    assert "energy of a round" not in found


def test_broken_budgets_are_counted_by_kind() -> None:
    """Time in two rounds, memory in one."""
    one = device_of(
        entry(1, ResourceUse(broke=("time",))), entry(2, ResourceUse(broke=("memory", "time"))), entry(3, None)
    )
    assert one.broken == {"time": 2, "memory": 1}
    assert one.budget is None
    assert one.count_rounds("dropped out") == 1


def test_the_newest_budget_counts() -> None:
    report = run_report()
    assert report.devices[0].budget == Budget(memory_bytes=10**9, round_deadline_s=1000.0)


@pytest.mark.parametrize("predicted", [True, False])
def test_json_has_the_fields_of_the_schema(predicted: bool) -> None:
    """Keys that readers depend on: none is renamed, new ones come after them."""
    raw = msgspec.json.decode(encode_report(run_report(predicted=predicted)))
    assert list(raw) == [
        "kind", "run", "created_at", "started_at", "software", "status", "reason", "method", "model", "seed",
        "rounds_planned", "protocol", "rounds", "devices", "refusals", "dropouts", "privacy", "settings", "duration_s",
        "classes", "warnings", "convention", "schema",
    ]  # fmt: skip
    assert (raw["kind"], raw["schema"]) == ("run", 1)
    assert list(raw["devices"][0]) == [
        "device", "train_samples", "test_samples", "accuracy", "rounds", "bytes_down", "bytes_up", "received",
        "declined", "peak_rss_bytes",
    ]  # fmt: skip
    assert (raw["devices"][0]["rounds"][0]["expected"] is not None) == predicted
