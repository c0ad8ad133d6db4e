"""Check of runs with secure sums."""

from typing import Any

import pytest

from fedvit.errors import ConfigError
from fedvit.methods import METHODS
from tests.support.codes import has_code
from tests.support.runs import Configure
from tests.unit.coordinator.compute.planning.test_checks import AVERAGED


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_whose_server_takes_the_mean_can_be_secure(configure: Configure, method: str) -> None:
    values: dict[str, Any] = {"classes": ["ant", "bee"], "secure": True, "devices": 3}
    if method in AVERAGED:
        assert configure(method, **values).secure
        return
    with pytest.raises(ConfigError, check=has_code("FV1024", method)):
        configure(method, **values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"devices": 2}, "devices = 2"),
        ({"cohort": 2}, "cohort = 2"),
        ({"mode": "buffered"}, "mode = 'buffered'"),
        ({"late": "use"}, "late = 'use'"),
        ({"selection": "oort"}, "selection = 'oort'"),
        ({"robust": {"aggregator": "krum"}}, "aggregator = 'krum'"),
        ({"robust": {"clip_norm": "median"}}, "clip_norm = 'median'"),
        ({"robust": {"reject_scale": 5.0}}, "reject_scale = 5.0"),
        ({"robust": {"max_weight": 2.0}}, "max_weight = 2.0"),
        ({"privacy": {"noise_multiplier": 0.5, "clip": 1.0, "deterministic_noise": True}}, "deterministic_noise"),
        ({"privacy": {"noise_multiplier": 0.5, "clip": 1.0}, "devices": 2000, "sums": {"bits": 16}}, "sums.bits"),
        ({"privacy": {"noise_multiplier": 0.5, "clip": 1e9}}, "privacy.clip"),
        ({"updates": {"up": "top_k:share=0.1"}}, "the same numbers of every device"),
        ({"updates": {"up_groups": {"shared": "int8"}}}, "updates.up_groups"),
        ({"updates": {"up": "int8"}, "privacy": {"noise_multiplier": 0.5, "clip": 1.0}}, "updates.up"),
    ],
)
def test_settings_that_need_single_updates_are_refused(
    configure: Configure, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1024", named)):
        configure("fedavg", **{"classes": ["ant", "bee"], "secure": True, "devices": 3, **values})
