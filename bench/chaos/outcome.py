"""Figures of a scenario, as JSON and for a terminal."""

import re
from collections import Counter
from pathlib import Path

from msgspec import Struct, field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.chaos.schedule import Fault
from bench.chaos.watch import Memory, Moment
from profiles.report.terminal import table as new_table

PICTURE_WIDTH = 72
_ACCEPTED = re.compile(r"result accepted .*\bdevice=(\S+) round=(\d+) kind=(\S+)")


class InjectedFault(Struct, frozen=True):
    """A fault, and how long recovery took."""

    fault: Fault
    done_at_s: float  # when the fault was over
    recovered_s: float | None  # until a round with all devices closed; None: none did


class Outcome(Struct, frozen=True, kw_only=True):
    """Figures of a scenario; `ok` is whether all expectations hold."""

    seed: int
    seconds: float
    injected: list[InjectedFault] = field(name="suffered")
    runs: int  # finished
    runs_compared: int  # of them, those in which every device answered every round
    runs_equal: int  # of those, with the tensors of the undisturbed run, bit for bit
    rounds_closed: int
    rounds_complete: int  # every device's result was accepted
    round_s: float | None  # median over complete rounds, from opening to closing
    results_accepted: int
    results_refused: int
    duplicates_applied: int
    longest_standstill_s: float
    memory: dict[str, Memory]
    carried_up_bytes: int  # on the devices' links, with the overhead of MQTT and control messages
    carried_down_bytes: int
    blob_bytes: int  # of that, the blobs that were fetched and uploaded
    moments: list[Moment]

    @property
    def ok(self) -> bool:
        recovered = all(entry.recovered_s is not None for entry in self.injected)
        return recovered and not self.duplicates_applied and self.runs_equal == self.runs_compared

    @property
    def overhead(self) -> float | None:
        """Bytes on the links beyond those of blobs, as a share of those."""
        if not self.blob_bytes:
            return None
        return (self.carried_up_bytes + self.carried_down_bytes) / self.blob_bytes - 1


def count_duplicates(log: Path) -> int:
    """Results that a coordinator accepted more than once, from its log and the rotated files of it."""
    taken: Counter[tuple[str, ...]] = Counter()
    for file in log.parent.glob(f"{log.name}*"):
        taken.update(_ACCEPTED.findall(file.read_text(errors="replace")))
    return sum(count - 1 for count in taken.values())


def shown(outcome: Outcome) -> RenderableType:
    return Group(_faults(outcome), _figures(outcome), Text(picture(outcome.moments, outcome.seconds), no_wrap=True))


def _faults(outcome: Outcome) -> Table:
    table = new_table("faults")
    for name in ("kind", "target", "times", "recovered", "slowest"):
        table.add_column(name)
    pairs: dict[tuple[str, str], list[InjectedFault]] = {}
    for entry in outcome.injected:
        pairs.setdefault((entry.fault.kind, entry.fault.target), []).append(entry)
    for (kind, target), entries in sorted(pairs.items()):
        times = [entry.recovered_s for entry in entries if entry.recovered_s is not None]
        slowest = f"{max(times):.1f} s" if times else "never"
        table.add_row(kind, target, str(len(entries)), str(len(times)), slowest)
    return table


def _figures(outcome: Outcome) -> Table:
    table = new_table("outcome")
    table.add_column("figure")
    table.add_column("value")
    equal = f"{outcome.runs_equal} of {outcome.runs_compared} in which every device answered every round"
    table.add_row("runs finished", str(outcome.runs))
    table.add_row("runs with the undisturbed run's tensors", equal)
    table.add_row("rounds closed / with all devices", f"{outcome.rounds_closed} / {outcome.rounds_complete}")
    if outcome.round_s is not None:
        table.add_row("a round takes (median)", f"{outcome.round_s:.1f} s")
    table.add_row("results accepted / refused", f"{outcome.results_accepted} / {outcome.results_refused}")
    table.add_row("results applied twice", str(outcome.duplicates_applied))
    table.add_row("longest standstill", f"{outcome.longest_standstill_s:.1f} s")
    up, down = outcome.carried_up_bytes / 1e6, outcome.carried_down_bytes / 1e6
    table.add_row("carried up / down", f"{up:.1f} / {down:.1f} MB")
    if outcome.overhead is not None:
        table.add_row("of that beyond blobs", f"{outcome.overhead:.1%}")
    for name, memory in sorted(outcome.memory.items()):
        start, end, peak = (value / 1e6 for value in (memory.start, memory.end, memory.peak))
        table.add_row(f"memory of {name}: first / last / most", f"{start:.0f} / {end:.0f} / {peak:.0f} MB")
    return table


def picture(moments: list[Moment], seconds: float) -> str:
    """One line per target with its faults over time, and a last line with the moments at which rounds closed.

    >>> print(picture([Moment(0.0, "a", "k"), Moment(9.9, "a", "h"), Moment(5.0, "rounds", "|")], 10.0))
    a       k......................................................................h
    rounds  ....................................|...................................
    """
    names = sorted({moment.target for moment in moments}, key=lambda name: (name == "rounds", name))
    lines = []
    for name in names:
        signs = ["."] * PICTURE_WIDTH
        for moment in moments:
            if moment.target == name:
                signs[min(PICTURE_WIDTH - 1, int(moment.at_s / seconds * PICTURE_WIDTH))] = moment.sign
        lines.append(f"{name:{max(map(len, names))}s}  {''.join(signs)}")
    return "\n".join(lines)
