import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvit.data.partition import Dirichlet, Iid, make_partition, partition, split_train_test
from fedvit.errors import ConfigError

LABELS = np.repeat(np.arange(10), 100)


class TestDirichlet:
    def test_every_device_gets_the_minimum(self) -> None:
        """Alpha .1 among 10 devices: a plain draw nearly always leaves somebody with less than 20 of 1000."""
        plain = [partition("dirichlet", LABELS, 10, seed, alpha=0.1, min_samples=0) for seed in range(20)]
        assert min(len(part) for parts in plain for part in parts) < 20
        for seed in range(20):
            parts = partition("dirichlet", LABELS, 10, seed, alpha=0.1, min_samples=20)
            assert min(len(part) for part in parts) >= 20

    def test_the_minimum_is_ten_where_nothing_is_said(self) -> None:
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

    def test_no_draw_gave_the_minimum(self) -> None:
        """One class among 4 devices with alpha .001 goes to one device almost whole, so 25 each never comes up."""
        with pytest.raises(
            ConfigError, match=r"1000 draws with alpha 0\.001 never gave each of 4 devices 20 of the 100"
        ):
            partition("dirichlet", np.zeros(100, dtype=np.int64), 4, 0, alpha=0.001, min_samples=20)

    def test_more_asked_than_there_is(self) -> None:
        with pytest.raises(ConfigError, match=r"101 devices with at least 10 samples each need 1010 .* has 1000"):
            partition("dirichlet", LABELS, 101, 0)

    @pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf")])
    def test_alpha(self, alpha: float) -> None:
        with pytest.raises(ConfigError, match=f"alpha is {alpha}, expected a number > 0"):
            partition("dirichlet", LABELS, 2, 0, alpha=alpha)

    def test_min_samples(self) -> None:
        with pytest.raises(ConfigError, match="min_samples is -1, expected >= 0"):
            partition("dirichlet", LABELS, 2, 0, min_samples=-1)

    def test_a_tiny_alpha_is_still_a_partition(self) -> None:
        """1e-8: nearly every share underflows to 0, which must not become 0 / 0."""
        parts = partition("dirichlet", LABELS, 3, 0, alpha=1e-8, cap=True, min_samples=0)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_iid_sizes_differ_by_at_most_one() -> None:
    """11 among 4: 3, 3, 3, 2."""
    assert [len(part) for part in partition("iid", np.zeros(11, dtype=np.int64), 4, 0)] == [3, 3, 3, 2]


class TestRefusals:
    def test_name(self) -> None:
        with pytest.raises(ConfigError, match="partition 'pareto' is not known; there are: dirichlet, iid"):
            partition("pareto", LABELS, 2, 0)

    def test_option(self) -> None:
        with pytest.raises(ConfigError, match="partition iid has no option 'alpha'; it has: none"):
            partition("iid", LABELS, 2, 0, alpha=0.3)
        with pytest.raises(
            ConfigError, match="partition dirichlet has no option 'beta'; it has: alpha, cap, min_samples"
        ):
            partition("dirichlet", LABELS, 2, 0, beta=1)

    @pytest.mark.parametrize("name", ["dirichlet", "iid"])
    def test_devices_and_seed(self, name: str) -> None:
        with pytest.raises(ConfigError, match="devices is 0, expected >= 1"):
            partition(name, LABELS, 0, 0)
        with pytest.raises(ConfigError, match="1001 devices, but only 1000 samples"):
            partition(name, LABELS, 1001, 0)
        with pytest.raises(ConfigError, match="seed is -1, expected >= 0"):
            partition(name, LABELS, 2, -1)


def test_partitions_are_values() -> None:
    assert Iid() == make_partition("iid")


class TestSplit:
    @pytest.mark.parametrize(
        ("count", "share", "test"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (10, 0.2, 2), (10, 0.25, 3), (5, 0.5, 3)]
    )
    def test_sizes(self, count: int, share: float, test: int) -> None:
        """n * share rounded half up, at least 1, never all; a single sample is for training; 2.5 -> 3."""
        halves = split_train_test(np.arange(count), np.zeros(count, dtype=np.int64), share, np.random.default_rng(0))
        assert [len(half) for half in halves] == [count - test, test]

    def test_no_share(self) -> None:
        train, test = split_train_test(np.arange(5), np.zeros(5, dtype=np.int64), 0, np.random.default_rng(0))
        assert train.tolist() == [0, 1, 2, 3, 4]
        assert test.tolist() == []

    def test_labels_are_those_of_the_whole_data_set(self) -> None:
        """The device holds rows 6..9, all of class 1; rows 0..5 are others'."""
        labels = np.array([0] * 6 + [1] * 4)
        train, test = split_train_test(np.array([6, 7, 8, 9]), labels, 0.25, np.random.default_rng(0))
        assert sorted([*train, *test]) == [6, 7, 8, 9]
        assert len(test) == 1

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 4), max_size=80), st.floats(0.05, 0.95), st.integers(0, 9))
    def test_stratified(self, held: list[int], share: float, seed: int) -> None:
        """Both parts hold every class that has two samples, and no class is off its share by more than one sample."""
        labels = np.array(held, dtype=np.int64)
        indices = np.arange(len(held))
        train, test = split_train_test(indices, labels, share, np.random.default_rng(seed))
        again = split_train_test(indices, labels, share, np.random.default_rng(seed))
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), indices)
        np.testing.assert_array_equal(test, again[1])
        for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
            in_test = int((labels[test] == label).sum())
            assert abs(in_test - count * share) <= 1
            if count >= 2:
                assert 0 < in_test < count

    @pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
    def test_share(self, share: float) -> None:
        with pytest.raises(ConfigError, match=f"test share is {share}"):
            split_train_test(np.arange(3), np.zeros(3, dtype=np.int64), share, np.random.default_rng(0))
