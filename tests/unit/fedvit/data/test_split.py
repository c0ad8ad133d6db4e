import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.data.split import KeptSplit, split_train_test
from fedvit.errors import ConfigError, Damaged
from tests.support.codes import has_code


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
        with pytest.raises(ConfigError, check=has_code("FV1408", str(share))):
            split_train_test(np.arange(3), np.zeros(3, dtype=np.int64), share, np.random.default_rng(0))


def test_no_flipped_bit_changes_a_kept_split(tmp_path: Path) -> None:
    file, split = tmp_path / "split.json", KeptSplit.of(map(str, range(20)), map(str, range(20, 25)), 0.2)
    split.save(file)
    (tmp_path / "split.copy.json").unlink()
    content = file.read_bytes()
    assert len(split.exceptions) > 1
    damaged = 0
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with contextlib.suppress(Damaged):
            assert KeptSplit.load(file, 0.2) == split
            continue
        damaged += 1
    assert damaged > 8 * len(content) - 100  # others change the name of the digest
