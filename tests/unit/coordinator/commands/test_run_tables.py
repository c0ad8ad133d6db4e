"""The tables of a run: what they say, and that they fit a terminal."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from coordinator.commands.run_tables import (
    MOST_ROUNDS,
    accuracy_table,
    budget_table,
    device_table,
    privacy_table,
    refusal_table,
    report,
    runs_table,
)
from coordinator.record.record import Record, open_record
from coordinator.record.summary import RunSummary, natural_order, summarise
from coordinator.record.tables import SavedState
from profiles.report.terminal import shortened
from tests.support.records import PROTOCOL, RUN, begun_run, evaluated, line, trained


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    made = begun_run(tmp_path)
    yield made
    made.close()


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


def test_accuracy_is_shown_with_how_it_was_measured(store: Record) -> None:
    """As the run's record says: programs of different methods test different tensors."""
    assert drawn(report(summarise(store, RUN), 100), 100).count(f"accuracy: {PROTOCOL}") == 1


def test_a_run_that_has_only_begun_is_two_lines(store: Record) -> None:
    store.runs.create("new", {"method": "fedavg", "devices": 4, "options": {"lr": 0.1}})
    assert drawn(report(summarise(store, "new"), 80), 80) == [
        "run new: fedavg on None, waiting, 0 of 0 rounds, seed 0",
        'settings: method = "fedavg", devices = 4, options.lr = 0.1',
    ]


def test_budgets_that_were_broken_are_named(store: Record) -> None:
    store.rounds.open(RUN, 3, ["a"])
    trained(store, 3, "a", broke=("time", "memory"))
    store.devices.add_refusal(RUN, 4, "a", "train", "memory", "memory")
    store.devices.add_refusal(RUN, 4, "f", "train", "hot", "temperature")
    run = summarise(store, RUN)
    rows = cells(budget_table(run, 80), 80)
    assert rows[0] == ["a", "3", "2", "memory", "2,", "time", "1"]
    assert rows[-1] == ["f", "0", "1", "temperature", "1"]
    assert "budgets" in drawn(report(run, 80), 80)


def test_budgets_are_no_subject_where_all_were_kept(store: Record) -> None:
    assert "budgets" not in drawn(report(summarise(store, RUN), 80), 80)


def test_what_the_tables_say(store: Record) -> None:
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


def test_units_stand_in_the_headings(store: Record) -> None:
    above, below = drawn(device_table(summarise(store, RUN), 80), 80)[1:3]
    assert above.split() == ["train", "test", "rounds", "last", "down", "up", "step", "memory", "GFLOP"]
    assert below.split() == [
        "device",
        "images",
        "images",
        "trained",
        "accuracy",
        "MB",
        "MB",
        "ms",
        "MB",
        "per",
        "round",
    ]


def test_equal_refusals_stand_together_and_the_newest_are_shown(store: Record) -> None:
    """15 kinds of reasons, each three times: the last 10 in the order of their last time."""
    for _ in range(3):
        for number in range(15):
            store.devices.add_refusal(RUN, 2, "a", "message", f"reason-{number}")
    table = refusal_table(summarise(store, RUN), 80)
    assert [row[-1] for row in cells(table)] == [f"reason-{number}" for number in range(5, 15)]
    assert {row[0] for row in cells(table)} == {"3"}
    assert "and 7 others before" in drawn(table, 80)[0]  # 5 of these and the two of the run


def fleet(tmp_path: Path, names: list[str]) -> RunSummary:
    """Three evaluated rounds of these devices, with large numbers everywhere."""
    store = open_record(tmp_path / "fleet")
    store.runs.create(RUN, {"method": "eftvit", "model": "vit_base_patch16_224", "seed": 0, "rounds": 500})
    for number in range(1, 4):
        store.rounds.open(RUN, number, names)
        for device in names:
            use: dict[str, Any] = {
                "step_s": 12.3456, "flops": 12 * 10**12, "peak_rss_bytes": 1_175_000_000,
                "received_bytes": 13_720_000_000, "sent_bytes": 2_000_000_000,
            }  # fmt: skip
            trained(store, number, device, 12_345, **use)
            evaluated(store, number, device, 1000, 1234)
        store.rounds.close(RUN, number, SavedState({}, None, {}), {})
        store.rounds.close_evaluation(RUN, number)
        store.devices.add_refusal(
            RUN, number, names[0], "train", f"round {number}: " + "a long reason, in many words " * 8
        )
    store.runs.update(RUN, status="interrupted", reason="the disk [is] full: [/var/lib] holds nothing more")
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
    for name, short in zip(sorted(names, key=natural_order), shown, strict=True):
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
    assert wide == ["round", *FLEETS["dozen"], "mean", "std", "by", "image"], "without the curve"


def test_the_lowest_and_the_highest(store: Record) -> None:
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


def test_what_was_spent_of_privacy_stands_by_round(store: Record) -> None:
    summary = summarise(store, RUN)
    assert "epsilon" not in "".join(drawn(report(summary, 80), 80))
    first, *rest = summary.rounds
    spent = msgspec.structs.replace(first, figures={**first.figures, "dp_epsilon": 2.5})
    private = msgspec.structs.replace(summary, rounds=[spent, *rest], epsilon=2.5)
    lines = drawn(report(private, 80), 80)
    assert "privacy of devices' updates: epsilon 2.5 over all rounds so far" in lines
    assert cells(privacy_table(private))[:2] == [["1", "2.5"], ["2", "-"]]


def test_tables_by_round_show_the_newest_of_many(tmp_path: Path) -> None:
    store = open_record(tmp_path)
    store.runs.create(RUN, {"method": "fedavg"})
    for number in range(1, MOST_ROUNDS + 3):
        store.rounds.open(RUN, number, ["a"])
        store.rounds.close(RUN, number, SavedState({}, None, {}), {"dp_epsilon": float(number)})
        evaluated(store, number, "a", 1, 2)
        store.rounds.close_evaluation(RUN, number)
    run = summarise(store, RUN, accuracy_of=MOST_ROUNDS)
    store.close()
    assert len(run.rounds) == MOST_ROUNDS + 2
    for table in (accuracy_table(run, 80), privacy_table(run)):
        assert [row[0] for row in cells(table)] == [str(number) for number in range(3, MOST_ROUNDS + 3)]
        assert f"the newest {MOST_ROUNDS} of {MOST_ROUNDS + 2}" in " ".join(" ".join(drawn(table, 80)[:4]).split())
    assert [entry.accuracy for entry in run.rounds[:3]] == [{}, {}, {"a": 0.5}], "of others it is not read"
    assert {entry.accuracy_mean for entry in run.rounds} == {0.5}
