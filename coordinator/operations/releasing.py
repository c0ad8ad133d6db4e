"""Writes releases of the device's software: checks packages, and signs the list of a channel."""

import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.parser import HeaderParser
from pathlib import Path

from fedvit.errors import BadPayload, ConfigError, FedvitError
from fedvit.files import atomic_write, hold_lock, make_folder, name_failure, sync_file
from fedvit.minisign import SUFFIX, verify
from fedvit.publisher import PublisherKey
from fedvit.releases import (
    Offer,
    Package,
    ReleaseList,
    check_members,
    decode_list,
    encode_list,
    hash_file,
    parse_version,
)

_PREFIX = "fedvit-edge"
LOCK = ".lock"
"""Held by the process that changes the folder."""


def read_package(file: Path) -> Package:
    """Read and check a package, which make dist names fedvit-edge-VERSION-pyXY-MACHINE.zip. Raises ConfigError."""
    words = file.name.removesuffix(".zip").removeprefix(f"{_PREFIX}-").split("-")
    version, python, machine = words if len(words) == 3 else ("", "", "")
    if not (python.startswith("py3") and python[3:].isdigit() and file.name.startswith(_PREFIX)):
        raise ConfigError("FV1468", f"{file} is no package: its name is not {_PREFIX}-VERSION-pyXY-MACHINE.zip")
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = check_members(archive.infolist(), file.name)
            metadata = HeaderParser().parsestr(archive.read(f"fedvit-{version}.dist-info/METADATA").decode())
        parse_version(version)
    except (OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError, BadPayload) as error:
        raise ConfigError("FV1468", f"{file} is no package of fedvit {version}: {error}; build it anew") from error
    if metadata["Version"] != version:
        raise ConfigError("FV1468", f"{file} holds fedvit {metadata['Version']}; name it after its version")
    return Package(
        file=file.name,
        version=version,
        python=f"3.{python[3:]}",
        machine=machine,
        sha256=hash_file(file),
        size=file.stat().st_size,
        unpacked=unpacked,
    )


def publish(
    folder: Path, channel: str, files: Sequence[Path], labels: Mapping[str, str], key: PublisherKey
) -> ReleaseList:
    """Offer packages of one version to the devices with some labels; return the channel's new list.

    An offer replaces those of the channel for the same labels. One without labels replaces all that are not newer.
    Raises ConfigError, also for a package with the name of an offered one and other content, StorageFailed.
    """
    packages = tuple(read_package(file) for file in files)
    versions = {package.version for package in packages}
    if len(versions) != 1:
        raise ConfigError("FV1468", f"packages of {len(versions)} versions are named; name those of one")
    make_folder(folder)
    with hold_lock(folder / LOCK):
        return _publish(folder, channel, list(zip(files, packages, strict=True)), labels, key)


def _publish(
    folder: Path,
    channel: str,
    files: Sequence[tuple[Path, Package]],
    labels: Mapping[str, str],
    key: PublisherKey,
) -> ReleaseList:
    packages = tuple(package for _, package in files)
    version = packages[0].version
    former = read_list(folder, channel, key)
    offers = former.offers if former else ()
    before = next((offer for offer in offers if offer.labels == labels), None)
    kept = [
        offer
        for offer in offers
        if offer is not before and (labels or parse_version(offer.version) > parse_version(version))
    ]
    if before and parse_version(before.version) > parse_version(version):
        raise ConfigError(
            "FV1468",
            f"channel {channel} offers {before.version} already, and no device goes back to {version}; build the "
            f"older software again with a version above {before.version}",
        )
    offer = Offer(version=version, labels=dict(labels), packages=packages)
    # serials of a list that was lost and begun anew are above the former ones as well
    serial = max(former.serial + 1 if former else 1, int(time.time()))
    releases = ReleaseList(channel=channel, serial=serial, offers=(*kept, offer))
    for file, package in files:
        _place(file, folder / file.name, package)
    content = encode_list(releases)
    signature = key.sign_file(content, f"channel {channel}, serial {serial}")
    # a device that reads between both gets a list with a foreign signature, and reads again
    file = folder / f"{channel}.json"
    atomic_write(_next_of(file), content)
    atomic_write(_signature_of(file), signature.encode())
    with name_failure(f"cannot write {file}"):
        _next_of(file).replace(file)
    return releases


def read_list(folder: Path, channel: str, key: PublisherKey) -> ReleaseList | None:
    """Read the list of a channel; None if there is none. Raises ConfigError for one that this key has not signed."""
    file = folder / f"{channel}.json"
    if _next_of(file).exists():  # a process was killed while it wrote a list
        with suppress(OSError, UnicodeDecodeError, FedvitError):
            verify(key.public, _next_of(file).read_bytes(), _signature_of(file).read_text(), file.name)
            _next_of(file).replace(file)
    if not file.exists():
        return None
    try:
        content = file.read_bytes()
        verify(key.public, content, _signature_of(file).read_text(), file.name)
        return decode_list(content, file.name)
    except (OSError, UnicodeDecodeError, FedvitError) as error:
        raise ConfigError(
            "FV1468", f"{file} cannot be continued: {error}; name its key, or remove the file to begin the channel anew"
        ) from error


def _next_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.next")


def _signature_of(file: Path) -> Path:
    return file.with_name(f"{file.name}{SUFFIX}")


def _place(source: Path, target: Path, package: Package) -> None:
    """Copy a package into the folder, unless it is there. Raises ConfigError, StorageFailed."""
    with name_failure(f"cannot write {target}"):
        if target.exists() and (there := hash_file(target)) != package.sha256:
            for offered in target.parent.glob("*.json"):
                if there.encode() in offered.read_bytes():
                    raise ConfigError(
                        "FV1468",
                        f"{source} is another package than {target}, which channel {offered.stem} offers; build it "
                        "with a higher version",
                    )
        elif target.exists():
            return
        partial = target.with_name(f".{target.name}")
        try:
            shutil.copyfile(source, partial)
            sync_file(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
