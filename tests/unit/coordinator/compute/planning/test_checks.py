"""Whether a configuration can be that of a region."""

from typing import Any

import msgspec
import pytest

from coordinator.compute.planning.checks import check_region, check_run
from coordinator.compute.planning.secure_runs import check_secure
from coordinator.config.modes import MODES
from fedvit.errors import ConfigError
from fedvit.methods import METHODS
from fedvit.program import Role
from tests.support.codes import has_code
from tests.support.runs import Configure

AVERAGED = {
    "adapters", "analytic", "apfl", "ditto", "fed_bias", "fed_head", "fed_lora", "fed_prompt", "fedavg", "fedbabu",
    "fedbfpt", "fedbn", "feddbe", "fedntd", "fedopt", "fedper", "fedperfix", "fedproto", "fedprox", "fedrep", "fedrod",
    "fedsa_lora", "fedvpt_d", "ffa_lora", "gpfl", "knn_per", "per_fedavg", "personal_analytic", "personal_part",
    "pfedme", "prefix", "prompts", "vanilla_attention",
}  # fmt: skip


@pytest.mark.parametrize("method", sorted(METHODS))
def test_regions_can_use_methods_whose_server_takes_the_mean(configure: Configure, method: str) -> None:
    server_data = {"server_data": "pictures"} if method == "feddf" else {}
    config = configure(method, classes=["ant", "bee"], **server_data)
    if method in AVERAGED:
        check_region(config, "run.toml")
        return
    with pytest.raises(ConfigError, match=f"run.toml: method '{method}' cannot be used in regions: "):
        check_region(config, "run.toml")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "buffered"}, "mode = 'buffered': a region answers in rounds"),
        ({"variants": {"pi-*": {"epochs": 1}}}, "variants: a region's devices train the tensors"),
        ({"robust": {"aggregator": "krum"}}, "aggregator = 'krum' compares the updates of single devices"),
        ({"privacy": {"noise_multiplier": 0.5, "clip": 1.0}}, "noise_multiplier = 0.5 hides the update of one device"),
    ],
)
def test_settings_that_a_mean_of_means_would_break_are_refused(
    configure: Configure, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"run.toml: {reason}"):
        check_region(configure(**values), "run.toml")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"task": "regression", "number_range": (0.0, 1.0)}, "a regression has no classes"),
        ({"task": "segmentation"}, "a segmentation has no classes of images"),
        ({"secure": True, "devices": 4, "cohort": 4}, "secure = true adds up right answers alone"),
        ({"classes": [f"class-{number}" for number in range(65)]}, "65 classes are more than the 64"),
    ],
)
def test_auc_is_refused_where_no_scores_are_counted(configure: Configure, values: dict[str, Any], reason: str) -> None:
    check_run(configure(**values), "run.toml")
    with pytest.raises(ConfigError, check=has_code("FV2490", reason)):
        check_run(configure(auc=True, **values), "run.toml")


def test_models_of_text_are_not_compared(configure: Configure) -> None:
    """Only the bundle of such a model is refused otherwise, on every device at the end of the run."""
    with pytest.raises(ConfigError, check=has_code("FV1110", "'transformer_small_text' reads text")):
        configure(model="transformer_small_text", model_options={}, promote={})


def test_another_mode_with_cohorts_fits_regions_and_sums(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says so: no other place names modes."""
    config = msgspec.structs.replace(configure(classes=["ant", "bee"], devices=3), mode="toy")
    secure = msgspec.structs.replace(config, secure=True)
    monkeypatch.setitem(MODES, "toy", MODES["rounds"])
    check_region(config, "run.toml")
    check_secure(secure, {Role.SHARED}, collects=False, why_no_mean=None)
    monkeypatch.setitem(MODES, "toy", MODES["rounds"]._replace(asks_cohorts=False))
    with pytest.raises(ConfigError, match="mode = 'toy': a region answers in rounds"):
        check_region(config, "run.toml")
    with pytest.raises(ConfigError, match="mode = 'toy': a sum needs"):
        check_secure(secure, {Role.SHARED}, collects=False, why_no_mean=None)


def test_global_weights_that_travel_packed_are_refused(configure: Configure) -> None:
    config = configure("fedbfpt", {"frozen_precision": "int8"})
    with pytest.raises(ConfigError, check=has_code("FV2202")):
        check_region(config, "run.toml")


@pytest.mark.parametrize("method", ["ifca", "fedas"])
@pytest.mark.parametrize("robust", [{"clip_norm": "median"}, {"reject_scale": 5.0}])
def test_uploads_whose_length_says_nothing_are_not_measured(
    configure: Configure, method: str, robust: dict[str, Any]
) -> None:
    [key] = robust
    with pytest.raises(ConfigError, check=has_code("FV1013", key)):
        configure(method, classes=["ant", "bee"], robust=robust)
    assert configure(method, classes=["ant", "bee"], robust={"max_weight": 3.0}).method == method
