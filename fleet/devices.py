"""The devices of a fleet on this machine, and their folders of images."""

from pathlib import Path

from fedvit.errors import ConfigError
from fedvit.hints import command


def device_folders(parts: Path, wanted: int | None) -> list[Path]:
    """The first `wanted` device folders of a partition. Raises ConfigError when there are fewer."""
    found = sorted(parts.glob("device-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        partition = command("fleet", "partition", "--out", parts)
        raise ConfigError(f"{parts} holds no device-0, device-1, ...: make them with `{partition}`")
    if wanted is not None and wanted > len(found):
        raise ConfigError(f"--devices {wanted}, but {parts} holds {len(found)} device folders")
    return found[:wanted]


def virtual_devices(parts: Path, count: int) -> dict[str, Path]:
    """`count` devices by name; with fewer folders in the partition, folders are assigned round-robin.

    Raises ConfigError when there is none.
    """
    folders = device_folders(parts, None)
    return {f"device-{number}": folders[number % len(folders)] for number in range(count)}
