"""The processes of the demo, and their errors."""

from pathlib import Path

import pytest

from fedvit.errors import FedvitError
from fleet.loop.fleet import LoopDevice, LoopFleet
from fleet.processes import Fleet


def test_process_that_ends_is_named_with_its_last_line(tmp_path: Path, device: LoopDevice) -> None:
    with Fleet() as fleet:
        world = LoopFleet(tmp_path / "home", [device], fleet, test_share=0.3)
        (tmp_path / "home").mkdir()
        with pytest.raises(FedvitError) as error:
            world.train("first", {"method": "no-such-method"})
    assert error.value.code == "FV2128"
    assert "no-such-method" in str(error.value)
