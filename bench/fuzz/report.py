"""Counts and findings of a fuzzing run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import psutil
from rich.table import Table

MEGABYTE = 10**6
ALLOWED_GROWTH_BYTES = 48 * MEGABYTE
"""For caches and fragmentation. With 200,000 messages, a leak of one kilobyte each is four times as much."""


@dataclass
class Count:
    """How many messages of one kind the first check accepted and refused."""

    accepted: int = 0
    refused: int = 0


@dataclass
class Part:
    """One fuzzed program or decoder."""

    name: str
    counts: dict[str, Count] = field(default_factory=dict)  # by kind of damaged message
    refusals: dict[str, int] = field(default_factory=dict)  # of messages that passed the first check, by reason
    findings: list[str] = field(default_factory=list)  # faults
    seconds: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)  # of this process, sampled at even distances

    @property
    def sent(self) -> int:
        return sum(count.accepted + count.refused for count in self.counts.values())

    def add(self, kind: str, *, accepted: bool) -> None:
        count = self.counts.setdefault(kind, Count())
        if accepted:
            count.accepted += 1
        else:
            count.refused += 1

    def finding(self, text: str) -> None:
        if text not in self.findings and len(self.findings) < 50:
            self.findings.append(text)

    def numbers(self, messages: int) -> Iterator[int]:
        """0 .. messages - 1; samples the memory of this process about thirty times, and at the end."""
        for number in range(messages):
            if number % max(1, messages // 30) == 0:
                self._sample_memory()
            yield number
        self._sample_memory()

    def _sample_memory(self) -> None:
        self.rss_bytes.append(psutil.Process().memory_info().rss)

    @property
    def growth_bytes(self) -> int:
        """From the end of the first third, when caches are full, to the end."""
        return self.rss_bytes[-1] - self.rss_bytes[len(self.rss_bytes) // 3] if self.rss_bytes else 0

    def check_memory(self) -> None:
        if self.growth_bytes > ALLOWED_GROWTH_BYTES:
            self.finding(f"memory grew by {self.growth_bytes / MEGABYTE:.0f} MB in the last two thirds")


@dataclass
class FuzzReport:
    """All parts; `findings` must be empty."""

    seed: int
    parts: list[Part]

    @property
    def messages(self) -> int:
        return sum(part.sent for part in self.parts)

    @property
    def findings(self) -> list[str]:
        return [f"{part.name}: {text}" for part in self.parts for text in part.findings]


def describe(error: object) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def tables(report: FuzzReport) -> Iterable[Table]:
    for part in report.parts:
        growth = f", memory {part.growth_bytes / MEGABYTE:+.1f} MB" if part.rss_bytes else ""
        table = Table(title=f"{part.name}: {part.sent} messages in {part.seconds:.0f} s{growth}", title_justify="left")
        for name in ("damaged", "past the first check", "refused there"):
            table.add_column(name, justify="left" if name == "damaged" else "right")
        for kind, count in sorted(part.counts.items()):
            table.add_row(kind, str(count.accepted), str(count.refused))
        for kind, number in sorted(part.refusals.items()):
            table.add_row(f"then refused: {kind}", "", str(number), style="dim")
        yield table
