"""How fast this device computes: measured once, kept beside its state, measured anew when what decides it changes."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from fedvit.errors import FedvitError
from fedvit.files import atomic_write
from fedvit.resources import Speed
from profiles.probes.host import board, installed_engine

FILE = "profile.json"

Measure = Callable[[int], Speed]


class Circumstances(Struct, frozen=True, kw_only=True):
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
    circumstances: Circumstances
    speed: Speed


class Known(NamedTuple):
    """A speed and where it comes from, or why there is none."""

    speed: Speed | None
    origin: str


def kept_speed(state: Path, threads: int) -> Speed | None:
    """What was measured under these circumstances before; None where nothing was."""
    try:
        kept = msgspec.json.decode((state / FILE).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # another bit of it: it is measured again
        return None
    return kept.speed if kept.circumstances == Circumstances.now(threads) else None


def find_speed(state: Path | None, threads: int, measure: Measure, *, fresh: bool = False) -> Known:
    """What is kept in `state`, else what `measure` says, which is then kept.

    Raises StorageFailed when it cannot be written.
    """
    if state and not fresh and (speed := kept_speed(state, threads)):
        return Known(speed, f"kept in {state / FILE}")
    try:
        speed = measure(threads)
    except (FedvitError, ImportError) as error:
        return Known(None, f"not measured: {error}")
    if state is None:
        return Known(speed, "measured now")
    kept = _Kept(circumstances=Circumstances.now(threads), speed=speed)
    atomic_write(state / FILE, msgspec.json.format(msgspec.json.encode(kept)))
    return Known(speed, f"measured now, kept in {state / FILE}")
