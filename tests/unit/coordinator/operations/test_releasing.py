"""Releases as they are published: packages are checked, offers replace each other, lists are continued."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def test_list_that_was_half_written_is_continued(
    tmp_path: Path, key: PublisherKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after the new signature: no offer is lost."""
    folder, versions = tmp_path / "releases", ["0.1.0"]
    publish(folder, "stable", [make_package(tmp_path, "0.1.0")], {}, key)
    for number, name in enumerate(("stable.json.minisig", "stable.json"), 2):
        versions.append(f"0.{number}.0")
        with monkeypatch.context() as patch:
            for act in ("replace", "rename"):
                patch.setattr(os, act, die_at(name, getattr(os, act)))
            with pytest.raises(KeyboardInterrupt):
                publish(folder, "stable", [make_package(tmp_path, versions[-1])], {"stage": versions[-1]}, key)
    publish(folder, "stable", [make_package(tmp_path, "0.9.0")], {"stage": "last"}, key)
    assert [version for version, _ in list_offers(folder, key)] == ["0.1.0", "0.3.0", "0.9.0"]


def die_at(name: str, act: Callable[..., None]) -> Callable[..., None]:
    def end(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == name:
            raise KeyboardInterrupt
        act(source, target, **more)

    return end


def test_two_publishers_lose_no_offer(tmp_path: Path, key: PublisherKey) -> None:
    packages = {str(number): make_package(tmp_path, f"0.{number}.0") for number in range(8)}
    with ThreadPoolExecutor() as pool:
        for made in [
            pool.submit(publish, tmp_path / "releases", "stable", [package], {"stage": name}, key)
            for name, package in packages.items()
        ]:
            made.result()
    assert len(list_offers(tmp_path / "releases", key)) == 8


def test_offered_package_is_not_replaced_by_another_of_its_name(tmp_path: Path, key: PublisherKey) -> None:
    folder = tmp_path / "releases"
    package = make_package(tmp_path, "0.1.0")
    publish(folder, "stable", [package], {}, key)
    before = (folder / package.name).read_bytes()
    (tmp_path / "0.1.0" / "more.py").write_text("x = 1\n")
    other = make_package(tmp_path, "0.1.0")
    with pytest.raises(ConfigError, check=has_code("FV1468", "channel stable offers")):
        publish(folder, "beta", [other], {}, key)
    assert (folder / package.name).read_bytes() == before
    (folder / "stable.json").unlink()
    publish(folder, "beta", [other], {}, key)
    assert (folder / package.name).read_bytes() == other.read_bytes()


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
