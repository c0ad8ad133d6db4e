"""What a run's privacy costs; reference cases of the library, and laws of the noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.compute.planning.checks import checked_config
from coordinator.compute.server_step import aggregator_of
from coordinator.config import RunConfig
from coordinator.config.stop import StopConfig
from coordinator.record.privacy import (
    PrivacyStep,
    check_first_round,
    cohort_seed,
    compute_cohort_size,
    compute_epsilon,
    compute_epsilon_of_rows,
    round_figures,
)
from coordinator.record.record import open_record
from coordinator.record.tables import SavedState
from fedvit.errors import ConfigError
from fedvit.methods.aggregators import Delta, Mean
from fedvit.methods.private_mean import PrivateMean
from tests.support.codes import has_code


def config(method: str = "fedavg", robust: dict[str, Any] | None = None, **privacy: Any) -> RunConfig:
    values = {"method": method, "devices": 4, "privacy": privacy, "robust": robust or {}}
    return checked_config(values, "test").run


def rows(*values: list[float]) -> list[Delta]:
    return [Delta(1 / len(values), lambda row=row: {"w": np.float32(row)}) for row in values]


class TestNoise:
    def test_without_noise_it_is_the_clipped_sum_over_a_fixed_number(self) -> None:
        """[3, 4] is 5 long and becomes [0.6, 0.8]; [0.5, 0] stays; over 4, though two came."""
        private = PrivateMean(1.0, 0.0, 4, np.random.default_rng(0))
        got = private.combine(rows([3, 4], [0.5, 0]), {"w"})
        np.testing.assert_allclose(got["w"], [0.275, 0.2], rtol=1e-6)

    def test_noise_is_that_of_the_promise(self) -> None:
        """std = multiplier * clip / denominator = 3 * 2 / 4 = 1.5; of 200000 numbers it is met within a hundredth."""
        private = PrivateMean(2.0, 3.0, 4, np.random.default_rng(0))
        got = private.combine([Delta(1.0, lambda: {"w": np.zeros(200_000, np.float32)})], {"w"})
        assert got["w"].std() == pytest.approx(1.5, rel=0.01)
        assert abs(got["w"].mean()) < 0.02

    def test_one_device_changes_it_by_its_share_at_most(self) -> None:
        """However long its update is: clip / denominator."""
        same = [PrivateMean(2.0, 1.0, 4, np.random.default_rng(0)) for _ in range(2)]
        without = same[0].combine(rows([1, 0]), {"w"})["w"]
        with_it = same[1].combine(rows([1, 0], [-900, 400]), {"w"})["w"]
        assert np.linalg.norm(with_it - without) == pytest.approx(0.5)

    def test_noise_differs_from_round_to_round_and_from_run_to_run(self) -> None:
        drawn = [
            aggregator_of(config(noise_multiplier=1.0, clip=1.0), number).combine(rows([0.0]), {"w"})["w"][0]
            for number in (1, 1, 2)
        ]
        assert len(set(drawn)) == 3

    def test_deterministic_noise_can_be_repeated(self) -> None:
        deterministic = config(noise_multiplier=1.0, clip=1.0, deterministic_noise=True)
        first, again, other = (
            aggregator_of(deterministic, number).combine(rows([0.0]), {"w"})["w"][0] for number in (1, 1, 2)
        )
        assert first == again != other

    def test_cohorts_are_drawn_in_secret(self) -> None:
        assert cohort_seed(config(noise_multiplier=1.0, clip=1.0)) != cohort_seed(
            config(noise_multiplier=1.0, clip=1.0)
        )
        assert cohort_seed(config(noise_multiplier=1.0, clip=1.0, deterministic_noise=True)) == 0
        assert cohort_seed(config()) == 0

    def test_noise_off_is_no_privacy_at_all(self) -> None:
        assert aggregator_of(config(noise_multiplier=0.0, clip=1.0), 1) == Mean()


class TestSpent:
    def test_one_round_is_the_gaussian_mechanism(self) -> None:
        """Balle and Wang 2018, arXiv:1805.06530: sigma 1, delta 1e-5 give 4.377, below the classic bound's 4.845."""
        assert compute_epsilon([PrivacyStep(1.0, 10, 10)], config(delta=1e-5).privacy) == pytest.approx(
            4.377178, abs=1e-5
        )

    def test_rounds_add_up_as_in_the_library(self) -> None:
        """16 rounds of noise 8 are one of noise 2; an accountant by Renyi divergence may only say more."""
        sixteen = compute_epsilon([PrivacyStep(8.0, 10, 10)] * 16, config().privacy)
        assert sixteen == pytest.approx(compute_epsilon([PrivacyStep(2.0, 10, 10)], config().privacy))
        import dp_accounting  # seconds, which only the process that tests this need spend
        from dp_accounting import rdp

        accountant = rdp.RdpAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(8.0), 16)
        assert sixteen < accountant.get_epsilon(1e-5) < 1.3 * sixteen

    def test_secret_cohorts_cost_as_in_the_library(self) -> None:
        import dp_accounting
        from dp_accounting import rdp

        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(
            dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(2.0)), 30
        )
        sampled = config(noise_multiplier=4.0, clip=1.0, accounting="sampled").privacy
        tenth = compute_epsilon([PrivacyStep(4.0, 100, 10)] * 30, sampled)
        assert tenth == pytest.approx(accountant.get_epsilon(1e-5))
        assert compute_epsilon([PrivacyStep(4.0, 100, 100)] * 30, sampled) > tenth

    def test_no_round_costs_nothing(self) -> None:
        assert compute_epsilon([], config().privacy) == 0

    def test_rows(self) -> None:
        """To replace a row moves it by two clips: noise 8 of one row is noise 4 of a sum, of four it is 2."""
        assert compute_epsilon_of_rows(1, 8.0, 1e-5) == pytest.approx(
            compute_epsilon([PrivacyStep(4.0, 1, 1)], config().privacy)
        )
        assert compute_epsilon_of_rows(4, 8.0, 1e-5) == pytest.approx(
            compute_epsilon([PrivacyStep(2.0, 1, 1)], config().privacy)
        )


@pytest.mark.parametrize(("share", "expected"), [(1.0, 4), (0.5, 2), (0.1, 1), (3, 3), (9, 4)])
def test_the_denominator_is_of_the_configuration(share: float | int, expected: int) -> None:
    assert (
        compute_cohort_size(checked_config({"method": "fedavg", "devices": 4, "cohort": share}, "test").run) == expected
    )


def test_a_restart_forgets_nothing(runs: Path) -> None:
    """Three rounds, each by a new process, and a run that starts from them: four rounds of noise 2 are one of 1."""
    private = config(noise_multiplier=2.0, clip=1.0)
    told: list[float] = []
    for number in (1, 2, 3):
        with open_record(runs) as store:
            if number == 1:
                store.runs.create("r", {})
            store.rounds.open("r", number, ["a"])
            figures = round_figures(store, "r", private, PrivacyStep(private.privacy.noise_multiplier, 4, 2), [])
            store.rounds.close("r", number, SavedState({}, None, {}), figures)
            told.append(figures["dp_epsilon"])
    assert told == sorted(told)
    with open_record(runs) as store:
        store.runs.create("later", {"start_from": "r"})
        last = round_figures(store, "later", private, PrivacyStep(private.privacy.noise_multiplier, 4, 2), [])
    assert last["dp_epsilon"] == pytest.approx(compute_epsilon([PrivacyStep(1.0, 4, 4)], private.privacy))


@pytest.mark.parametrize("selection", ["power_of_choice", "oort"])
def test_losses_select_no_devices_of_a_run_with_noise(selection: Any) -> None:
    """They have none: what a cohort tells of a device is not in epsilon."""
    private = replace(config(noise_multiplier=1.0, clip=1.0), selection=selection)
    with pytest.raises(ConfigError, check=has_code("FV1014", selection)):
        private.check_privacy_of_modes()


@pytest.mark.parametrize("accounting", ["every_round", "sampled"])
def test_run_whose_first_round_would_exceed_the_limit_does_not_begin(runs: Path, accounting: str) -> None:
    """Also one that starts from a run that has used most of it."""
    noise = {"noise_multiplier": 2.0, "clip": 1.0, "accounting": accounting}
    private = config(**noise).privacy
    first = compute_epsilon([PrivacyStep(2.0, 4, 4)], private)

    def limit_epsilon(epsilon: float, **more: Any) -> RunConfig:
        return replace(config(**noise), stop=StopConfig(epsilon=epsilon), **more)

    check_first_round(limit_epsilon(1.01 * first), None)
    with pytest.raises(ConfigError) as refused:
        check_first_round(limit_epsilon(0.99 * first), None)
    assert refused.value.code == "FV1028"
    with open_record(runs) as store:
        store.runs.create("r", {})
        store.rounds.open("r", 1, ["a"])
        figures = round_figures(store, "r", config(**noise), PrivacyStep(2.0, 4, 4), [])
        store.rounds.close("r", 1, SavedState({}, None, {}), figures)
        with pytest.raises(ConfigError):
            check_first_round(limit_epsilon(1.01 * first, start_from="r"), store)
        check_first_round(limit_epsilon(2.1 * first, start_from="r"), store)


def test_features_add_up_over_rounds(runs: Path) -> None:
    """Uploads of at most 6 and 3 rows: 9 rows of one device."""
    private = config("eftvit", feature_noise=20.0, feature_clip=1.0)
    with open_record(runs) as store:
        store.runs.create("r", {})
        store.rounds.open("r", 1, ["a"])
        first = round_figures(store, "r", private, PrivacyStep(private.privacy.noise_multiplier, 1, 1), [2, 6])
        store.rounds.close("r", 1, SavedState({}, None, {}), first)
        second = round_figures(store, "r", private, PrivacyStep(private.privacy.noise_multiplier, 1, 1), [3])
    assert second["dp_row_epsilon"] == first["dp_row_epsilon"] == compute_epsilon_of_rows(1, 20.0, 1e-5)
    assert second["dp_upload_epsilon"] == compute_epsilon_of_rows(3, 20.0, 1e-5)
    assert second["dp_device_epsilon"] == compute_epsilon_of_rows(9, 20.0, 1e-5)
    assert "dp_epsilon" not in second


@pytest.mark.parametrize(
    ("method", "privacy", "robust", "named"),
    [
        ("fedavg", {"noise_multiplier": 1.0}, {}, "needs clip"),
        ("fedavg", {"noise_multiplier": 1.0, "clip": -1.0}, {}, "clip = -1.0 must be above 0"),
        ("fedavg", {"delta": 0.0}, {}, "delta = 0.0"),
        ("eftvit", {"noise_multiplier": 1.0, "clip": 1.0}, {}, "method 'eftvit' averages no tensors"),
        (
            "moon",
            {"noise_multiplier": 1.0, "clip": 1.0},
            {},
            "'moon' also uploads updates from which tensors of single devices are made",
        ),
        ("fedavg", {"feature_noise": 1.0, "feature_clip": 1.0}, {}, "method 'fedavg' uploads no features"),
        ("eftvit", {"feature_noise": 1.0}, {}, "needs feature_clip"),
        ("fedavg", {"noise_multiplier": 1.0, "clip": 1.0}, {"aggregator": "median"}, "robust.aggregator"),
        ("fedavg", {"noise_multiplier": 1.0, "clip": 1.0}, {"reject_scale": 3.0}, "robust.reject_scale"),
        ("eftvit", {}, {"aggregator": "krum"}, "method 'eftvit' averages no tensors"),
        ("pfedpg", {}, {"aggregator": "multi_krum"}, "method 'pfedpg' averages no tensors"),
        ("fedtp", {}, {"aggregator": "median"}, "method 'fedtp' averages no tensors, or its server reads single"),
        ("feddyn", {}, {"aggregator": "median"}, "method 'feddyn' averages no tensors, or its server reads single"),
        ("scaffold", {}, {"aggregator": "median"}, "method 'scaffold' averages no tensors, or its server reads single"),
        ("fednova", {}, {"aggregator": "median"}, "method 'fednova' averages no tensors, or its server reads single"),
        ("fedavg", {}, {"malicious_share": 0.5}, "malicious_share = 0.5"),
        ("fedavg", {}, {"clip_norm": "mean"}, "clip_norm = 'mean'"),
        ("fedavg", {}, {"reject_scale": 0.5}, "reject_scale = 0.5 must be at least 1"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    method: str, privacy: dict[str, Any], robust: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(method, robust, **privacy)
    assert named in str(refused.value)
