"""Strikes and quarantine of the devices of a run."""

from msgspec import Struct

from coordinator.record.record import Record
from fedvit.errors import ConfigError


class Standing(Struct, frozen=True, kw_only=True):
    """Strikes and quarantine of a device in a run."""

    device: str
    strikes: int  # since its last quarantine
    quarantine: str | None  # the reason, while it lasts
    until_round: int | None  # of a quarantine that ends by itself


def standings(store: Record, run: str) -> list[Standing]:
    """The standing of every device that ever had a strike. Raises ConfigError if there is no such run."""
    store.runs.read(run)
    held = store.devices.read_current_quarantines(run, store.rounds.find_last(run) or 1)
    return [
        Standing(
            device=device,
            strikes=count.unspent,
            quarantine=held[device].reason if device in held else None,
            until_round=held[device].until_round if device in held else None,
        )
        for device, count in sorted(store.devices.count_strikes(run).items())
    ]


def release(store: Record, run: str, device: str) -> None:
    """End a device's quarantines and reset its strikes. Raises ConfigError if it has neither."""
    if not store.devices.release(run, device):
        raise ConfigError(f"device {device!r} has neither strikes nor a quarantine in run {run!r}")
