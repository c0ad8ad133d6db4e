"""Forecast of boards in a run that has not begun: a small file in the run's folder, for the dashboard.

`coordinator plan --run` writes it; nothing of the run depends on it.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from fedvit.files import atomic_write
from fedvit.resources import Budget
from profiles.prediction import Expected

FILE = "forecast.json"


class BoardForecast(Struct, frozen=True, kw_only=True):
    """One board of the catalogue in the run."""

    board: str  # ID, or ID@MODE
    budget: Budget
    expected: Expected | None  # None: nothing fits
    refused: str | None  # why nothing fits


class Forecast(Struct, frozen=True, kw_only=True):
    """The plans of some boards for a run."""

    at: str  # ISO 8601, UTC
    images: int  # training images of each board
    test_images: int
    boards: list[BoardForecast]


def write_forecast(folder: Path, forecast: Forecast) -> None:
    """Write the forecast of the run with this folder. Raises StorageFailed."""
    atomic_write(folder / FILE, msgspec.json.format(msgspec.json.encode(forecast)))


def read_forecast(folder: Path) -> Forecast | None:
    """None if there is no readable file."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Forecast)
    except (OSError, msgspec.MsgspecError):
        return None
