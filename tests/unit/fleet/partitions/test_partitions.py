from typing import Any

import numpy as np
import pytest

from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions import PARTITIONS, make_partition, partition, partition_options
from fleet.partitions.dirichlet import Dirichlet
from fleet.partitions.feature_noise import FeatureNoise, add_noise
from fleet.partitions.iid import Iid

LABELS = np.repeat(np.arange(10), 100)


class TestDirichlet:
    def test_every_device_gets_the_minimum(self) -> None:
        """Alpha .1 among 10 devices: a plain draw nearly always leaves a device with less than 20 of 1000."""
        plain = [partition("dirichlet", LABELS, 10, seed, alpha=0.1, min_samples=0) for seed in range(20)]
        assert min(len(part) for parts in plain for part in parts) < 20
        for seed in range(20):
            parts = partition("dirichlet", LABELS, 10, seed, alpha=0.1, min_samples=20)
            assert min(len(part) for part in parts) >= 20

    def test_default_minimum_is_ten(self) -> None:
        assert make_partition("dirichlet") == Dirichlet(alpha=0.3, cap=False, min_samples=10)

    @pytest.mark.parametrize("seed", range(20))
    def test_the_cap_levels_sizes(self, seed: int) -> None:
        """A device that has 1000 / 5 = 200 gets nothing more, and a class adds at most 100: below 300."""
        parts = partition("dirichlet", LABELS, 5, seed, alpha=0.1, cap=True, min_samples=0)
        assert max(len(part) for part in parts) < 300
        assert sum(len(part) for part in parts) == 1000

    def test_without_the_cap_sizes_differ_more(self) -> None:
        sizes = {
            cap: np.mean(
                [
                    max(len(part) for part in partition("dirichlet", LABELS, 5, seed, alpha=0.1, cap=cap))
                    for seed in range(20)
                ]
            )
            for cap in (False, True)
        }
        assert sizes[False] > sizes[True]

    def test_a_tiny_alpha_is_still_a_partition(self) -> None:
        """1e-8: nearly every share underflows to 0, which must not become 0 / 0."""
        parts = partition("dirichlet", LABELS, 3, 0, alpha=1e-8, cap=True, min_samples=0)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_iid_sizes_differ_by_at_most_one() -> None:
    """11 among 4: 3, 3, 3, 2."""
    assert [len(part) for part in partition("iid", np.zeros(11, dtype=np.int64), 4, 0)] == [3, 3, 3, 2]


class TestPathological:
    def test_the_usual_setting_has_two_classes_each(self) -> None:
        """20 devices, 10 classes, 2 each: q = 4 shares of each class, of 100 samples. A share is at least
        .4 / (.4 + 3 * .6) = .18 and at most .6 / (.6 + 3 * .4) = .33: 18 to 33 samples; a device has two."""
        parts = partition("pathological", LABELS, 20, 0)
        assert all(36 <= len(part) <= 66 for part in parts)
        assert max(len(np.unique(LABELS[part])) for part in parts) == 2

    def test_a_class_is_never_dealt_twice_as_often(self) -> None:
        """Shares are taken from the classes with the most left, so after 5 of 20 devices each class gave one."""
        parts = partition("pathological", LABELS, 20, 3)
        assert sorted(label for part in parts[:5] for label in np.unique(LABELS[part])) == list(range(10))


class TestPachinko:
    COARSE = Annotations(labels=np.repeat(np.arange(20), 100), coarse_labels=np.repeat(np.arange(5), 400))

    def test_small_alpha_gives_the_first_device_one_coarse_label(self) -> None:
        """5 devices, 5 coarse labels of 400, 400 each: p is 1 for one label, so one device takes a whole one, and
        then everybody does."""
        assert self.COARSE.coarse_labels is not None
        parts = partition("pachinko", self.COARSE, 5, 0, alpha=1e-9)
        assert sorted(int(np.unique(self.COARSE.coarse_labels[part])[0]) for part in parts) == [0, 1, 2, 3, 4]
        assert {len(np.unique(self.COARSE.coarse_labels[part])) for part in parts} == {1}

    def test_large_alphas_give_everybody_everything(self) -> None:
        """A device draws 400 of 2000 evenly, 20 of each of 20 classes; the last gets what 1600 draws left, so
        sigma <= sqrt(1600 / 20) = 9, 5 sigma = 45; a class is missing with a chance of 2 %."""
        for part in partition("pachinko", self.COARSE, 5, 0, alpha=1e6, fine_alpha=1e6):
            counts = np.bincount(self.COARSE.labels[part], minlength=20)
            assert (counts > 0).sum() >= 17
            assert counts.max() <= 65

    def test_coarse_labels_skew_more_than_fine_ones(self) -> None:
        """The papers' .3 and 10: the first devices, which draw from much, have few coarse labels, but all classes of
        each. Mean over 40 seeds of sum p^2: (.3 + 1) / (5 * .3 + 1) = .52 over coarse labels; 1 / 5 if even."""
        assert self.COARSE.coarse_labels is not None
        sums = []
        for seed in range(40):
            parts = partition("pachinko", self.COARSE, 20, seed)
            first = np.random.default_rng(seed)  # the order of devices is drawn after the heaps are shuffled
            for _ in range(20):
                first.permutation(100)
            part = parts[first.permutation(20)[0]]
            shares = np.bincount(self.COARSE.coarse_labels[part], minlength=5) / len(part)
            sums.append(float((shares**2).sum()))
        assert abs(np.mean(sums) - 0.52) < 0.12


def test_coarse_iid_as_in_the_paper() -> None:
    """CIFAR-100 in small: 100 devices, 20 coarse labels of 5 fine ones, 10 samples each; a device has 2 of each."""
    labels = np.repeat(np.arange(100), 10)
    parts = partition("coarse_iid", Annotations(labels=labels, coarse_labels=labels // 5), 100, 0)
    for device, part in enumerate(parts):
        np.testing.assert_array_equal(np.bincount(labels[part] - device // 5 * 5, minlength=5), [2] * 5)


class TestDomain:
    KNOWN = Annotations(labels=LABELS, domains=np.repeat(np.array([0, 1, 2, 3]), 250))

    def test_a_domain_each(self) -> None:
        for device, part in enumerate(partition("domain", self.KNOWN, 4, 0)):
            np.testing.assert_array_equal(part, np.arange(250 * device, 250 * device + 250))

    def test_a_domain_among_several(self) -> None:
        """4 domains of 250 for 2 devices each, at least 50 for each."""
        parts = partition("domain", self.KNOWN, 8, 0, per_domain=2, min_samples=50)
        for first, second in zip(parts[::2], parts[1::2], strict=True):
            assert len(first) + len(second) == 250
            assert min(len(first), len(second)) >= 50


class TestFeatureNoise:
    def test_it_grows_from_device_to_device(self) -> None:
        """s_i = s_M i / (N - 1): 5 devices up to 20 have 0, 5, 10, 15, 20."""
        rule = FeatureNoise(max_std=20)
        assert [rule.noise_std(device, 5) for device in range(5)] == [0, 5, 10, 15, 20]
        assert rule.noise_std(0, 1) == 0
        assert Iid().noise_std(3, 5) == 0

    def test_the_split_is_even(self) -> None:
        for part, other in zip(partition("feature_noise", LABELS, 4, 0), partition("iid", LABELS, 4, 0), strict=True):
            np.testing.assert_array_equal(part, other)

    @pytest.mark.parametrize("std", [5.0, 20.0])
    def test_the_noise_has_its_deviation(self, std: float) -> None:
        """Of 3 * 100^2 values around 128: rounding adds a variance of 1/12; the estimate's relative error is
        1 / sqrt(2 * 30000) = .4 %, 5 sigma 2 %; the mean is within 5 std / sqrt(30000). 128 is > 6 std from
        the ends, so nothing is clamped."""
        image = np.full((100, 100, 3), 128, dtype=np.uint8)
        noise = add_noise(image, std, seed=0, sample=7).astype(float) - 128
        assert noise.std() == pytest.approx(np.sqrt(std**2 + 1 / 12), rel=0.02)
        assert abs(noise.mean()) < 5 * std / np.sqrt(noise.size)
        assert len({tuple(row) for row in noise.reshape(-1, 3)}) > 1000  # colours are drawn apart

    def test_it_is_clamped_and_does_not_wrap_around(self) -> None:
        """Half of the values around 0 and 255 go over the end."""
        for level in (0, 255):
            noisy = add_noise(np.full((50, 50, 3), level, dtype=np.uint8), 20.0, seed=0, sample=0)
            assert noisy.dtype == np.uint8
            assert np.abs(noisy.astype(int) - level).max() < 6 * 20
            assert (noisy == level).mean() == pytest.approx(0.5, abs=0.05)

    def test_seed_and_sample_decide(self) -> None:
        image = np.full((8, 8, 3), 100, dtype=np.uint8)
        first, again = (add_noise(image, 9.0, seed=1, sample=2) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        for other in (add_noise(image, 9.0, seed=1, sample=3), add_noise(image, 9.0, seed=2, sample=2)):
            assert not np.array_equal(first, other)
        np.testing.assert_array_equal(add_noise(image, 0.0, seed=1, sample=2), image)

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
    def test_max_std(self, value: float) -> None:
        with pytest.raises(ConfigError):
            FeatureNoise(max_std=value)


class TestOptionsAsTexts:
    def test_they_become_what_the_field_is(self) -> None:
        made = make_partition("dirichlet", alpha="0.5", cap="true", min_samples="3")
        assert made == Dirichlet(alpha=0.5, cap=True, min_samples=3)

    @pytest.mark.parametrize(
        ("option", "value", "expected"),
        [("alpha", "much", "float"), ("cap", "2", "bool"), ("min_samples", "2.5", "int")],
    )
    def test_others_are_refused(self, option: str, value: str, expected: str) -> None:
        with pytest.raises(ConfigError):
            make_partition("dirichlet", **{option: value})

    @pytest.mark.parametrize("name", PARTITIONS)
    def test_defaults_make_the_partition(self, name: str) -> None:
        assert make_partition(name, **partition_options(name)) == make_partition(name)


def test_annotations_are_one_per_sample() -> None:
    with pytest.raises(ConfigError):
        Annotations(labels=np.zeros(10, dtype=np.int64), domains=np.zeros(3, dtype=np.int64))


FINE = Annotations(labels=LABELS, coarse_labels=LABELS // 5)
FEW = Annotations(labels=np.array([0, 1, 1] * 2), coarse_labels=np.array([0, 1, 1]).repeat(2))


@pytest.mark.parametrize(
    ("name", "labels", "devices", "options"),
    [
        ("pareto", LABELS, 2, {}),
        ("iid", LABELS, 2, {"alpha": 0.3}),
        ("dirichlet", LABELS, 2, {"beta": 1}),
        *(("dirichlet", LABELS, 2, {"alpha": alpha}) for alpha in (0.0, -1.0, float("nan"), float("inf"))),
        ("dirichlet", LABELS, 2, {"min_samples": -1}),
        ("dirichlet", LABELS, 101, {}),  # more is asked than there is
        # one class among 4 devices goes to one device almost whole, so 20 each never comes up
        ("dirichlet", np.zeros(100, dtype=np.int64), 4, {"alpha": 0.001, "min_samples": 20}),
        *((name, LABELS, devices, {}) for name in ("dirichlet", "iid") for devices in (0, 1001)),
        # 3 * 4 = 12 shares of 10 classes: 3 and 10 have no common divisor
        ("pathological", LABELS, 4, {"classes_per_device": 3}),
        ("pathological", LABELS, 12, {"classes_per_device": 4}),
        ("pathological", LABELS, 10, {"classes_per_device": 11}),
        ("pathological", LABELS, 10, {"classes_per_device": 0}),
        # one sample of each of 2 classes, two shares of each: rounded down all are empty
        ("pathological", np.array([0, 1]), 2, {"classes_per_device": 2}),
        ("pachinko", LABELS, 10, {}),  # without coarse labels
        ("pachinko", TestPachinko.COARSE, 5, {"alpha": 0}),
        ("pachinko", TestPachinko.COARSE, 5, {"fine_alpha": 0}),
        ("coarse_iid", LABELS, 10, {}),
        ("coarse_iid", FINE, 3, {}),
        ("coarse_iid", FEW, 4, {}),
        ("disjoint", LABELS, 4, {}),
        ("domain", LABELS, 4, {}),
        ("domain", TestDomain.KNOWN, 6, {"per_domain": 2}),
        ("domain", TestDomain.KNOWN, 8, {"per_domain": 2, "min_samples": 133}),
        ("domain", TestDomain.KNOWN, 4, {"per_domain": 0}),
        ("domain", TestDomain.KNOWN, 4, {"min_samples": -1}),
    ],
)
def test_refusals(name: str, labels: Any, devices: int, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        partition(name, labels, devices, 0, **options)


@pytest.mark.parametrize("name", ["dirichlet", "iid"])
def test_negative_seed_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        partition(name, LABELS, 2, -1)


def test_partitions_are_values() -> None:
    assert Iid() == make_partition("iid")
