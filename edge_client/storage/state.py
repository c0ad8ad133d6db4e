"""The state folder of a device, and its permanent name."""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from edge_client.settings import DeviceSettings
from fedvit.blobs import digest_of
from fedvit.errors import ConfigError
from fedvit.files import atomic_write, name_failure
from fedvit.wire.topics import check_name


def home_folder() -> Path | None:
    """Return the user's home folder; None for a user without one, as systemd's DynamicUser may have."""
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry among the users of the system
        return None


def state_base() -> Path:
    """Return the folder of all states of this user. Raises ConfigError for a user without a home folder."""
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "fedvit"
    if home := home_folder():
        return home / ".local" / "state" / "fedvit"
    raise ConfigError("FV1419", "this user has no home folder for the device's state: --state names a folder")


def identity_folder(state: Path | None) -> Path:
    """Return the folder of key and certificate: below the state if one is named, else one per user."""
    return (state or state_base()) / "identity"


def default_state(data: Path) -> Path:
    """The default state folder: one per data folder."""
    folder = data.resolve()
    return state_base() / f"{folder.name}-{hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()}"


def state_folder(data: Path | None, state: Path | None) -> Path:
    if folder := state or (default_state(data) if data else None):
        return folder
    raise ConfigError("FV1402", "--data or --state is missing: the folder of this device's images, or of its state")


def split_file(state: Path) -> Path:
    """Return the file that lists which images of the device are for testing."""
    return state / "split.json"


def status_file(state: Path) -> Path:
    return state / "status.json"


def existing_state(settings: DeviceSettings) -> Path:
    """Return the state folder of a device that has taken part in a run. Raises ConfigError."""
    folder = state_folder(settings.data, settings.state)
    if not (folder / "vault").is_dir():
        raise ConfigError("FV1411", f"no state of a device with a run in {folder}; --state names another folder")
    return folder


def lock_state(folder: Path) -> int:
    """Make sure that no other process uses this state. Raises ConfigError naming the one that does."""
    with name_failure(f"state folder {folder} cannot be used", ConfigError, "FV1411"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(handle, 32, 0).decode().strip()
        hint = "stop that process, or choose another folder with --state"
        raise ConfigError("FV1410", f"state folder {folder} is in use by process {owner}: {hint}") from None
    with contextlib.suppress(OSError):  # on a full disk the lock works without the process id
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


@contextlib.contextmanager
def lock_new_state(folder: Path) -> Iterator[int]:
    """Lock the state while a device is built on it. If that fails, a state that did not exist before is removed."""
    is_new = not folder.exists()
    lock = lock_state(folder)
    try:
        yield lock
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise


def stray_states() -> list[Path]:
    """State folders of this user whose devices never took part in a run and that no process uses."""
    base = state_base()
    folders = sorted(base.iterdir()) if base.is_dir() else []
    return [
        folder
        for folder in folders
        if folder != identity_folder(None)
        and any((folder / name).is_file() for name in ("lock", "profile.json"))
        and not in_use(folder)
        and not any((folder / "vault").glob("*/*"))
        and not (folder / "identity").exists()
    ]


def in_use(folder: Path) -> bool:
    """Return True if a process has locked this state."""
    try:
        handle = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def device_id(folder: Path, wanted: str | None, data: Path) -> str:
    """The device's permanent name: given, stored, or made from the data folder's name."""
    file = folder / "device-id"
    if wanted is None and file.is_file():
        return read_device_id(file)
    if wanted is None:
        stem = re.sub("[^A-Za-z0-9_-]", "-", data.resolve().name).lstrip("-")
        wanted = f"{stem[:48] or 'device'}-{secrets.token_hex(2)}"
    check_name(wanted, "--id")
    content = f"{wanted}\n{digest_of(wanted.encode())}\n".encode()
    if not (file.is_file() and file.read_bytes() == content):  # so that a device with a full disk can restart
        atomic_write(file, content)
    return wanted


def read_device_id(file: Path) -> str:
    """Return the name in a file: its first line; the second is the name's digest. Raises ConfigError."""
    name, _, digest = file.read_text(errors="replace").strip().partition("\n")
    if digest != digest_of(name.encode()):
        raise ConfigError("FV1414", f"{file} is damaged: start once with --id and this device's name")
    return check_name(name, f"device id in {file}")
