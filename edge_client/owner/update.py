"""`edge-client update`: installs a signed newer version beside the present one, and switches if it works here.

A device that is killed at any moment keeps one whole version: a new one is unpacked under another name, tried, made
durable and renamed; then each link is replaced by one rename. Docs: decisions/0050.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_client.health.doctor_context import Finding
from edge_client.owner.release_source import count_free_bytes, download, read_list
from edge_client.storage.installed import CURRENT, FORMER, OWN, VERSIONS, Installation
from fedvit.errors import BadPayload, ConfigError, DeviceTrouble, DiskFull, PeerRefused, StorageFailed
from fedvit.files import atomic_write, storage_failed, sync_folder
from fedvit.public_keys import PublicKey
from fedvit.releases import STABLE, Offer, Package, ReleaseList, check_members, choose_offer, parse_version

SETTINGS = "update.json"
PARTIAL = ".package-"
"""Beginning of the name of a package that is being fetched; there is one at most."""
RESERVE_BYTES = 50_000_000
"""Disk space that an update leaves free."""
COMPILED_SHARE = 0.3
"""Compiled files of Python, as a share of what is unpacked."""
DOCTOR_S = 600.0
OWN_PACKAGES = ("edge_client", "export", "fedvit", "profiles")
"""Packages that the service imports, and the doctor only in part."""
ACCELERATORS = ("fedvit-kernels", "onnxruntime-")
"""Beginnings of the names of packages that an owner has added for the hardware: a new version must have them, too."""

Report = Callable[[str], None]


class UpdateSettings(Struct, frozen=True, kw_only=True):
    """The owner's choice, and what must not be forgotten. Only the installation's owner can write it."""

    source: str = ""  # folder or URL of releases
    key: PublicKey = ""  # whose releases are installed; "": nobody's yet
    channel: str = STABLE
    serials: dict[str, int] = {}  # by channel: the newest list that was seen
    refused: dict[str, str] = {}  # versions that did not work here -> why


class _Report(Struct, frozen=True):
    """The output of `edge-client doctor --json`."""

    findings: tuple[Finding, ...]


@dataclass
class Updater:
    """Updates of one installation; `doctor_options` are those of the device for `edge-client doctor`."""

    installation: Installation
    doctor_options: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    report: Report = lambda _: None

    # --- settings -------------------------------------------------------------------------------------

    @property
    def settings(self) -> UpdateSettings:
        """The stored settings. Raises ConfigError if they cannot be read."""
        file = self.installation.root / SETTINGS
        try:
            return msgspec.json.decode(file.read_bytes(), type=UpdateSettings)
        except FileNotFoundError:
            return UpdateSettings()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                "FV1467", f"{file} cannot be read: {error}; remove it, and name source and --update-key again"
            ) from error

    def store(self, settings: UpdateSettings) -> None:
        """Replace the settings. Raises StorageFailed."""
        content = msgspec.json.format(msgspec.json.encode(settings))
        atomic_write(self.installation.root / SETTINGS, content, b"\n", private=True)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other updates out, and remove what a killed one has left. Raises ConfigError."""
        root = self.installation.root
        try:
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            if not os.access(root, os.W_OK):
                raise PermissionError(13, "permission denied")
        except OSError as error:
            raise ConfigError(
                "FV1461", f"{root} cannot be changed: {error.strerror}; run the update as its owner, such as with sudo"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._settle()
            self._clean()
            yield
        except BlockingIOError:
            raise ConfigError("FV1461", f"another update of {root} is running; wait for its end") from None
        finally:
            os.close(handle)

    # --- the update -----------------------------------------------------------------------------------

    def find_offer(self) -> tuple[Offer, Package] | None:
        """Return the version that the list offers to this device, and its package; None if there is nothing newer.

        Raises LinkDown, PeerRefused for another key, an older list or an older version, BadPayload.
        """
        settings = self.settings
        if not settings.source or not settings.key:
            missing = "--update-key" if settings.source else "the folder or URL of releases"
            raise ConfigError(
                "FV1467", f"{missing} is missing: `edge-client update SOURCE --update-key KEY` stores both"
            )
        releases = read_list(settings.source, settings.channel, settings.key)
        self._check_serial(releases, settings)
        offer = choose_offer(releases, self.labels)
        newest = max([version("fedvit"), *settings.refused], key=parse_version)
        if offer is None:
            self.report(f"channel {settings.channel} has no version for the labels of this device")
        elif offer.version in settings.refused:
            self.report(f"{offer.version} is offered, and was refused: {settings.refused[offer.version]}")
        elif parse_version(offer.version) < parse_version(newest):
            raise PeerRefused(
                "FV1464",
                f"channel {settings.channel} offers {offer.version}, and this device had {newest} already: an older "
                "version is never installed. Build it again with a higher number",
            )
        elif parse_version(offer.version) == parse_version(newest):
            self.report(f"{newest} is the newest version of channel {settings.channel}")
        else:
            return offer, self._choose_package(offer)
        return None

    def install(self, offer: Offer, package: Package) -> None:
        """Install a version beside the present one, try it, and switch to it.

        Raises LinkDown, BadPayload, DiskFull, StorageFailed, DeviceTrouble if it does not work here.
        """
        root, folder = self.installation.root, f"{VERSIONS}/{offer.version}"
        new, archive = root / VERSIONS / ".new", root / VERSIONS / f"{PARTIAL}{package.sha256[:16]}"
        needed = package.size + int((1 + COMPILED_SHARE) * package.unpacked) + RESERVE_BYTES
        if (free := count_free_bytes(root)) < needed:
            raise DiskFull(
                "FV1469",
                f"{offer.version} needs {needed / 1e6:.0f} MB at {root}, and {free / 1e6:.0f} MB are free; make room, "
                "such as by edge-client gc. The present version goes on",
            )
        try:
            archive.parent.mkdir(exist_ok=True)
            for other in archive.parent.glob(f"{PARTIAL}*"):  # of a version that is not offered any more
                if other != archive:
                    other.unlink()
            self.report(f"fetching {offer.version} ({package.size / 1e6:.1f} MB) from {self.settings.source}")
            download(self.settings.source, package, archive)
            self._unpack(archive, package, new)
            self._check(new, offer.version)
            os.sync()  # thousands of files at once
            new.rename(root / folder)
            sync_folder(root / VERSIONS)
            if self.installation.is_proven():
                self.installation.set_link(FORMER, self.installation.started)
            self.installation.set_link(CURRENT, folder)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full disk needs the room
                archive.unlink(missing_ok=True)
            failed = storage_failed(f"{offer.version} cannot be installed at {root}", error)
            kind = DiskFull if isinstance(failed, DiskFull) else StorageFailed
            raise kind("FV1469", f"{failed}; the present version goes on") from error
        finally:
            with contextlib.suppress(OSError):
                self._clean()

    def go_back(self) -> str:
        """Switch to the version before this one; the present one is not installed again. Raises ConfigError."""
        own, former = version("fedvit"), self.installation.read_link(FORMER)
        if self.installation.started != self.installation.read_link(CURRENT) or former == self.installation.started:
            raise ConfigError("FV1461", f"there is no version before {own} here to go back to")
        self.refuse(own, "its owner went back")
        self.installation.set_link(CURRENT, former)
        return "the version of its package" if former == OWN else Path(former).name

    def refuse(self, name: str, why: str) -> None:
        """Note a version that is not installed (again)."""
        settings = self.settings
        self.store(msgspec.structs.replace(settings, refused={**settings.refused, name: why}))

    def forget_refusals(self) -> None:
        """Let refused versions be tried again, with new trials."""
        self.store(msgspec.structs.replace(self.settings, refused={}))
        with contextlib.suppress(FileNotFoundError):
            self.installation.marks.unlink()

    # --- parts ----------------------------------------------------------------------------------------

    def _check_serial(self, releases: ReleaseList, settings: UpdateSettings) -> None:
        seen = settings.serials.get(releases.channel, 0)
        if releases.serial < seen:
            raise PeerRefused(
                "FV1464",
                f"{settings.source}/{releases.channel}.json is older than a list that this device knows (serial "
                f"{releases.serial}, known {seen}); nothing of it is used. Copy the newest folder of releases there",
            )
        if releases.serial > seen:
            serials = {**settings.serials, releases.channel: releases.serial}
            self.store(msgspec.structs.replace(settings, serials=serials))

    def _choose_package(self, offer: Offer) -> Package:
        python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine()
        for package in offer.packages:
            if (package.python, package.machine) == (python, machine) and package.version == offer.version:
                return package
        raise BadPayload(
            "FV1465",
            f"{offer.version} has no package for Python {python} on {machine}; its publisher can add one "
            "(make dist DEBS=..., coordinator release)",
        )

    def _unpack(self, archive: Path, package: Package, new: Path) -> None:
        """Unpack a package, and make it an environment with the Python of the present one."""
        python = Path(sys.executable).resolve()
        packages = new / "lib" / f"python{package.python}" / "site-packages"
        try:
            with zipfile.ZipFile(archive) as content:
                if check_members(content.infolist(), package.file) != package.unpacked:
                    raise BadPayload("FV1465", f"{package.file} does not unpack to the size in the signed list")
                packages.mkdir(parents=True)
                content.extractall(packages)
        except zipfile.BadZipFile as error:
            raise BadPayload("FV1465", f"{package.file} is no ZIP file: {error}; build it anew") from error
        finally:
            archive.unlink()
        (new / "bin").mkdir()
        (new / "bin" / "python").symlink_to(python)
        lines = {"home": str(python.parent), "include-system-site-packages": "false", "version": package.python}
        (new / "pyvenv.cfg").write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        # of the others, the doctor's Python compiles what it imports: whole packages take a board minutes
        own = [folder for name in OWN_PACKAGES if (folder := packages / name).is_dir()]
        subprocess.run([new / "bin" / "python", "-P", "-m", "compileall", "-q", *own], check=False)

    def _check(self, new: Path, name: str) -> None:
        """Raise DeviceTrouble if a version does not work here where the present one does; it is then refused."""
        missing = sorted(
            one for one in _list_packages(sysconfig.get_path("purelib")) - _list_packages(*new.glob("lib/*/*"))
            if one.startswith(ACCELERATORS)
        )  # fmt: skip
        if missing:
            raise BadPayload(
                "FV1465", f"{name} lacks {', '.join(missing)}, which this device has; build its package with them"
            )
        self.report(f"trying {name}: edge-client doctor, with a training step")
        troubles = self._run_doctor(new / "bin" / "python")
        if troubles:  # those that the present version has as well say nothing about the new one
            present = self._run_doctor(Path(sys.executable))
            troubles = {check: what for check, what in troubles.items() if check not in present}
        if troubles:
            why = "; ".join(f"{check}: {what}" for check, what in troubles.items())
            self.refuse(name, why)
            raise DeviceTrouble(
                "FV1466",
                f"{name} does not work here, {version('fedvit')} goes on: {why}. Tell its publisher; "
                "`edge-client update --retry` tries it again",
            )

    def _run_doctor(self, python: Path) -> dict[str, str]:
        """Return the errors that `edge-client doctor` of an environment finds, by check."""
        command = [str(python), "-P", "-m", "edge_client.cli", "doctor", "--json", *self.doctor_options]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DOCTOR_S, check=False)
            findings = msgspec.json.decode(done.stdout, type=_Report).findings
        except subprocess.TimeoutExpired:
            return {"doctor": f"no end within {DOCTOR_S:.0f} s"}
        except (msgspec.MsgspecError, UnicodeDecodeError):
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            return {"doctor": lines[-1] if lines else f"it ended with code {done.returncode}"}
        return {finding.check: finding.what for finding in findings if finding.level == "error"}

    def _settle(self) -> None:
        """Make the return to the version before a failed one permanent, as its trial has ended.

        Raises ConfigError if `current` was not started yet: another update has replaced this version.
        """
        current, started = self.installation.read_link(CURRENT), self.installation.started
        if current != started:
            failed = Path(current).name
            is_whole = os.access(self.installation.root / current / "bin" / "python", os.X_OK)
            if is_whole and not self.installation.was_tried(current):
                raise ConfigError(
                    "FV1461", f"another update has just switched to {failed or 'the first version'}; start this again"
                )
            self.refuse(failed, "it failed its trial: three starts or its first task")
            self.report(f"{failed} failed its trial; {version('fedvit')} stays")
            self.installation.set_link(CURRENT, started)

    def _clean(self) -> None:
        """Remove versions that no link names, and what a killed update has left."""
        links = {self.installation.started, *map(self.installation.read_link, (CURRENT, FORMER))}
        versions = self.installation.root / VERSIONS
        for path in versions.iterdir() if versions.is_dir() else ():
            if path.is_dir() and f"{VERSIONS}/{path.name}" not in links:
                # first without its name: half a version must not have one
                gone = path if path.name.startswith(".") else path.rename(versions / f".old-{path.name}")
                shutil.rmtree(gone, ignore_errors=True)
            elif path.is_file() and not path.name.startswith(PARTIAL):  # the next update resumes it
                path.unlink()
        for leftover in self.installation.root.glob(".*-????????"):
            if leftover.is_symlink():
                leftover.unlink()


def _list_packages(*folders: Path | str) -> set[str]:
    """Return the normalised names of the packages that are installed in folders."""
    found = distributions(path=[str(folder) for folder in folders])
    return {str(one.metadata["Name"]).lower().replace("_", "-") for one in found}
