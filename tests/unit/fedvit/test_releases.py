"""Lists and packages of releases: what is chosen for a device, and what is refused before a file is unpacked."""

import zipfile
from pathlib import Path

import pytest

from fedvit.errors import BadPayload
from fedvit.releases import Offer, ReleaseList, check_members, choose_offer, decode_list, encode_list, pack_folder
from tests.support.codes import has_code

OFFERS = (
    Offer(version="0.9.0", packages=()),
    Offer(version="0.10.0", labels={"site": "berlin", "room": "kitchen"}, packages=()),
    Offer(version="0.10.0rc1", labels={"site": "berlin"}, packages=()),
)
RELEASES = ReleaseList(channel="stable", serial=3, offers=OFFERS)


@pytest.mark.parametrize(
    ("labels", "version"),
    [
        ({}, "0.9.0"),
        ({"site": "paris", "room": "kitchen"}, "0.9.0"),
        ({"site": "berlin"}, "0.10.0rc1"),
        ({"site": "berlin", "room": "kitchen", "board": "pi"}, "0.10.0"),
    ],
)
def test_newest_version_for_the_labels(labels: dict[str, str], version: str) -> None:
    offer = choose_offer(decode_list(encode_list(RELEASES), "stable.json"), labels)
    assert offer is not None
    assert offer.version == version


def test_no_version_for_the_labels() -> None:
    assert choose_offer(ReleaseList(channel="beta", serial=1, offers=OFFERS[1:]), {}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        encode_list(RELEASES).replace(b'"v": 1', b'"v": 2'),
        encode_list(RELEASES).replace(b'"stable"', b'"../stable"'),
        encode_list(RELEASES).replace(b'"0.9.0"', b'"latest"'),
        encode_list(RELEASES).replace(b'"serial": 3', b'"serial": 0'),
    ],
)
def test_list_that_cannot_be_used(content: bytes) -> None:
    with pytest.raises(BadPayload, check=has_code("FV1465")):
        decode_list(content, "stable.json")


@pytest.mark.parametrize(
    "name", ["../a", "/a", "a/../../b", "./a", "a/.", "a\\b", "C:a", "", "..", "twice", "link"]
)  # fmt: skip
def test_member_that_leads_out_of_its_folder(name: str) -> None:
    member = zipfile.ZipInfo(name)
    if name == "link":
        member.external_attr = 0o120777 << 16
    with pytest.raises(BadPayload, check=has_code("FV1465", repr(name))):
        check_members([zipfile.ZipInfo("twice"), member], "a package")


def test_packages_are_equal_bit_by_bit(tmp_path: Path) -> None:
    """Whatever the dates of the files; compiled ones are left out."""
    folder = tmp_path / "packages"
    (folder / "deep" / "__pycache__").mkdir(parents=True)
    (folder / "deep" / "one.py").write_text("1")
    (folder / "two.so").write_bytes(bytes(3_000_000))
    (folder / "deep" / "__pycache__" / "one.pyc").write_bytes(b"x")
    pack_folder(folder, tmp_path / "one.zip")
    (folder / "two.so").touch()
    pack_folder(folder, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == ["deep/one.py", "two.so"]
        assert check_members(archive.infolist(), "one.zip") == 3_000_001
