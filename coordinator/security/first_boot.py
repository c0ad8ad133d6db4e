"""Files on a board's boot partition, by which it joins when it starts for the first time.

cloud-init reads them (the data source NoCloud, which Raspberry Pi OS and Ubuntu have for the boot partition).
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.public_keys import PublicKey

USER_DATA = "user-data"
FORMER = "user-data.before-fedvit"
TOKEN_FILE = "/etc/fedvit/token"
"""Read once by fedvit-join.service on the board, and removed by it."""
BOOT_FOLDERS = ("/boot/firmware", "/boot")
"""Folders where a running board may have its boot partition."""
HEAD = b"#cloud-config"
OURS = HEAD + b"\n# written by coordinator enroll\n"
MAX_BYTES = 1 << 20


class UpdateSource(NamedTuple):
    """Folder and key of the newer versions that a board installs."""

    source: str  # folder or URL of coordinator release, as the board sees it
    key: PublicKey


def write_boot_files(
    folder: Path, device: str, token: str, package: Path, updates: UpdateSource | None = None
) -> list[Path]:
    """Write what lets `device` install a package and join with `token` at its first start; return the written files.

    With `updates` the board's root pins their key then, and starts the timer.

    User data that is there already, as of an imaging program, is kept beside it, and extended. Raises ConfigError if
    the folder or the package is missing, or the user data is not cloud-init's.
    """
    check_boot_files(folder, package)
    file, former = folder / USER_DATA, folder / FORMER
    if file.exists() and not file.read_bytes().startswith(OURS):
        shutil.copyfile(file, former)
    settings = _read(former)
    copy = folder / package.name
    if not copy.exists() or not copy.samefile(package):
        atomic_write(copy, package.read_bytes())
    if "hostname" not in settings:
        settings["hostname"] = device
    settings.setdefault("write_files", []).append({"path": TOKEN_FILE, "permissions": "0600", "content": f"{token}\n"})
    settings.setdefault("runcmd", []).extend(make_commands(package.name, updates))
    atomic_write(file, OURS, yaml.safe_dump(settings, sort_keys=False, width=120).encode())
    meta_data = folder / "meta-data"
    if not meta_data.exists():
        atomic_write(meta_data, f"instance-id: fedvit-{device}\n".encode())
    return [file, meta_data, copy]


def check_boot_files(folder: Path, package: Path) -> None:
    """Check what `write_boot_files` needs, before there is a token. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            "FV1330", f"{folder} is no folder; mount the boot partition of the board's card, and name its folder"
        )
    if not package.is_file() or package.suffix != ".deb":
        raise ConfigError("FV1330", f"{package} is no Debian package; name fedvit-edge_*.deb, which make dist builds")
    _read(folder / USER_DATA)


def make_commands(package: str, updates: UpdateSource | None = None) -> list[list[str]]:
    """Make the commands of the first start: they install the package, and start its services and its updates."""
    places = " ".join(f"{folder}/{package}" for folder in BOOT_FOLDERS)
    install = f'for each in {places}; do if [ -e "$each" ]; then apt-get install --yes "$each"; break; fi; done'
    commands = [["sh", "-c", install], ["systemctl", "enable", "--now", "fedvit-join.service", "fedvit-edge.service"]]
    if updates:
        commands.append(["edge-client", "update", updates.source, "--update-key", updates.key])
        commands.append(["systemctl", "enable", "--now", "fedvit-update.timer"])
    return commands


def _read(file: Path) -> dict[str, Any]:
    """Read user data; empty without a file. Raises ConfigError if it is not a cloud-config."""
    if not file.exists():
        return {}
    text = file.read_bytes()[:MAX_BYTES]
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("FV1330", f"{file} cannot be read as YAML ({error}); move it away, or repair it") from None
    if not text.startswith(HEAD) or not (values is None or isinstance(values, dict)):
        raise ConfigError(
            "FV1330", f"{file} does not begin with #cloud-config; move it away, and add its commands later"
        )
    for key in ("write_files", "runcmd"):
        if not isinstance((values or {}).get(key, []), list):
            raise ConfigError("FV1330", f"{file}: {key} is not a list; move it away, or repair it")
    return values or {}
