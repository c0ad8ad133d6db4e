"""Releases as they are published: packages are checked, offers replace each other, lists are continued."""

from pathlib import Path

import pytest

from coordinator.operations.releasing import publish, read_list, read_package
from fedvit.errors import ConfigError
from fedvit.publisher import PublisherKey
from fedvit.releases import pack_folder
from tests.support.codes import has_code


@pytest.fixture
def key(tmp_path: Path) -> PublisherKey:
    return PublisherKey.create(tmp_path / "release.key")


def make_package(folder: Path, version: str, *, inside: str | None = None, board: str = "py311-aarch64") -> Path:
    """Make a package with nothing but its version."""
    metadata = folder / version / f"fedvit-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.4\nName: fedvit\nVersion: {inside or version}\n")
    file = folder / f"fedvit-edge-{version}-{board}.zip"
    pack_folder(folder / version, file)
    return file


def list_offers(folder: Path, key: PublisherKey, channel: str = "stable") -> list[tuple[str, dict[str, str]]]:
    releases = read_list(folder, channel, key)
    assert releases is not None
    return [(offer.version, offer.labels) for offer in releases.offers]


def test_package_is_described(tmp_path: Path) -> None:
    package = read_package(make_package(tmp_path, "0.2.0"))
    assert (package.version, package.python, package.machine) == ("0.2.0", "3.11", "aarch64")
    assert package.unpacked == len("Metadata-Version: 2.4\nName: fedvit\nVersion: 0.2.0\n")


def test_versions_are_rolled_out_in_stages(tmp_path: Path, key: PublisherKey) -> None:
    """First to some labels, then to all, which ends the stages up to it."""
    folder = tmp_path / "releases"
    kitchen, cellar = {"room": "kitchen"}, {"room": "cellar"}
    publish(folder, "stable", [make_package(tmp_path, "0.1.0")], {}, key)
    publish(folder, "stable", [make_package(tmp_path, "0.2.0")], kitchen, key)
    publish(folder, "stable", [make_package(tmp_path, "0.3.0b1")], cellar, key)
    assert list_offers(folder, key) == [("0.1.0", {}), ("0.2.0", kitchen), ("0.3.0b1", cellar)]
    publish(folder, "stable", [make_package(tmp_path, "0.2.0")], {}, key)
    assert list_offers(folder, key) == [("0.3.0b1", cellar), ("0.2.0", {})]
    publish(folder, "beta", [make_package(tmp_path, "0.3.0b1")], {}, key)
    assert list_offers(folder, key) == [("0.3.0b1", cellar), ("0.2.0", {})]
    assert list_offers(folder, key, "beta") == [("0.3.0b1", {})]


def test_lists_have_growing_serials(tmp_path: Path, key: PublisherKey) -> None:
    """Also one that was lost and begun anew."""
    folder = tmp_path / "releases"
    package = make_package(tmp_path, "0.1.0")
    serials = [publish(folder, "stable", [package], {}, key).serial for _ in range(3)]
    (folder / "stable.json").unlink()
    assert serials == sorted(set(serials))
    assert publish(folder, "stable", [package], {}, key).serial >= serials[0]


def test_list_never_goes_back(tmp_path: Path, key: PublisherKey) -> None:
    folder = tmp_path / "releases"
    publish(folder, "stable", [make_package(tmp_path, "0.10.0")], {}, key)
    with pytest.raises(ConfigError, check=has_code("FV1468", "0.10.0")):
        publish(folder, "stable", [make_package(tmp_path, "0.9.0")], {}, key)


def test_list_of_another_key_is_not_continued(tmp_path: Path, key: PublisherKey) -> None:
    folder = tmp_path / "releases"
    publish(folder, "stable", [make_package(tmp_path, "0.1.0")], {}, key)
    other = PublisherKey.create(tmp_path / "other.key")
    with pytest.raises(ConfigError, check=has_code("FV1468", other.public)):
        publish(folder, "stable", [make_package(tmp_path, "0.2.0")], {}, other)


def test_several_boards_are_of_one_version(tmp_path: Path, key: PublisherKey) -> None:
    files = [make_package(tmp_path, "0.1.0"), make_package(tmp_path, "0.1.0", board="py313-x86_64")]
    [offer] = publish(tmp_path / "releases", "stable", files, {}, key).offers
    assert {(package.python, package.machine) for package in offer.packages} == {
        ("3.11", "aarch64"),
        ("3.13", "x86_64"),
    }
    with pytest.raises(ConfigError, check=has_code("FV1468", "2 versions")):
        publish(tmp_path / "releases", "stable", [files[0], make_package(tmp_path, "0.2.0")], {}, key)


@pytest.mark.parametrize(
    "name", ["fedvit-0.1.0-py3-none-any.whl", "fedvit-edge-0.1.0.zip", "fedvit-edge-0.1.0-py2-x.zip"]
)
def test_file_of_another_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1468", name)):
        read_package(tmp_path / name)


def test_file_that_is_no_package(tmp_path: Path) -> None:
    file = tmp_path / "fedvit-edge-0.1.0-py311-aarch64.zip"
    for content in (None, b"", b"PK"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, check=has_code("FV1468", file.name)):
            read_package(file)
    with pytest.raises(ConfigError, check=has_code("FV1468", "0.1.1")):
        read_package(make_package(tmp_path, "0.1.0", inside="0.1.1"))
