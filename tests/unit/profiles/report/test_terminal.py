"""Reports in terminals: nothing is cut, and what matters comes first."""

import io

import pytest
from rich.console import Console, RenderableType

from profiles.report.terminal import profile_report
from tests.support.reports import profile_document


def draw_text(report: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(report)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_profile_fits_the_terminal(width: int) -> None:
    lines = draw_text(profile_report(profile_document(), width), width)
    assert lines[0] == "eftvit on vit_base_patch16_224"
    assert lines[1] == f"{profile_document().fitting} of 20 pairs of device and variant fit their budgets."
    assert not any("…" in line for line in lines)
    [row] = [line for line in lines if line.startswith("rpi5-8") and "mask 0.75, M=2" in line]
    assert row.endswith("fits")
    assert sum("over: memory" in line for line in lines) == 4


def test_a_narrow_terminal_shows_fewer_columns_and_no_cut_numbers() -> None:
    wide, narrow = (draw_text(profile_report(profile_document(), width), width) for width in (160, 80))
    assert any("energy" in line for line in wide)
    assert not any("kJ" in line for line in narrow)
    assert all(len(line) <= 80 for line in narrow)
