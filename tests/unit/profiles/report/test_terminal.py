"""Reports in terminals: nothing is cut, and what matters comes first."""

import io

import pytest
from rich.console import Console, RenderableType

from profiles.report.terminal import profile_report, run_report
from tests.support.reports import private_document, profile_document, run_document


def drawn(report: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(report)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_profile_fits_the_terminal(width: int) -> None:
    lines = drawn(profile_report(profile_document(), width), width)
    assert lines[0] == "eftvit on vit_base_patch16_224"
    assert lines[1] == f"{profile_document().fitting} of 20 pairs of device and variant fit their budgets."
    assert not any("…" in line for line in lines)
    [row] = [line for line in lines if line.startswith("rpi5-8") and "mask 0.75, M=2" in line]
    assert row.endswith("fits")
    assert sum("over: memory" in line for line in lines) == 4


def test_a_narrow_terminal_shows_fewer_columns_and_no_cut_numbers() -> None:
    wide, narrow = (drawn(profile_report(profile_document(), width), width) for width in (160, 80))
    assert any("energy" in line for line in wide)
    assert not any("kJ" in line for line in narrow)
    assert all(len(line) <= 80 for line in narrow)


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_fits_the_terminal(width: int) -> None:
    lines = drawn(run_report(run_document(), width), width)
    assert lines[1] == "Finished: 12 of 12 rounds, accuracy 0.880"
    assert "  pi-a broke its budget of time in 1 round" in lines
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("pi-b") and "predicted" in line for line in lines)
    assert any("error" in line and "%" in line for line in lines)
    assert "settings: devices = 4, options.mask = 0.75, classes = 100 values" in lines


def test_without_predictions_only_what_was_measured() -> None:
    lines = drawn(run_report(run_document(predicted=False), 120), 120)
    rows = [line for line in lines if line.startswith(("pi-", "orin"))]
    assert len(rows) == 4
    assert all("measured" in row for row in rows)


def test_names_in_brackets_are_no_markup() -> None:
    from msgspec.structs import replace

    document = replace(run_document(), warnings=["[red]hot[/red]"])
    assert drawn(run_report(document, 120), 120)[-1] == "note: [red]hot[/red]"


def test_report_shows_spent_privacy() -> None:
    lines = " ".join(drawn(run_report(private_document(), 80), 80))
    assert "privacy of devices' updates: epsilon 4 over all rounds so far" in lines
    assert "privacy of one device's features: epsilon 75 over all rounds so far" in lines
