"""The folders of three devices, which every engine trains on."""

from pathlib import Path

import numpy as np
import pytest

from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.partition import write_device_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three devices with 20, 30 and 40 digits, of which each tests with a fifth."""
    out = tmp_path_factory.mktemp("dealt") / "parts"
    parts = np.split(np.random.default_rng(0).permutation(90), [20, 50])
    write_device_folders(read_digits(8), parts, out, test_share=0.2, seed=0)
    return device_folders(out, 3)
