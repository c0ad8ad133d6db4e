"""Records of features: what was written is read, and nothing else."""

import os
from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.feature_file import ID_BYTES, FeatureFile, count_record_bytes
from edge_client.storage.vault_key import VaultKey

NUMBERS = 5
NAMES = [bytes([place]) * ID_BYTES for place in range(4)]
VALUES = np.arange(20, dtype=np.float32).reshape(4, NUMBERS)
KEYS = {"plain": None, "sealed": VaultKey(Path("key"), bytes(range(32)))}


@pytest.fixture(params=KEYS)
def key(request: pytest.FixtureRequest) -> VaultKey | None:
    return KEYS[request.param]


def open_file(path: Path, names: list[bytes], key: VaultKey | None, most: int = 4) -> FeatureFile:
    return FeatureFile(os.open(path, os.O_RDWR | os.O_CREAT), NUMBERS, most, names, key)


def write_all(path: Path, key: VaultKey | None) -> None:
    file = open_file(path, NAMES, key)
    for name, values in zip(NAMES, VALUES, strict=True):
        file.write(name, values)
    file.close()


def test_records_are_read_by_another_process(tmp_path: Path, key: VaultKey | None) -> None:
    write_all(tmp_path / "file", key)
    again = open_file(tmp_path / "file", NAMES, key)
    for name, values in zip(NAMES, VALUES, strict=True):
        assert np.array_equal(again.read(name), values)
    assert (tmp_path / "file").stat().st_size == 4 * count_record_bytes(NUMBERS, sealed=key is not None)
    assert again.read(b"x" * ID_BYTES) is None


@pytest.mark.parametrize("place", range(4))
def test_a_damaged_record_is_made_again(place: int, tmp_path: Path, key: VaultKey | None) -> None:
    write_all(tmp_path / "file", key)
    size = count_record_bytes(NUMBERS, sealed=key is not None)
    content = bytearray((tmp_path / "file").read_bytes())
    content[(place + 1) * size - 1] ^= 1
    (tmp_path / "file").write_bytes(content)
    file = open_file(tmp_path / "file", NAMES, key)
    assert [file.read(name) is None for name in NAMES] == [other == place for other in range(4)]
    file.write(NAMES[place], VALUES[place])
    assert np.array_equal(file.read(NAMES[place]), VALUES[place])
    assert (tmp_path / "file").stat().st_size == 4 * size


def test_a_record_that_a_power_cut_left_incomplete_is_none(tmp_path: Path, key: VaultKey | None) -> None:
    write_all(tmp_path / "file", key)
    os.truncate(tmp_path / "file", (tmp_path / "file").stat().st_size - 1)
    file = open_file(tmp_path / "file", NAMES, key)
    assert [file.read(name) is None for name in NAMES] == [False, False, False, True]


def test_a_moved_record_is_none(tmp_path: Path, key: VaultKey | None) -> None:
    """Features of two images cannot be exchanged in the file."""
    write_all(tmp_path / "file", key)
    size = count_record_bytes(NUMBERS, sealed=key is not None)
    content = bytearray((tmp_path / "file").read_bytes())
    content[ID_BYTES:size], content[size + ID_BYTES : 2 * size] = (
        content[size + ID_BYTES : 2 * size],
        content[ID_BYTES:size],
    )
    (tmp_path / "file").write_bytes(content)
    file = open_file(tmp_path / "file", NAMES, key)
    assert [file.read(name) is None for name in NAMES] == [True, True, False, False]


def test_places_of_images_that_are_gone_are_used_again(tmp_path: Path, key: VaultKey | None) -> None:
    write_all(tmp_path / "file", key)
    new = [b"n" * ID_BYTES, b"m" * ID_BYTES]
    file = open_file(tmp_path / "file", [*NAMES[:2], *new], key)
    for name in (*new, b"o" * ID_BYTES):  # the last one has no place
        file.write(name, VALUES[3])
    assert [file.read(name) is None for name in (*new, b"o" * ID_BYTES)] == [False, False, True]
    assert np.array_equal(file.read(NAMES[1]), VALUES[1])
    assert (tmp_path / "file").stat().st_size == 4 * count_record_bytes(NUMBERS, sealed=key is not None)


def test_features_cannot_be_read_without_the_key(tmp_path: Path) -> None:
    write_all(tmp_path / "file", KEYS["sealed"])
    other = VaultKey(Path("key"), bytes(32))
    assert open_file(tmp_path / "file", NAMES, other).read(NAMES[0]) is None
    assert VALUES[3].tobytes() not in (tmp_path / "file").read_bytes()


def test_a_full_disk_keeps_nothing_and_loses_nothing(key: VaultKey | None, caplog: pytest.LogCaptureFixture) -> None:
    file = FeatureFile(os.open("/dev/full", os.O_RDWR), NUMBERS, 4, NAMES, key)
    for name in NAMES:
        file.write(name, VALUES[0])
    assert [file.read(name) for name in NAMES] == [None] * 4
    assert [record.message for record in caplog.records] == ["features are not kept any more"]
