"""Console output of a run: permanent lines, and below them a live view of the current state."""

import contextlib
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedvit.logs import as_json, json_line
from fedvit.terminal import guard_streams
from profiles.report.console import Console
from profiles.report.tables import shorten

QUIET = ("done", "failed", "declined", "offline", "deadline", "crashed", "revoked")
"""States of devices that are listed last."""


@dataclass
class DeviceLine:
    """One device in the live view."""

    name: str
    state: str
    done: int = 0
    total: int = 0
    loss: float | None = None


@dataclass
class View:
    """Content of the live view: the current step and the devices."""

    headline: str = ""
    devices: list[DeviceLine] = field(default_factory=list)


class Display:
    """Base class; discards everything."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """Print a permanent line."""

    def due(self) -> bool:
        """Return whether the live view should be refreshed: making one takes a while with many devices."""
        return False

    def show(self, view: View) -> None:
        """Replace the live view."""


class LineDisplay(Display):
    """One line per event on standard error."""

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):  # standard error may be a file on a full disk
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class JsonDisplay(Display):
    """One JSON object per line on standard error."""

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(json_line("info", text, {}), file=sys.stderr, flush=True)  # noqa: T201 - meant for standard error


class LiveDisplay(Display):
    """For a terminal: lines above, a live table below."""

    REFRESH_S = 0.2

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def __enter__(self) -> "Display":
        self._live.start()
        guard_streams()  # those that rich puts in their place turn escape sequences into styles
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(text)

    def due(self) -> bool:
        return time.monotonic() - self._drawn_at >= self.REFRESH_S

    def show(self, view: View) -> None:
        self._drawn_at = time.monotonic()
        self._live.update(drawn(view, self._console.width, self._console.height), refresh=True)


def drawn(view: View, width: int, height: int) -> Group:
    """The live view for a terminal of this size: one line per device, working devices first."""
    devices = sorted(view.devices, key=lambda device: device.state in QUIET)  # stable: otherwise in the cohort's order
    shown = devices if len(devices) <= height - 3 else devices[: max(1, height - 4)]
    rest = devices[len(shown) :]
    bar_width = min(30, max(10, width - 48))
    name_width = max(8, width - bar_width - 28)
    table = Table.grid(padding=(0, 2, 0, 0))
    for device in shown:
        loss = "" if device.loss is None else f"loss {device.loss:.3f}"
        bar = ProgressBar(total=max(1, device.total), completed=device.done, width=bar_width)
        name = Text(f"  {shorten(device.name, name_width)}", no_wrap=True)
        table.add_row(name, Text(device.state, style="dim", no_wrap=True), bar, Text(loss, no_wrap=True))
    lines: list[RenderableType] = [Text(view.headline, style="bold", no_wrap=True, overflow="ellipsis"), table]
    if rest:
        counted = Counter(device.state for device in rest)
        summary = ", ".join(f"{count} {state}" for state, count in counted.items())
        lines.append(Text(f"  and {len(rest)} more: {summary}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def choose_display(quiet: bool = False) -> Display:
    """A live view if standard error is a terminal and logs are text, otherwise lines."""
    return LiveDisplay() if not quiet and not as_json() and sys.stderr.isatty() else line_display(quiet)


def line_display(quiet: bool = False) -> Display:
    """Lines, in JSON if logs are."""
    if quiet:
        return Display()
    return JsonDisplay() if as_json() else LineDisplay()
