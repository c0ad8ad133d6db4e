"""The training step of `edge-client doctor`."""

import numpy as np
import pytest

from edge_client.owner import tiny_step
from fedvit.errors import DeviceTrouble
from tests.support.codes import has_code


def test_step_trains_in_a_confined_process() -> None:
    trained = tiny_step.run_step()
    assert (trained.steps, trained.samples) == (1, 2)


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that computes something else than follows by hand."""
    monkeypatch.setattr(tiny_step, "EXPECTED", np.ones_like(tiny_step.EXPECTED))
    with pytest.raises(DeviceTrouble, check=has_code("FV1420", "-0.25")):
        tiny_step.run_step()
