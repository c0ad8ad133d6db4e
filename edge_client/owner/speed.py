"""The compute speed of this device: measured once, stored with its state, measured again when a condition changes.

A probe that was given up is stored, too: each start would lose the same minutes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from fedvit.errors import FedvitError
from fedvit.files import atomic_write
from fedvit.kernels import find_library
from fedvit.resources import Speed
from profiles.probes.host import board, find_engine
from profiles.probes.speed import ProbeTooSlow

FILE = "profile.json"

Measure = Callable[[int], Speed]


class Conditions(Struct, frozen=True, kw_only=True):
    """The conditions on which a measured speed depends: not the version of this software, which updates change."""

    engine: str | None
    engine_version: str | None
    threads: int
    board: str | None
    kernels: bool = False  # the optional kernels are installed

    @classmethod
    def now(cls, threads: int) -> Self:
        engine, engine_version = find_engine()
        return cls(
            engine=engine,
            engine_version=engine_version,
            threads=threads,
            board=board(),
            kernels=find_library() is not None,
        )


class _Kept(Struct, frozen=True, kw_only=True):
    conditions: Conditions
    speed: Speed | None
    given_up: str | None = None  # reason why the speed is missing


class Known(NamedTuple):
    """A speed and its origin, or the reason why it is missing."""

    speed: Speed | None
    origin: str


def read_stored(state: Path, threads: int) -> Known | None:
    """Return the outcome of the measurement under the same conditions; None if there was none."""
    try:
        entry = msgspec.json.decode((state / FILE).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # a damaged file: the speed is measured again
        return None
    if entry.conditions != Conditions.now(threads):
        return None
    if entry.speed:
        return Known(entry.speed, f"stored in {state / FILE}")
    why = f"not measured: {entry.given_up}; `edge-client profile --fresh` tries it again"
    return Known(None, why) if entry.given_up else None


def find_speed(state: Path | None, threads: int, measure: Measure, *, fresh: bool = False) -> Known:
    """Return the stored outcome in `state`, else that of a new measurement, which is then stored.

    Raises StorageFailed when it cannot be written.
    """
    if state and not fresh and (stored := read_stored(state, threads)):
        return stored
    speed, given_up = None, None
    try:
        speed, origin = measure(threads), "measured now"
    except (FedvitError, ImportError) as error:
        origin = f"not measured: {error}"
        if not isinstance(error, ProbeTooSlow):  # such a failure takes no time, and may be mended before the next start
            return Known(None, origin)
        given_up = str(error)
    if state is None:
        return Known(speed, origin)
    entry = _Kept(conditions=Conditions.now(threads), speed=speed, given_up=given_up)
    atomic_write(state / FILE, msgspec.json.format(msgspec.json.encode(entry)))
    return Known(speed, f"{origin}, stored in {state / FILE}")
