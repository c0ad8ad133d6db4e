"""Files on a board's boot partition, by which it joins when it starts for the first time.

cloud-init reads them (the data source NoCloud, which Raspberry Pi OS and Ubuntu have for the boot partition). It runs
most commands of user data once, also if the power fails meanwhile. So what it runs here, at each start, is a service
that continues where it was, and tries again while there is no network.
"""

import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.public_keys import PublicKey

USER_DATA = "user-data"
FORMER = "user-data.before-fedvit"
FOLDER = "fedvit"
"""Files on the boot partition: package, token, and the script of the first start."""
TOKEN, SCRIPT = "token", "fedvit-first-boot.sh"
TOKEN_FILE = "/etc/fedvit/token"
"""Read by fedvit-join.service on the board, and removed by it."""
UNIT = "fedvit-first-boot"
HEAD = b"#cloud-config"
OURS = HEAD + b"\n# written by coordinator enroll\n"
MAX_BYTES = 1 << 20
_SCRIPT = f"""\
#!/bin/sh
# written by coordinator enroll. {UNIT}.service runs it at each start, and each of its steps once, those with the token
# once for each token on the card; after a power cut the interrupted step begins anew.
set -eu
card=$(dirname "$0") marks=/var/lib/cloud/instance
export DEBIAN_FRONTEND=noninteractive HOME=/root

give_token() {{ install -D -m 0600 "$card/{TOKEN}" {TOKEN_FILE}; }}

apt() {{ apt-get -o DPkg::Lock::Timeout=600 --yes --quiet "$@"; }}

install_package() {{
  # apt would read the package six times before it unpacks it, which takes a board a minute
  dpkg --configure -a && dpkg --install "$card"/PACKAGE && return
  needed=$(dpkg-deb --field "$card"/PACKAGE Installed-Size) free=$(df --output=avail -k /opt | tail -n 1)
  if [ ! -e /usr/bin/edge-client ] && [ "$free" -lt "$needed" ]; then
    echo "not enough free space: the package needs $needed KiB at /opt, $free are free; remove other files" >&2
    return 1
  fi
  # the board's image lacks a library
  apt update
  apt install --fix-broken "$card"/PACKAGE
}}

start_services() {{
  systemctl enable fedvit-join.service fedvit-edge.service
  systemctl start --no-block fedvit-join.service fedvit-edge.service
}}

follow_updates() {{
  UPDATE
}}

# empty if the owner has removed it
token=$(sha256sum "$card/{TOKEN}" 2> /dev/null | cut -c -64)
for mark in ${{token:+give_token-$token}} install_package ${{token:+start_services-$token}} follow_updates; do
  if [ ! -e "$marks/fedvit-$mark" ]; then
    "${{mark%%-*}}"
    sync
    : > "$marks/fedvit-$mark"
    sync
  fi
done
"""


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
    if "hostname" not in settings:
        settings["hostname"] = device
    settings.setdefault("bootcmd", []).append(make_command())
    own = folder / FOLDER
    own.mkdir(exist_ok=True)
    for other in own.glob("*.deb"):  # of a former call
        if not other.samefile(package):
            other.unlink()
    contents = {
        own / package.name: package.read_bytes(),
        own / TOKEN: f"{token}\n".encode(),
        own / SCRIPT: make_script(package.name, updates).encode(),
        file: OURS + yaml.safe_dump(settings, sort_keys=False, width=120).encode(),
    }
    meta_data = folder / "meta-data"
    if not meta_data.exists():
        contents[meta_data] = f"instance-id: fedvit-{device}\n".encode()
    for path, content in contents.items():
        atomic_write(path, content)
    return list(contents)


def check_boot_files(folder: Path, package: Path) -> None:
    """Check what `write_boot_files` needs, before there is a token. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            "FV1330", f"{folder} is no folder; mount the boot partition of the board's card, and name its folder"
        )
    if not package.is_file() or package.suffix != ".deb":
        raise ConfigError("FV1330", f"{package} is no Debian package; name fedvit-edge_*.deb, which make dist builds")
    _read(folder / USER_DATA)


def make_script(package: str, updates: UpdateSource | None = None) -> str:
    """Make the script of the first start: it installs the package, and starts its services and its updates."""
    update = ":"
    if updates:
        update = shlex.join(["edge-client", "update", updates.source, "--update-key", updates.key])
        update += "\n  systemctl enable --now fedvit-update.timer"
    return _SCRIPT.replace("UPDATE", update).replace("PACKAGE", shlex.quote(package))


def make_command() -> list[str]:
    """Make the command of each start: it lets a service run the script, wherever the board has its boot partition."""
    settings = ("Type=oneshot", "Restart=on-failure", "RestartSec=30", "Wants=network-online.target")
    options = [f"--property={setting}" for setting in (*settings, "After=network-online.target")]
    # no word that systemd would have to quote: it reads the unit again when the package is installed
    search = ["find", "/boot", "-name", SCRIPT, "-exec", "sh", "{}", "+"]
    return ["systemd-run", "--no-block", f"--unit={UNIT}", *options, *search]


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
    if not isinstance((values or {}).get("bootcmd", []), list):
        raise ConfigError("FV1330", f"{file}: bootcmd is not a list; move it away, or repair it")
    return values or {}
