"""The kinds of faults, and schedules of them drawn from a seed: the same seed gives the same schedule."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from fedvit.errors import ConfigError

COORDINATOR, BROKER, DEVICE = "coordinator", "broker", "device"
YEAR_S = 365 * 86400.0


class Kind(NamedTuple):
    """A kind of fault: its possible targets and its shortest and longest duration; 0: it is over at once."""

    targets: tuple[str, ...]
    least_s: float
    most_s: float
    description: str


KINDS: dict[str, Kind] = {
    "kill": Kind((COORDINATOR, BROKER, DEVICE), 0, 0, "kill -9; the coordinator and devices are started again"),
    "hang": Kind((COORDINATOR, BROKER, DEVICE), 2, 20, "stopped (SIGSTOP) for a while"),
    "drop": Kind((DEVICE,), 1, 60, "the link is cut, and connections are refused for a while"),
    "silence": Kind((DEVICE,), 2, 60, "the link holds back all data for a while; connections stay open"),
    "twin": Kind((DEVICE,), 0, 0, "a second process with the same id"),
    "full": Kind((COORDINATOR, DEVICE), 3, 20, "no file can grow for a while, as on a full disk"),
    "descriptors": Kind((COORDINATOR, DEVICE), 3, 20, "no file or connection can be opened for a while"),
    "clock": Kind((COORDINATOR, DEVICE), 0, 0, "killed, and started with a clock a year off that is corrected later"),
    "power": Kind((DEVICE,), 0, 0, "killed while it writes its vault"),
    "worker": Kind((COORDINATOR,), 0, 0, "kill -9 of its worker process, which it starts again"),
}


class Fault(Struct, frozen=True):
    """One line of a schedule."""

    number: int
    at_s: float  # earliest time since the start: faults are injected one after the other
    kind: str
    target: str  # coordinator, broker, or a device's id
    lasts_s: float
    clock_s: float = 0.0  # how far the clock is off

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        clock = f" by {self.clock_s / 86400:+.0f} days" if self.clock_s else ""
        return f"{self.number:3d}. at {self.at_s:6.1f} s  {self.kind:11s} {self.target}{lasts}{clock}"


def draw_schedule(
    seed: int,
    devices: Sequence[str],
    *,
    duration_s: float,
    every_s: float,
    kinds: Sequence[str] = (),
    longest_s: float = 60.0,
) -> list[Fault]:
    """Faults about `every_s` apart; every pair of kind and target is used once before any is used again.

    `kinds` are the kinds to use; empty: all. No fault lasts longer than `longest_s`. Raises ConfigError for an unknown
    kind.
    """
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(f"fault {name!r} is unknown; known are {', '.join(KINDS)}")
    random_ = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    faults: list[Fault] = []
    at_s = every_s * random_.uniform(0.5, 1.5)
    while at_s < duration_s:
        if not pairs:
            pairs = [(each, target) for each in kinds or KINDS for target in KINDS[each].targets]
            random_.shuffle(pairs)
        name, target = pairs.pop()
        kind = KINDS[name]
        most_s = max(kind.least_s, min(kind.most_s, longest_s))
        faults.append(
            Fault(
                number=len(faults) + 1,
                at_s=round(at_s, 1),
                kind=name,
                target=random_.choice(list(devices)) if target == DEVICE else target,
                lasts_s=round(random_.uniform(kind.least_s, most_s), 1),
                clock_s=random_.choice((-YEAR_S, YEAR_S)) if name == "clock" else 0.0,
            )
        )
        at_s += every_s * random_.uniform(0.5, 1.5)
    return faults
