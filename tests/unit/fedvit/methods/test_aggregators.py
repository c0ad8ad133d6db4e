"""What a cohort's updates come to, by hand and by law."""

import resource
import tracemalloc
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedvit.errors import EmptyCohort
from fedvit.methods import aggregators
from fedvit.methods.aggregators import (
    Aggregator,
    Delta,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    TrimmedMean,
    make_aggregator,
    norm_of,
)
from fedvit.tensors import Array, TensorFile, Tensors, pack, unpack
from fedvit.updates import Decoded, decode, make_codec
from profiles.probes.host import peak_rss_bytes
from tests.support.forked import FORKS

EVERY: list[str] = ["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
ROBUST: list[str] = EVERY[1:]


def combined(aggregator: Aggregator, *rows: list[float] | np.ndarray, scale: float = 1.0) -> list[float]:
    """Devices whose update is one tensor of these numbers."""
    deltas = [Delta(1 / len(rows), lambda row=row: {"w": np.asarray(row, np.float32)}) for row in rows]
    return [float(value) for value in combine_tensors(aggregator, deltas, scale)["w"]]


def combine_tensors(aggregator: Aggregator, deltas: list[Delta], scale: float = 1.0) -> Tensors:
    return dict(aggregator.combine(deltas, {"w", "v"}, scale))


class TestByHand:
    def test_mean(self) -> None:
        """Weights 1/4 and 3/4 of 0 and 4, half of the way: 0.5 * 3."""
        deltas = [Delta(0.25, lambda: {"w": np.zeros(1)}), Delta(0.75, lambda: {"w": np.full(1, 4.0)})]
        assert combine_tensors(Mean(), deltas, 0.5)["w"] == [1.5]

    def test_median(self) -> None:
        """Of 1, 2, 90 the middle is 2; of -7, 5, 6 it is 5: from different devices."""
        assert combined(Median(), [1, 6], [2, -7], [90, 5]) == [2, 5]

    def test_median_of_an_even_number(self) -> None:
        assert combined(Median(), [1], [2], [4], [90]) == [3]

    def test_trimmed_mean(self) -> None:
        """0.2 of 5 is one at either end: (1 + 2 + 3) / 3."""
        assert combined(TrimmedMean(0.2), [-50], [1], [2], [3], [90]) == [2]

    def test_what_is_cut_is_rounded_down(self) -> None:
        """0.2 of 4 is none: (0 + 1 + 2 + 5) / 4."""
        assert combined(TrimmedMean(0.2), [0], [1], [2], [5]) == [2]

    def test_krum(self) -> None:
        """Five devices, one malicious: each sums its 5 - 1 - 2 = 2 nearest squared distances.

        0: 1 + 9 = 10; 1: 1 + 4 = 5; 3: 4 + 9 = 13 (to 1 and 6); 6: 9 + 16 = 25 (to 3 and 10). 1 has the least.
        """
        assert combined(Krum(0.2), [0], [1], [3], [6], [10]) == [1]

    def test_multi_krum_takes_the_mean_of_all_but_the_malicious(self) -> None:
        """As above, and 10: 16 + 49 = 65 has the most: (0 + 1 + 3 + 6) / 4."""
        assert combined(Krum(0.2, multi=True), [0], [1], [3], [6], [10]) == [2.5]

    def test_krum_with_too_few(self) -> None:
        """f = 1 of 4 needs 2 + 3."""
        with pytest.raises(EmptyCohort):
            combined(Krum(0.25), [0], [1], [2], [3])

    def test_geometric_median_of_a_majority_is_the_majority(self) -> None:
        """Where more than half agree, the sum of distances is least with them."""
        got = combined(GeometricMedian(), [1, 2], [1, 2], [1, 2], [100, -100], [50, 7])
        np.testing.assert_allclose(got, [1, 2], atol=1e-3)

    def test_geometric_median_of_a_triangle(self) -> None:
        """Fermat's point of an equilateral triangle is its centre."""
        corners = [[np.cos(angle), np.sin(angle)] for angle in 2 * np.pi * np.arange(3) / 3]
        np.testing.assert_allclose(combined(GeometricMedian(), *corners), [0, 0], atol=1e-6)

    def test_distances_are_over_all_tensors(self) -> None:
        """In `w` alone device 0 is nearest to its neighbours; `v` sets it far away."""
        near = [[0.0], [1.0], [1.5], [3.0], [4.0]]
        far = [[100.0], [0.0], [0.0], [0.0], [0.0]]
        deltas = [
            Delta(0.2, lambda w=w, v=v: {"w": np.float32(w), "v": np.float32(v)})
            for w, v in zip(near, far, strict=True)
        ]
        assert combine_tensors(Krum(0.2), deltas)["w"] == [1.5]


def updates(devices: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, (devices, 4), elements=st.floats(-100, 100, width=32))


@pytest.mark.parametrize("name", EVERY)
class TestLaws:
    @given(hnp.arrays(np.float32, 4, elements=st.floats(-100, 100, width=32)))
    @settings(max_examples=30)
    def test_of_equal_updates_is_that_update(self, name: str, row: np.ndarray) -> None:
        np.testing.assert_allclose(combined(make_aggregator(name, 0.2), *[row] * 7), row, rtol=1e-6, atol=1e-30)

    def test_the_order_of_arrival_does_not_matter(self, name: str) -> None:
        rows = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
        straight = combined(make_aggregator(name, 0.3), *rows)
        for seed in range(5):
            shuffled = np.random.default_rng(seed).permutation(rows)
            np.testing.assert_allclose(combined(make_aggregator(name, 0.3), *shuffled), straight, rtol=1e-6)

    def test_scale(self, name: str) -> None:
        rows = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
        whole = np.array(combined(make_aggregator(name, 0.3), *rows))
        np.testing.assert_allclose(combined(make_aggregator(name, 0.3), *rows, scale=0.5), whole / 2, rtol=1e-6)

    def test_blocks_change_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = np.random.default_rng(3).normal(size=(9, 50)).astype(np.float32)
        whole = combined(make_aggregator(name, 0.3), *rows)
        monkeypatch.setattr(aggregators, "BLOCK_VALUES", 7)
        np.testing.assert_allclose(combined(make_aggregator(name, 0.3), *rows), whole, rtol=1e-6)

    def test_other_names_are_passed_over(self, name: str) -> None:
        deltas = [Delta(0.2, lambda: {"w": np.ones(2), "else": np.ones(2)})] * 5
        assert set(combine_tensors(make_aggregator(name, 0.2), deltas)) == {"w"}


class TestAgainstAMinority:
    @given(updates(6), updates(3))
    @settings(max_examples=50)
    @pytest.mark.parametrize("name", ["median", "trimmed_mean"])
    def test_every_coordinate_is_among_the_honest_ones(
        self, name: str, honest: np.ndarray, malicious: np.ndarray
    ) -> None:
        """Three of nine lie, a third: whatever they say, with a trim of a third."""
        got = np.array(combined(make_aggregator(name, 1 / 3), *honest, *(malicious * 1e6)))
        assert (got >= honest.min(axis=0) - 1e-4).all()
        assert (got <= honest.max(axis=0) + 1e-4).all()

    @given(updates(6), updates(3))
    @settings(max_examples=50)
    def test_krum_picks_an_honest_one(self, honest: np.ndarray, malicious: np.ndarray) -> None:
        """Honest updates within 1 of each other, malicious ones at 1000 and further, and not all together."""
        near = honest / 1000
        distant = malicious + np.float32([[1000.0], [-3000.0], [9000.0]])
        picked = combined(Krum(0.3), *near, *distant)
        assert any(np.allclose(picked, row) for row in near)

    @pytest.mark.parametrize("name", ROBUST)
    def test_a_mean_moves_and_these_do_not(self, name: str) -> None:
        rows = np.random.default_rng(0).normal(size=(9, 4))
        rows[:2] = 1e6
        assert np.abs(combined(Mean(), *rows)).max() > 1e5
        assert np.abs(combined(make_aggregator(name, 0.25), *rows)).max() < 10


MANY = 2000
MEASURED: list[str] = ["median", "trimmed_mean", "krum", "geometric_median"]


def measure_on_many(folder: Path, answer: Connection) -> None:
    """In a process of its own, which may open 256 files: what each robust rule makes of the uploads in the folder, with
    blocks of 1 MiB, and how far it lifts the peak of resident memory."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    aggregators.COHORT_VALUES = 1 << 17
    codecs = sorted(folder.iterdir())
    shapes = {"w": (32, 32)}
    for codec in codecs:
        files = sorted(codec.iterdir())
        deltas = [
            Delta(1 / len(files), lambda file=file: Decoded(TensorFile(file), shapes))  # type: ignore[misc]
            for file in files
        ]
        for name in MEASURED if codec.name == "none" else MEASURED[:1]:
            rule = make_aggregator(name, 0.1)
            rule.combine(deltas[:9], {"w"})  # what a rule needs once, however many come
            before = reset_peak()
            made = rule.combine(deltas, {"w"})["w"]
            answer.send((codec.name, name, made, (peak_rss_bytes() or 0) - before))
    answer.send(None)


def reset_peak() -> int:
    """Linux takes 5 as: the peak begins anew at what is resident now, which is returned."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes() or 0


def test_many_updates_need_neither_their_memory_nor_their_files_open(tmp_path: Path) -> None:
    """Of 2000 updates of 1024 numbers, 16 MiB of float64, the rules by coordinates hold 1 MiB and what sorts them, and
    no file open but one; also where updates are coded. Rules by distances hold tables of 2000 x 2000 distances."""
    rows = np.random.default_rng(0).normal(size=(MANY, 32, 32)).astype(np.float32)
    decoded: dict[str, np.ndarray] = {}
    for text in ("none", "int8", "fp16", "top_k"):
        codec, folder = make_codec(text), tmp_path / text
        folder.mkdir()
        count = MANY if text == "none" else 300
        for number, row in enumerate(rows[:count]):
            (folder / f"{number:04}").write_bytes(pack(codec.encode({"w": row})))
        decoded[text] = np.stack(
            [decode(unpack(file.read_bytes()), {"w": (32, 32)})["w"] for file in sorted(folder.iterdir())]
        )
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=measure_on_many, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    found = []
    while (answer := ours.recv()) is not None:
        found.append(answer)
    process.join()
    assert {(codec, name) for codec, name, _, _ in found} == {
        *(("none", name) for name in MEASURED), ("int8", "median"), ("fp16", "median"), ("top_k", "median"),
    }  # fmt: skip
    for codec, name, made, growth in found:
        assert growth < (6 << 20 if name in ("median", "trimmed_mean") else 4 * MANY**2 * 8), (codec, name)
        if name == "median":
            np.testing.assert_array_equal(made, np.median(decoded[codec].astype(np.float64), axis=0))


@pytest.mark.parametrize("name", ROBUST)
def test_memory_is_bounded_by_the_largest_tensor(name: str, tmp_path: Path) -> None:
    """Nine updates of 2 x 2 MiB in files; the result is 8 MiB of float64, and never are 36 MiB of updates in memory."""
    values = 1 << 19
    draw = np.random.default_rng(0)

    def loader(device: int) -> Callable[[], Mapping[str, Array]]:
        file = tmp_path / f"{device}.safetensors"
        file.write_bytes(pack({key: draw.normal(size=values).astype(np.float32) for key in ("w", "v")}))
        return lambda: TensorFile(file)

    deltas = [Delta(1 / 9, loader(device)) for device in range(9)]
    blocks = 9 * aggregators.BLOCK_VALUES * 8
    tracemalloc.start()
    try:
        make_aggregator(name, 0.3).combine(deltas, {"w", "v"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * values * 8 + 3 * blocks


def test_norm_is_of_all_floating_tensors() -> None:
    """Squares 9, 16 and 144: 13; labels are no part of it."""
    tensors = {"a": np.float32([3, 4]), "b": np.float32([[12]]), "labels": np.array([1000])}
    assert norm_of(tensors) == 13
    assert norm_of(tensors, {"a"}) == 5
