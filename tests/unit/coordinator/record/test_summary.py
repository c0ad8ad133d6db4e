"""A run in figures: numbers from a record made by hand, and tables that fit a terminal."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from coordinator.record.store import Store
from coordinator.record.summary import (
    MOST_ROUNDS,
    RunLine,
    RunSummary,
    accuracy_table,
    budget_table,
    device_table,
    overview,
    privacy_table,
    refusal_table,
    report,
    round_line,
    runs_table,
    summarise,
)
from coordinator.record.tables import SavedState
from fedvit.errors import ConfigError
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result
from profiles.report.terminal import shortened

RUN = "20261121-034500-eftvit-ab12"
PROTOCOL = "tested as the planner said"


def trained(store: Store, number: int, device: str, samples: int = 10, loss: float = 1.0, **use: Any) -> None:
    store.add_result(device, Result(RUN, number, "train", samples, {"loss": loss}, ResourceUse(**use)))


def evaluated(store: Store, number: int, device: str, right: int, samples: int, **use: Any) -> None:
    metrics = {"correct": float(right)}
    store.add_result(device, Result(RUN, number, "evaluate", samples, metrics, ResourceUse(**use)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A run of three planned rounds; two are over, the first was evaluated, the second was not."""
    made = Store.in_folder(tmp_path)
    config = {"method": "eftvit", "model": "vit_small_images", "seed": 7, "rounds": 3}
    made.create_run(RUN, config)
    made.update_run(RUN, status="running", classes=["ant", "bee"], protocol=PROTOCOL)
    made.open_round(RUN, 1, ["a", "b", "c"])
    trained(
        made, 1, "a", 30, 1.0,
        step_s=0.010, steps=4, flops=400, peak_rss_bytes=100_000_000, received_bytes=5_000_000, sent_bytes=1_000_000,
    )  # fmt: skip
    trained(made, 1, "b", 10, 2.0, step_s=0.030, flops=100, received_bytes=5_000_000, sent_bytes=2_000_000)
    evaluated(made, 1, "a", 9, 10, received_bytes=1_000_000, sent_bytes=100_000, peak_rss_bytes=120_000_000)
    evaluated(made, 1, "b", 1, 2)
    evaluated(made, 1, "c", 7, 20)
    evaluated(made, 1, "d", 0, 0)
    made.close_round(RUN, 1, SavedState({}, None, {}), {"devices_s": 2.5, "server_s": 0.5})
    made.round_evaluated(RUN, 1)
    made.open_round(RUN, 2, ["a", "b"])
    trained(made, 2, "a", 30, 0.5, step_s=0.020, flops=600)
    made.add_refusal(RUN, 1, "c", "train", "no result: deadline", lost=True)
    made.add_refusal(RUN, None, "e", "hello", "its class folder [wasp] is unknown [/b]")
    yield made
    made.close()


def line(run: RunSummary) -> RunLine:
    """Of a summary, as the list of runs has it."""
    fields = {name: getattr(run, name) for name in RunLine.__struct_fields__ if name not in ("rounds", "bytes")}
    return RunLine(rounds=len(run.rounds), bytes=123_456_789, **fields)


def drawn(table: RenderableType, width: int) -> list[str]:
    """The lines of a terminal of this width, which wraps what is longer."""
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def cells(table: RenderableType, width: int = 200) -> list[list[str]]:
    """Words of the lines below the rule."""
    lines = drawn(table, width)
    rule = next(number for number, line in enumerate(lines) if line.startswith("─"))
    return [line.split() for line in lines[rule + 1 :]]


# --- numbers ------------------------------------------------------------------------------------------


def test_the_first_round(store: Store) -> None:
    """Accuracies .9, .5, .35 (d has no test images): mean 1.75/3 = .58333, population std of
    (.31667, -.08333, -.23333): sqrt((.10028 + .00694 + .05444) / 3) = .23214; by image 17/32 = .53125.

    Loss (1 + 2) / 2. Down 5 + 5 + 1 MB, up 1 + 2 + .1 MB, FLOPs 500.
    """
    first = summarise(store, RUN).rounds[0]
    assert (first.round, first.cohort, first.accepted) == (1, 3, 2)
    assert first.accuracy == {"a": 0.9, "b": 0.5, "c": 0.35}
    assert first.accuracy_mean == pytest.approx(1.75 / 3)
    assert first.accuracy_std == pytest.approx(0.232140, abs=1e-5)
    assert first.accuracy_weighted == pytest.approx(17 / 32)
    assert first.train_loss == pytest.approx(1.5)
    assert (first.bytes_down, first.bytes_up, first.flops) == (11_000_000, 3_100_000, 500)
    assert first.figures == {"devices_s": 2.5, "server_s": 0.5}


def test_a_round_without_evaluation_has_no_accuracy(store: Store) -> None:
    """What was not measured is None, never 0."""
    second = summarise(store, RUN).rounds[1]
    assert (second.cohort, second.accepted, second.train_loss) == (2, 1, 0.5)
    assert (second.accuracy_mean, second.accuracy_std, second.accuracy_weighted) == (None, None, None)
    assert second.accuracy == {}
    assert second.figures == {}


def test_the_devices(store: Store) -> None:
    """a: two rounds, steps of 10 and 20 ms (median 15), peak of both kinds of task, (400 + 600) / 2 FLOPs a round."""
    a, b, c, d = summarise(store, RUN).devices
    assert (a.device, a.train_samples, a.test_samples, a.rounds, a.accuracy) == ("a", 30, 10, 2, 0.9)
    assert a.step_s == pytest.approx(0.015)
    assert (a.peak_rss_bytes, a.flops_per_round) == (120_000_000, 500)
    assert (a.bytes_down, a.bytes_up) == (6_000_000, 1_100_000)
    assert (b.rounds, b.step_s, b.peak_rss_bytes, b.flops_per_round, b.accuracy) == (1, 0.03, None, 100, 0.5)
    assert (c.device, c.rounds, c.train_samples, c.step_s, c.flops_per_round) == ("c", 0, 0, None, None)
    assert (d.device, d.test_samples, d.accuracy) == ("d", 0, None)


def test_the_run(store: Store) -> None:
    """The mean accuracy is that of the newest evaluation; memory is the largest of all devices."""
    run = summarise(store, RUN)
    assert (run.run, run.status, run.reason, run.method, run.model) == (
        RUN, "running", None, "eftvit", "vit_small_images",
    )  # fmt: skip
    assert (run.seed, run.rounds_planned, run.classes, run.protocol) == (7, 3, ("ant", "bee"), PROTOCOL)
    assert run.mean_accuracy == pytest.approx(1.75 / 3)
    assert (run.bytes_down, run.bytes_up) == (11_000_000, 3_100_000)
    assert run.max_edge_rss_bytes == 120_000_000
    assert [(entry["round"], entry["device"], entry["kind"]) for entry in run.refusals] == [
        (1, "c", "train"),
        (None, "e", "hello"),
    ]
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunSummary) == run


def test_a_run_that_has_only_begun(store: Store) -> None:
    store.create_run("new", {"method": "fedavg"})
    run = summarise(store, "new")
    assert (run.rounds, run.devices, run.refusals) == ([], [], [])
    assert (run.mean_accuracy, run.max_edge_rss_bytes, run.bytes_down, run.protocol) == (None, None, 0, None)
    assert drawn(report(run, 80), 80) == ["run new: fedavg on None, waiting, 0 of 0 rounds, seed 0"]


def test_accuracy_is_shown_with_how_it_was_measured(store: Store) -> None:
    """As the run's record says: programs of different methods test different tensors."""
    assert drawn(report(summarise(store, RUN), 100), 100).count(f"accuracy: {PROTOCOL}") == 1


def test_an_unknown_run_is_named(store: Store) -> None:
    with pytest.raises(ConfigError, match="'nope'"):
        summarise(store, "nope")


def test_the_line_of_a_round(store: Store) -> None:
    assert round_line(store, RUN, 1, 3) == (
        "round   1/3   2/3 devices   accuracy 0.583 ± 0.232   loss 1.500   "
        "devices 2.5 s, server 0.5 s   down 11.0 MB, up 3.1 MB"
    )
    store.close_round(RUN, 2, SavedState({}, None, {}), {})
    assert round_line(store, RUN, 2, 3) == "round   2/3   1/2 devices   loss 0.500   down 0.0 MB, up 0.0 MB"


def test_budgets_that_were_kept_and_broken(store: Store) -> None:
    """`a` kept its budgets in three tasks (rounds 1 and 2, evaluation 1), broke two at once in a fourth and was
    stopped in a fifth; `f` was stopped in the only one that it had."""
    store.open_round(RUN, 3, ["a"])
    trained(store, 3, "a", broke=("time", "memory"))
    store.add_refusal(RUN, 4, "a", "train", "memory", "memory")
    store.add_refusal(RUN, 4, "f", "train", "hot", "temperature")
    run = summarise(store, RUN)
    by_name = {device.device: device for device in run.devices}
    assert (by_name["a"].budget_kept, by_name["a"].budget_broken) == (3, 2)
    assert by_name["a"].broke == {"memory": 2, "time": 1}
    assert (by_name["f"].budget_kept, by_name["f"].budget_broken, by_name["f"].rounds) == (0, 1, 0)
    assert (by_name["b"].budget_kept, by_name["b"].budget_broken, by_name["b"].broke) == (2, 0, {})
    assert "e" not in by_name, "a hello that was refused is no task"
    assert [entry["broke"] for entry in run.refusals] == [None, None, "memory", "temperature"]
    rows = cells(budget_table(run, 80), 80)
    assert rows[0] == ["a", "3", "2", "memory", "2,", "time", "1"]
    assert rows[-1] == ["f", "0", "1", "temperature", "1"]
    assert "budgets" in drawn(report(run, 80), 80)


def test_budgets_are_no_subject_where_all_were_kept(store: Store) -> None:
    assert "budgets" not in drawn(report(summarise(store, RUN), 80), 80)


# --- tables -------------------------------------------------------------------------------------------


def test_what_the_tables_say(store: Store) -> None:
    run = summarise(store, RUN)
    [row] = cells(accuracy_table(run, 200))
    assert row == ["1", "0.900", "0.500", "0.350", "0.583", "0.232", "0.531", "█" * 12]  # .583 * 20 = 11.67
    assert cells(device_table(run, 200)) == [
        ["a", "30", "10", "2", "0.900", "6.0", "1.1", "15.0", "120.0", "0.0"],
        ["b", "10", "2", "1", "0.500", "5.0", "2.0", "30.0", "-", "0.0"],
        ["c", "0", "20", "0", "0.350", "0.0", "0.0", "-", "-", "-"],
        ["d", "0", "0", "0", "-", "0.0", "0.0", "-", "-", "-"],
    ]
    assert cells(refusal_table(run, 200)) == [
        ["1", "1", "c", "train", "no", "result:", "deadline"],
        ["1", "e", "hello", "its", "class", "folder", "[wasp]", "is", "unknown", "[/b]"],
    ]
    assert cells(runs_table([line(run)], 200))[0][0] == RUN


def test_units_stand_in_the_headings(store: Store) -> None:
    above, below = drawn(device_table(summarise(store, RUN), 80), 80)[1:3]
    assert above.split() == ["train", "test", "rounds", "last", "down", "up", "step", "memory", "GFLOP"]
    assert below.split() == ["device", "images", "images", "trained", "accuracy", "MB", "MB", "ms", "MB", "a", "round"]


def test_equal_refusals_stand_together_and_the_newest_are_shown(store: Store) -> None:
    """15 kinds of reasons, each three times: the last 10 in the order of their last time."""
    for _ in range(3):
        for number in range(15):
            store.add_refusal(RUN, 2, "a", "message", f"reason-{number}")
    table = refusal_table(summarise(store, RUN), 80)
    assert [row[-1] for row in cells(table)] == [f"reason-{number}" for number in range(5, 15)]
    assert {row[0] for row in cells(table)} == {"3"}
    assert "and 7 others before" in drawn(table, 80)[0]  # 5 of these and the two of the run


def fleet(tmp_path: Path, names: list[str]) -> RunSummary:
    """Three evaluated rounds of these devices, with large numbers everywhere."""
    store = Store.in_folder(tmp_path / "fleet")
    store.create_run(RUN, {"method": "eftvit", "model": "vit_base_patch16_224", "seed": 0, "rounds": 500})
    for number in range(1, 4):
        store.open_round(RUN, number, names)
        for device in names:
            use: dict[str, Any] = {
                "step_s": 12.3456, "flops": 12 * 10**12, "peak_rss_bytes": 1_175_000_000,
                "received_bytes": 13_720_000_000, "sent_bytes": 2_000_000_000,
            }  # fmt: skip
            trained(store, number, device, 12_345, **use)
            evaluated(store, number, device, 1000, 1234)
        store.close_round(RUN, number, SavedState({}, None, {}), {})
        store.round_evaluated(RUN, number)
        store.add_refusal(RUN, number, names[0], "train", f"round {number}: " + "a long reason, in many words " * 8)
    store.update_run(RUN, status="interrupted", reason="the disk [is] full: [/var/lib] holds nothing more")
    summary = summarise(store, RUN)
    store.close()
    return summary


FLEETS = {
    "one": ["pi"],
    "demo": [f"device-{number}" for number in range(4)],
    "dozen": [f"device-{number}" for number in range(12)],
    "many": [f"device-{number}" for number in range(60)],
    "long": [f"raspberry-pi-in-the-greenhouse-of-the-north-wing-{number:02d}" for number in range(8)],
    "longest": ["x" * 63 + end for end in "ab"],
}


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunSummary]:
    return {name: fleet(tmp_path_factory.mktemp(name), names) for name, names in FLEETS.items()}


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("fleet_of", FLEETS)
def test_everything_fits_the_terminal(fleets: dict[str, RunSummary], fleet_of: str, width: int) -> None:
    """No line is longer than the terminal, no number is cut or wrapped, and every device can be told by its name."""
    names, run = FLEETS[fleet_of], fleets[fleet_of]
    for table in (accuracy_table(run, width), device_table(run, width), runs_table([line(run)], width)):
        assert drawn(table, width) == drawn(table, 1000), "it would be wider if it could"
        assert all(len(line) <= width for line in drawn(table, width))
        assert "…" not in "\n".join(drawn(runs_table([line(run)], width), width))
    assert all(len(line) <= width for line in drawn(report(run, width), width))

    rounds = cells(accuracy_table(run, width), width)
    assert len(rounds) == 3
    assert all(row[:2] == [str(number), "0.810"] for number, row in enumerate(rounds, 1))
    shown = [row[0] for row in cells(device_table(run, width), width)]
    assert len(set(shown)) == len(names)
    for name, short in zip(sorted(names), shown, strict=True):
        begin, _, end = short.partition("…")
        assert name.startswith(begin)
        assert name.endswith(end)
        assert short == name or len(short) >= 12
        assert short == name or len(name) > 11
    assert cells(device_table(run, width), width)[0][1:] == [
        "12345", "1234", "3", "0.810", "41160", "6000.0", "12346", "1175.0", "12000",
    ]  # fmt: skip
    [listed] = cells(runs_table([line(run)], width), width)
    assert listed[0] == RUN
    assert {"3/500", "0.810", "interrupted"} <= set(listed)

    refused = "\n".join(drawn(refusal_table(run, width), width))
    assert refused.count("in many words") >= 8 * 2, "reasons are wrapped, not cut"


def test_few_devices_have_columns_and_many_have_the_range(fleets: dict[str, RunSummary]) -> None:
    few = drawn(accuracy_table(fleets["demo"], 80), 80)
    assert few[1].split() == ["round", *FLEETS["demo"], "mean", "std", "by", "image", "curve"]
    many = fleets["dozen"]
    assert drawn(accuracy_table(many, 80), 80)[1].split() == [
        "round", "lowest", "highest", "mean", "std", "by", "image", "curve",
    ]  # fmt: skip
    wide = drawn(accuracy_table(many, 150), 150)[1].split()
    assert wide == ["round", *sorted(FLEETS["dozen"]), "mean", "std", "by", "image"], "without the curve"


def test_the_lowest_and_the_highest(store: Store) -> None:
    assert cells(accuracy_table(summarise(store, RUN), 40))[0][:4] == ["1", "0.350", "0.900", "0.583"]


@pytest.mark.parametrize("width", range(70))
def test_names_are_shortened_in_their_middle(width: int) -> None:
    name = "abcdefghijklmnopqrstuvwxyz0123456789"
    short = shortened(name, width)
    assert len(short) == min(width, len(name))
    if width < len(name) and width > 2:
        begin, _, end = short.partition("…")
        assert name.startswith(begin)
        assert name.endswith(end)
        assert 0 <= len(begin) - len(end) <= 1


def test_what_was_spent_of_privacy_stands_by_round(store: Store) -> None:
    summary = summarise(store, RUN)
    assert "epsilon" not in "".join(drawn(report(summary, 80), 80))
    first, *rest = summary.rounds
    spent = msgspec.structs.replace(first, figures={**first.figures, "dp_epsilon": 2.5})
    private = msgspec.structs.replace(summary, rounds=[spent, *rest], epsilon=2.5)
    lines = drawn(report(private, 80), 80)
    assert "privacy of devices' updates: epsilon 2.5 over all rounds so far" in lines
    assert cells(privacy_table(private))[:2] == [["1", "2.5"], ["2", "-"]]


# --- runs of many rounds ------------------------------------------------------------------------------


def test_tables_by_round_show_the_newest_of_many(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path)
    store.create_run(RUN, {"method": "fedavg"})
    for number in range(1, MOST_ROUNDS + 3):
        store.open_round(RUN, number, ["a"])
        store.close_round(RUN, number, SavedState({}, None, {}), {"dp_epsilon": float(number)})
        evaluated(store, number, "a", 1, 2)
        store.round_evaluated(RUN, number)
    run = summarise(store, RUN, accuracy_of=MOST_ROUNDS)
    store.close()
    assert len(run.rounds) == MOST_ROUNDS + 2
    for table in (accuracy_table(run, 80), privacy_table(run)):
        assert [row[0] for row in cells(table)] == [str(number) for number in range(3, MOST_ROUNDS + 3)]
        assert f"the newest {MOST_ROUNDS} of {MOST_ROUNDS + 2}" in " ".join(" ".join(drawn(table, 80)[:4]).split())
    assert [entry.accuracy for entry in run.rounds[:3]] == [{}, {}, {"a": 0.5}], "of others it is not read"
    assert {entry.accuracy_mean for entry in run.rounds} == {0.5}


def test_an_evaluation_that_is_under_way_counts(store: Store) -> None:
    """Round 2 is closed, and b was the first to answer its evaluation: that is in the totals before it is over."""
    store.close_round(RUN, 2, SavedState({}, None, {}), {})
    evaluated(store, 2, "b", 2, 2, sent_bytes=5)
    run = summarise(store, RUN)
    assert (run.rounds[1].accuracy, run.rounds[1].accuracy_mean, run.rounds[1].bytes_up) == ({"b": 1.0}, 1.0, 5)
    assert {device.device: device.accuracy for device in run.devices} == {"a": 0.9, "b": 1.0, "c": 0.35, "d": None}
    store.round_evaluated(RUN, 2)
    assert summarise(store, RUN) == run


def test_runs_are_listed_with_the_room_that_they_take(store: Store, tmp_path: Path) -> None:
    (tmp_path / RUN / "blobs" / "ab").mkdir(parents=True)
    (tmp_path / RUN / "blobs" / "ab" / "cd").write_bytes(bytes(1000))
    (tmp_path / RUN / "coordinator.log").write_bytes(bytes(234))
    [entry] = overview(store, tmp_path)
    run = summarise(store, RUN)
    assert entry == msgspec.structs.replace(line(run), bytes=1234)
