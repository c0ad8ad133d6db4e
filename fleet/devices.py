"""The devices of a fleet on this machine, and their folders of images."""

import re
from pathlib import Path

from fedvit.errors import ConfigError
from fedvit.hints import command


def device_folders(parts: Path, count: int | None) -> list[Path]:
    """List the first `count` device folders of a partition, or all. Raises ConfigError when there are fewer."""
    numbered = (path for path in parts.glob("device-*") if re.fullmatch(r"device-\d+", path.name, re.ASCII))
    folders = sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]))
    if not folders:
        partition = command("fleet", "partition", "--out", parts)
        raise ConfigError("FV2101", f"{parts} holds no device-0, device-1, ...: make them with `{partition}`")
    if count is not None and count > len(folders):
        raise ConfigError("FV2101", f"--devices {count}, but {parts} holds {len(folders)} device folders")
    return folders[:count]


def virtual_devices(parts: Path, count: int) -> dict[str, Path]:
    """Name `count` devices; if the partition has fewer folders, these are assigned round-robin.

    Raises ConfigError for a partition without folders.
    """
    folders = device_folders(parts, None)
    return {f"device-{number}": folders[number % len(folders)] for number in range(count)}
