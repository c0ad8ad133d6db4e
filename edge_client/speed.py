"""The compute speed of this device: measured once, stored with its state, measured again when a condition changes."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct, field

from fedvit.errors import FedvitError
from fedvit.files import atomic_write
from fedvit.resources import Speed
from profiles.probes.host import board, installed_engine

FILE = "profile.json"

Measure = Callable[[int], Speed]


class Conditions(Struct, frozen=True, kw_only=True):
    """What a measured speed depends on."""

    software: str
    engine: str | None
    engine_version: str | None
    threads: int
    board: str | None

    @classmethod
    def now(cls, threads: int) -> Self:
        engine, engine_version = installed_engine()
        return cls(
            software=version("fedvit"),
            engine=engine,
            engine_version=engine_version,
            threads=threads,
            board=board(),
        )


class _Kept(Struct, frozen=True, kw_only=True):
    conditions: Conditions = field(name="circumstances")
    speed: Speed


class Known(NamedTuple):
    """A speed and its origin, or the reason why it is missing."""

    speed: Speed | None
    origin: str


def kept_speed(state: Path, threads: int) -> Speed | None:
    """The speed that was measured under the same conditions; None if there is none."""
    try:
        kept = msgspec.json.decode((state / FILE).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # a damaged file: the speed is measured again
        return None
    return kept.speed if kept.conditions == Conditions.now(threads) else None


def find_speed(state: Path | None, threads: int, measure: Measure, *, fresh: bool = False) -> Known:
    """The stored speed in `state`, else a new measurement, which is then stored.

    Raises StorageFailed when it cannot be written.
    """
    if state and not fresh and (speed := kept_speed(state, threads)):
        return Known(speed, f"stored in {state / FILE}")
    try:
        speed = measure(threads)
    except (FedvitError, ImportError) as error:
        return Known(None, f"not measured: {error}")
    if state is None:
        return Known(speed, "measured now")
    kept = _Kept(conditions=Conditions.now(threads), speed=speed)
    atomic_write(state / FILE, msgspec.json.format(msgspec.json.encode(kept)))
    return Known(speed, f"measured now, stored in {state / FILE}")
