"""Regions: coordinators that are devices of another one, and send it one weighted mean of their devices' updates."""

from collections.abc import Mapping
from pathlib import Path

from coordinator.config.run import RunConfig
from fedvit.errors import ConfigError

REGION = {"role": "region"}
"""The label by which a region announces itself to its centre."""

CENTRE = "centre"
"""In the folder of a region's run: what the region keeps as a device of its centre."""


def check_kind(home: Path, *, is_region: bool) -> None:
    """Raise ConfigError if the run in a folder is that of a region, and is resumed as another one, or vice versa."""
    if is_region and not (home / CENTRE).is_dir():
        raise ConfigError("FV2205", f"run {home.name!r} is not that of a region: choose another --run")
    if not is_region and (home / CENTRE).is_dir():
        raise ConfigError(
            "FV2205", f"run {home.name!r} is that of a region: the same `fleet region` command resumes it"
        )


def is_region(labels: Mapping[str, str]) -> bool:
    """Return whether a device with these labels is a region."""
    return REGION.items() <= labels.items()


def why_no_regions(config: RunConfig) -> str | None:
    """The reason why a run cannot use one mean in place of the updates of a region's devices; None if it can."""
    if (aggregator := config.robust.aggregator) != "mean":
        return (
            f"aggregator = {aggregator!r} compares the updates of single devices, and a region sends one mean of all "
            "its devices: use aggregator = 'mean', or no regions"
        )
    if noise := config.privacy.noise_multiplier:
        return (
            f"noise_multiplier = {noise} hides the update of one device, and in the mean of a region it would hide the "
            "region alone: use no noise, or no regions"
        )
    return None
