"""The folder that holds a device's state, and the id in it."""

from pathlib import Path

import pytest

from edge_client.storage.state import device_id
from fedvit.errors import ConfigError
from tests.support.codes import has_code


def test_flipped_bit_of_the_id_makes_no_other_device(tmp_path: Path) -> None:
    """The draws and the messages of the device depend on its id."""
    file = tmp_path / "device-id"
    assert device_id(tmp_path, "pi-1", tmp_path) == "pi-1"
    raw = file.read_bytes()
    for place in range(len(raw) - 1):  # the last byte ends a line
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(ConfigError, check=has_code("FV1414", "device-id")):
            device_id(tmp_path, None, tmp_path)
    assert device_id(tmp_path, "pi-1", tmp_path) == device_id(tmp_path, None, tmp_path) == "pi-1"
