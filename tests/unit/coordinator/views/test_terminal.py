"""The tables of a run: what they say, and that they fit a terminal."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from coordinator.record.record import Record, open_record
from coordinator.record.tables import RefusalRecord, SavedState
from coordinator.run_view import RunView, natural_order, read_run
from coordinator.views.terminal import (
    MOST_ROUNDS,
    draw_accuracy,
    draw_devices,
    draw_refusals,
    draw_report,
    draw_run,
    draw_runs,
)
from tests.support.records import PROTOCOL, RUN, begin_run, evaluated, line, trained
from tests.support.reports import private_report, run_report


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    made = begin_run(tmp_path)
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


def test_a_run_that_has_only_begun_is_two_lines(store: Record) -> None:
    store.runs.create("new", {"method": "fedavg", "devices": 4, "options": {"lr": 0.1}})
    assert drawn(draw_run(read_run(store, "new"), 80), 80) == [
        "run new: fedavg on None, waiting, 0 of 0 rounds, seed 0",
        'settings: method = "fedavg", devices = 4, options.lr = 0.1',
    ]


def test_budgets_that_were_broken_are_named(store: Record) -> None:
    assert "budgets" not in drawn(draw_run(read_run(store, RUN), 80), 80), "all were kept"
    store.rounds.open(RUN, 3, ["a"])
    trained(store, 3, "a", broke=("time", "memory"))
    store.devices.add_refusal(RUN, RefusalRecord(4, "f", "train", "hot", broke="temperature"))
    lines = drawn(draw_run(read_run(store, RUN), 80), 80)
    rows = [line.split() for line in lines[lines.index("budgets") + 4 :]]
    assert rows[0] == ["a", "3", "1", "memory", "1,", "time", "1"]
    assert ["f", "0", "1", "temperature", "1"] in rows


def test_what_the_tables_say(store: Record) -> None:
    run = read_run(store, RUN)
    assert drawn(draw_run(run, 100), 100).count(f"accuracy: {PROTOCOL}") == 1
    [row] = cells(draw_accuracy(run, 200))
    assert row == ["1", "0.900", "0.500", "0.350", "0.583", "0.232", "0.531", "█" * 12]  # .583 * 20 = 11.67
    assert cells(draw_accuracy(run, 40))[0][:4] == ["1", "0.350", "0.900", "0.583"], "the lowest and the highest"
    a, _, c, _ = cells(draw_devices(run, 200))
    assert " ".join(a) == "a 30 10 2 0.900 6.00 MB 1.10 MB 15.0 ms 120 MB 500 FLOP"
    assert " ".join(c) == "c 0 20 0 0.350 0 B 0 B – – –"
    assert cells(draw_refusals(run, 200)) == [
        ["1", "1", "c", "train", "no", "result:", "deadline"],
        ["1", "e", "hello", "its", "class", "folder", "[wasp]", "is", "unknown", "[/b]"],
    ]


def test_equal_refusals_stand_together_and_the_newest_are_shown(store: Record) -> None:
    """15 kinds of reasons, each three times: the last 10 in the order of their last time."""
    for _ in range(3):
        for number in range(15):
            store.devices.add_refusal(RUN, RefusalRecord(2, "a", "message", f"reason-{number}"))
    table = draw_refusals(read_run(store, RUN), 80)
    assert [row[-1] for row in cells(table)] == [f"reason-{number}" for number in range(5, 15)]
    assert {row[0] for row in cells(table)} == {"3"}
    assert "and 7 others before" in drawn(table, 80)[0]  # 5 of these and the two of the run


def fleet(tmp_path: Path, names: list[str]) -> RunView:
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
            RUN, RefusalRecord(number, names[0], "train", f"round {number}: " + "a long reason, in many words " * 8)
        )
    store.runs.update(RUN, status="interrupted", reason="the disk [is] full: [/var/lib] holds nothing more")
    summary = read_run(store, RUN)
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
def fleets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunView]:
    return {name: fleet(tmp_path_factory.mktemp(name), names) for name, names in FLEETS.items()}


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("fleet_of", FLEETS)
def test_everything_fits_the_terminal(fleets: dict[str, RunView], fleet_of: str, width: int) -> None:
    """No line is longer than the terminal, no number is cut or wrapped, and every device can be told by its name."""
    names, run = FLEETS[fleet_of], fleets[fleet_of]
    for table in (draw_accuracy(run, width), draw_devices(run, width), draw_runs([line(run)], width)):
        assert drawn(table, width) == drawn(table, 1000), "it would be wider if it could"
        assert all(len(line) <= width for line in drawn(table, width))
        assert "…" not in "\n".join(drawn(draw_runs([line(run)], width), width))
    assert all(len(line) <= width for line in drawn(draw_run(run, width), width))

    rounds = cells(draw_accuracy(run, width), width)
    assert [row[:2] for row in rounds] == [[str(number), "0.810"] for number in (1, 2, 3)]
    shown = [row[0] for row in cells(draw_devices(run, width), width)]
    assert len(set(shown)) == len(names)
    for name, short in zip(sorted(names, key=natural_order), shown, strict=True):
        begin, _, end = short.partition("…")
        assert name.startswith(begin)
        assert name.endswith(end)
        assert short == name or len(short) >= 12
    assert {"12345", "0.810", "41.2", "6.00", "1.18"} <= set(cells(draw_devices(run, width), width)[0])
    [listed] = cells(draw_runs([line(run)], width), width)
    assert listed[0] == RUN
    assert {"3/500", "0.810", "interrupted"} <= set(listed)
    refused = "\n".join(drawn(draw_refusals(run, width), width))
    assert refused.count("in many words") >= 8 * 2, "reasons are wrapped, not cut"


def test_few_devices_have_columns_and_many_have_the_range(fleets: dict[str, RunView]) -> None:
    few = drawn(draw_accuracy(fleets["demo"], 80), 80)
    assert few[1].split() == ["round", *FLEETS["demo"], "mean", "std", "by", "image", "curve"]
    many = fleets["dozen"]
    assert drawn(draw_accuracy(many, 80), 80)[1].split() == [
        "round", "lowest", "highest", "mean", "std", "by", "image", "curve",
    ]  # fmt: skip
    wide = drawn(draw_accuracy(many, 150), 150)[1].split()
    assert wide == ["round", *FLEETS["dozen"], "mean", "std", "by", "image"], "without the curve"


def test_tables_by_round_show_the_newest_of_many(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        store.runs.create(RUN, {"method": "fedavg"})
        for number in range(1, MOST_ROUNDS + 3):
            store.rounds.open(RUN, number, ["a"])
            store.rounds.close(RUN, number, SavedState({}, None, {}), {"dp_epsilon": float(number)})
            evaluated(store, number, "a", 1, 2)
            store.rounds.close_evaluation(RUN, number)
        run = read_run(store, RUN, accuracy_of=MOST_ROUNDS)
    assert len(run.rounds) == MOST_ROUNDS + 2
    newest = [str(number) for number in range(3, MOST_ROUNDS + 3)]
    assert [row[0] for row in cells(draw_accuracy(run, 80))] == newest
    lines = drawn(draw_run(run, 80), 80)
    assert f"privacy of devices' updates: epsilon {MOST_ROUNDS + 2} over all rounds so far" in lines
    assert [[number, number] in [line.split() for line in lines] for number in newest] == [True] * MOST_ROUNDS
    assert [entry.accuracy for entry in run.rounds[:3]] == [{}, {}, {"a": 0.5}], "of others it is not read"


# --- report ---


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_fits_the_terminal(width: int) -> None:
    lines = drawn(draw_report(run_report(), width), width)
    assert lines[1] == "Finished: 12 of 12 rounds, accuracy 0.880"
    assert "  pi-a broke its budget of time in 1 round" in lines
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("pi-b") and "predicted" in line for line in lines)
    assert any("error" in line and "%" in line for line in lines)
    assert "settings: devices = 4, options.mask = 0.75, classes = 100 values" in lines


def test_without_predictions_only_what_was_measured() -> None:
    lines = drawn(draw_report(run_report(predicted=False), 120), 120)
    rows = [line for line in lines if line.startswith(("pi-", "orin"))]
    assert len(rows) == 4
    assert all("measured" in row for row in rows)


def test_report_shows_names_in_brackets_and_spent_privacy() -> None:
    document = msgspec.structs.replace(run_report(), warnings=["[red]hot[/red]"])
    assert drawn(draw_report(document, 120), 120)[-1] == "note: [red]hot[/red]"
    lines = " ".join(drawn(draw_report(private_report(), 80), 80))
    assert "privacy of devices' updates: epsilon 4 over all rounds so far" in lines
    assert "privacy of one device's features: epsilon 75 over all rounds so far" in lines
