"""The read model of a run: numbers from a record made by hand."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.config import RunConfig, make_config
from coordinator.record.record import Record
from coordinator.record.tables import RefusalRecord, SavedState
from coordinator.run_view import list_runs, read_head, read_run, show_document
from fedvit.errors import ConfigError
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from tests.support.codes import has_code
from tests.support.records import PROTOCOL, RUN, add_result, begin_run, evaluated, line, trained


@pytest.fixture
def store(runs: Path) -> Iterator[Record]:
    made = begin_run(runs)
    yield made
    made.close()


# --- numbers ------------------------------------------------------------------------------------------


def test_the_first_round(store: Record) -> None:
    """Accuracies .9, .5, .35 (d has no test images): mean 1.75/3 = .58333, population std of
    (.31667, -.08333, -.23333): sqrt((.10028 + .00694 + .05444) / 3) = .23214; by image 17/32 = .53125.

    Loss (1 + 2) / 2. Down 5 + 5 + 1 MB, up 1 + 2 + .1 MB, FLOPs 500.
    """
    first = read_run(store, RUN).rounds[0]
    assert (first.round, first.cohort, first.accepted) == (1, 3, 2)
    assert first.accuracy == {"a": 0.9, "b": 0.5, "c": 0.35}
    assert first.accuracy_mean == pytest.approx(1.75 / 3)
    assert first.accuracy_std == pytest.approx(0.232140, abs=1e-5)
    assert first.accuracy_weighted == pytest.approx(17 / 32)
    assert first.train_loss == pytest.approx(1.5)
    assert (first.bytes_down, first.bytes_up, first.flops) == (11_000_000, 3_100_000, 500)
    assert first.figures == {"devices_s": 2.5, "server_s": 0.5}


def test_a_round_without_evaluation_has_no_accuracy(store: Record) -> None:
    """What was not measured is None, never 0."""
    second = read_run(store, RUN).rounds[1]
    assert (second.cohort, second.accepted, second.train_loss) == (2, 1, 0.5)
    assert (second.accuracy_mean, second.accuracy_std, second.accuracy_weighted) == (None, None, None)
    assert second.accuracy == {}
    assert second.figures == {}


def test_the_devices(store: Record) -> None:
    """a: two rounds, steps of 10 and 20 ms (median 15), peak of both kinds of task, (400 + 600) / 2 FLOPs a round."""
    a, b, c, d = read_run(store, RUN).devices
    assert (a.device, a.train_samples, a.test_samples, a.rounds, a.accuracy) == ("a", 30, 10, 2, 0.9)
    assert a.step_s == pytest.approx(0.015)
    assert (a.peak_rss_bytes, a.flops_per_round) == (120_000_000, 500)
    assert (a.bytes_down, a.bytes_up) == (6_000_000, 1_100_000)
    assert (b.rounds, b.step_s, b.peak_rss_bytes, b.flops_per_round, b.accuracy) == (1, 0.03, None, 100, 0.5)
    assert (c.device, c.rounds, c.train_samples, c.step_s, c.flops_per_round) == ("c", 0, 0, None, None)
    assert (d.device, d.test_samples, d.accuracy) == ("d", 0, None)


def test_the_run(store: Record) -> None:
    """The mean accuracy is that of the newest evaluation; memory is the largest of all devices."""
    run = read_run(store, RUN)
    assert (run.run, run.status, run.reason, run.method, run.model) == (
        RUN, "running", None, "eftvit", "vit_small_images",
    )  # fmt: skip
    assert (run.seed, run.rounds_planned, run.classes, run.protocol) == (7, 3, ("ant", "bee"), PROTOCOL)
    assert run.mean_accuracy == pytest.approx(1.75 / 3)
    assert (run.bytes_down, run.bytes_up) == (11_000_000, 3_100_000)
    assert run.max_edge_rss_bytes == 120_000_000
    assert [(entry.round, entry.device, entry.kind) for entry in run.refusals] == [
        (1, "c", "train"),
        (None, "e", "hello"),
    ]


def test_json_has_a_round_s_figures_once(store: Record) -> None:
    """Keys of the JSON of `show`: those of the record's totals, then round, accuracy and figures."""
    entry = show_document(read_run(store, RUN))["rounds"][0]
    assert list(entry)[-3:] == ["round", "accuracy", "figures"]
    assert entry["figures"] == {"devices_s": 2.5, "server_s": 0.5}
    assert "devices_s" not in entry


def test_a_run_that_has_only_begun(store: Record) -> None:
    store.runs.create("new", {"method": "fedavg"})
    run = read_run(store, "new")
    assert (run.rounds, run.devices, run.refusals) == ([], [], [])
    assert (run.mean_accuracy, run.max_edge_rss_bytes, run.bytes_down, run.protocol) == (None, None, 0, None)


def test_an_unknown_run_is_named(store: Record) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1601", "'nope'")):
        read_run(store, "nope")


def test_budgets_that_were_kept_and_broken(store: Record) -> None:
    """`a` kept its budgets in three tasks (rounds 1 and 2, evaluation 1), broke two at once in a fourth and was
    stopped in a fifth; `f` was stopped in the only one that it had."""
    store.rounds.open(RUN, 3, ["a"])
    trained(store, 3, "a", broke=("time", "memory"))
    store.devices.add_refusal(RUN, RefusalRecord(4, "a", "train", "memory", broke="memory"))
    store.devices.add_refusal(RUN, RefusalRecord(4, "f", "train", "hot", broke="temperature"))
    run = read_run(store, RUN)
    by_name = {device.device: device for device in run.devices}
    assert (by_name["a"].budget_kept, by_name["a"].budget_broken) == (3, 2)
    assert by_name["a"].broke == {"memory": 2, "time": 1}
    assert (by_name["f"].budget_kept, by_name["f"].budget_broken, by_name["f"].rounds) == (0, 1, 0)
    assert (by_name["b"].budget_kept, by_name["b"].budget_broken, by_name["b"].broke) == (2, 0, {})
    assert "e" not in by_name, "a hello that was refused is no task"
    assert [entry.broke for entry in run.refusals] == [None, None, "memory", "temperature"]


def test_an_evaluation_that_is_under_way_counts(store: Record) -> None:
    """Round 2 is closed, and b was the first to answer its evaluation: that is in the totals before it is over."""
    store.rounds.close(RUN, 2, SavedState({}, None, {}), {})
    evaluated(store, 2, "b", 2, 2, sent_bytes=5)
    run = read_run(store, RUN)
    assert (run.rounds[1].accuracy, run.rounds[1].accuracy_mean, run.rounds[1].bytes_up) == ({"b": 1.0}, 1.0, 5)
    assert {device.device: device.accuracy for device in run.devices} == {"a": 0.9, "b": 1.0, "c": 0.35, "d": None}
    store.rounds.close_evaluation(RUN, 2)
    assert read_run(store, RUN) == run


def test_runs_are_listed_with_the_room_that_they_take(store: Record, tmp_path: Path) -> None:
    (tmp_path / RUN / "blobs" / "ab").mkdir(parents=True)
    (tmp_path / RUN / "blobs" / "ab" / "cd").write_bytes(bytes(1000))
    (tmp_path / RUN / "coordinator.log").write_bytes(bytes(234))
    [entry] = list_runs(store, tmp_path)
    run = read_run(store, RUN)
    assert entry == msgspec.structs.replace(line(run), bytes=1234)


# --- what tells runs apart ----------------------------------------------------------------------------


def test_settings_are_those_that_differ_from_the_defaults(store: Record) -> None:
    """Of a whole configuration as a run records it; an older one may have keys that are gone, or lack some."""
    values = {"method": "fedavg", "devices": 4, "options": {"lr": 0.1}, "privacy": {"delta": 1e-3}, "late": "refuse"}
    store.runs.create("whole", msgspec.to_builtins(make_config(values, "test").run))
    store.runs.create("usual", msgspec.to_builtins(RunConfig()))
    store.runs.create("older", {"method": "eftvit", "patience": 3, "images": {"flip": True, "zoom": 2.0}})
    assert {entry.run: entry.settings for entry in list_runs(store, Path("nowhere"))} == {
        RUN: {"seed": 7, "rounds": 3},
        "whole": {"method": "fedavg", "devices": 4, "options.lr": 0.1, "privacy.delta": 1e-3},
        "usual": {},
        "older": {"patience": 3, "images.flip": True, "images.zoom": 2.0},
    }
    assert read_run(store, "whole").settings == read_head(store, store.runs.read("whole")).settings


def test_devices_are_in_the_order_of_their_numbers(store: Record) -> None:
    names = ["pi", "device-10", "device-9", "device-1", "2-a", "device-9b", "device-٣"]
    store.runs.create("numbered", {})
    store.rounds.open("numbered", 1, names)
    for name in names:
        add_result(store, name, Result("numbered", 1, "train", 1, {}, ResourceUse()))
    in_order = ["2-a", "device-1", "device-9", "device-9b", "device-10", "device-٣", "pi"]
    assert [device.device for device in read_run(store, "numbered").devices] == in_order
