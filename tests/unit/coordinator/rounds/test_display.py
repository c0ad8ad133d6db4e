"""What a person sees while a run is going."""

import io

import pytest
from rich.console import Console

from coordinator.rounds.display import DeviceLine, Display, LineDisplay, View, choose_display, drawn

HEADLINE = "round 2/12: train, waiting for 3 since 12 s (until 600 s)"


def shown(view: View, width: int, height: int = 24) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height).print(drawn(view, width, height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_line_for_each_device_the_working_ones_first() -> None:
    lines = shown(View(HEADLINE, [DeviceLine("pi-1", "train", 15, 60, 0.5), DeviceLine("pi-2", "fetching")]), 80)
    assert lines[0] == HEADLINE
    assert lines[1].split()[:2] == ["pi-1", "train"]
    assert lines[1].endswith("loss 0.500")
    assert lines[2].split() == ["pi-2", "fetching"]
    states = ["done", "train", "offline", "uploading", "failed", "fetching"]
    lines = shown(View("", [DeviceLine(f"pi-{number}", state) for number, state in enumerate(states)]), 80)
    assert [line.split()[0] for line in lines[1:]] == ["pi-1", "pi-3", "pi-5", "pi-0", "pi-2", "pi-4"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_many_devices_with_long_names_fit(width: int) -> None:
    """A terminal of 24 lines: the headline, 20 devices, and how the others are; a line is left for the cursor."""
    devices = [
        DeviceLine(f"raspberry-pi-in-the-greenhouse-{number:02d}", "done" if number % 2 else "train", 7, 9, 0.123)
        for number in range(50)
    ]
    lines = shown(View(HEADLINE * 3, devices), width)
    assert len(lines) == 22
    assert all(len(line) <= width for line in lines)
    assert lines[-1] == "  and 30 more: 5 train, 25 done"
    assert len({line.split()[0] for line in lines[1:-1]}) == 20, "each can be told by its name"
    assert all(line.endswith("loss 0.123") for line in lines[1:-1])


def test_brackets_are_no_markup() -> None:
    lines = shown(View("waiting [/b]", [DeviceLine("pi[red]", "train [x]")]), 80)
    assert lines[0] == "waiting [/b]"
    assert "pi[red]" in lines[1]


def test_lines_go_to_standard_error_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Long lines are not wrapped: they are for logs."""
    text = "device-3: train result of round 2 refused: [/b] " * 5
    with LineDisplay() as display:
        display.show(View("moving"))
        display.line(text)
    assert capsys.readouterr() == ("", text + "\n")


def test_a_pipe_gets_lines_and_quiet_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_display(), LineDisplay)
    silent = choose_display(quiet=True)
    assert type(silent) is Display
    silent.line("not shown")
    assert capsys.readouterr() == ("", "")
