"""Which updates are left out or shortened; all numbers by hand."""

from typing import Any

import numpy as np
import pytest

from coordinator.compute.screening import Screen, Screened
from fedvit.methods.base import Upload
from fedvit.tensors import Tensors


def update(device: str, length: float, samples: int = 10) -> Upload:
    """An update of this norm in two tensors: a 3-4-5 triangle."""
    tensors: Tensors = {"a": np.float32([length * 0.6]), "b": np.float32([[length * 0.8]])}
    return Upload(device, samples, f"blake3:{device}", lambda: tensors)


def features(device: str, size: float, rows: int = 4, labels: Any = None) -> Upload:
    """Features that are `size` everywhere, so that this is their root mean square."""
    tensors: Tensors = {
        "features.1": np.full((rows, 2, 3), size, np.float32),
        "labels": np.arange(rows, dtype=np.int64) if labels is None else labels,
    }
    return Upload(device, rows, f"blake3:{device}", lambda: tensors)


def lengths(screened: Screened) -> dict[str, float]:
    return {
        upload.device: float(np.sqrt(sum(np.square(value).sum() for value in upload.load().values())))
        for upload in screened.uploads
    }


def test_without_limits_nothing_is_read() -> None:
    def never() -> Tensors:
        raise AssertionError

    uploads = [Upload("a", 1, "blake3:a", never)]
    assert Screen().apply(uploads) == Screened(uploads, [], {})


def test_what_is_too_long_is_left_out() -> None:
    """Norms 1, 2, 3, 60: the median is 2.5; 60 is 24 times that, 3 is 1.2 times."""
    screened = Screen(reject_scale=5.0).apply(
        [update(name, size) for name, size in zip("abcd", (1, 2, 3, 60), strict=True)]
    )
    assert [upload.device for upload in screened.uploads] == ["a", "b", "c"]
    [outlier] = screened.outliers
    assert outlier.device == "d"
    assert outlier.reason == ("its update has norm 60, 24 times the cohort's median; at most 5 times is accepted")
    assert screened.figures == {"median_norm": pytest.approx(2.5), "left_out": 1.0}


def test_outliers_are_long_updates_of_three_or_more() -> None:
    assert Screen(reject_scale=2.0).apply([update("a", 1), update("b", 100)]).outliers == []
    # a short update is no outlier: A device with few images moves little
    assert Screen(reject_scale=2.0).apply([update("a", 0.001), update("b", 1), update("c", 1)]).outliers == []


def test_clipping_to_a_number_or_to_the_median_of_all() -> None:
    screened = Screen(clip_norm=2.0).apply([update("a", 1), update("b", 8)])
    assert lengths(screened) == pytest.approx({"a": 1, "b": 2})
    assert screened.figures["clipped"] == 1
    # clipping to the median: Norms 1, 4, 100: both above 4 are scaled to it, in their direction
    screened = Screen(clip_norm="median").apply([update("a", 1), update("b", 4), update("c", 100)])
    assert lengths(screened) == pytest.approx({"a": 1, "b": 4, "c": 4})
    assert screened.uploads[2].load()["a"] == pytest.approx([2.4])
    # the median is of all that came: Also of those that are left out: 1, 4, 5, 100 have 4.5, without the last it
    # would be 4
    screened = Screen(clip_norm="median", reject_scale=5.0).apply(
        [update(name, size) for name, size in zip("abcd", (1, 4, 5, 100), strict=True)]
    )
    assert lengths(screened) == pytest.approx({"a": 1, "b": 4, "c": 4.5})


def test_samples_count_up_to_so_many_medians() -> None:
    """10, 20, 5000: three times 20."""
    screened = Screen(max_weight=3.0).apply([update("a", 1, 10), update("b", 1, 20), update("c", 1, 5000)])
    assert {upload.device: upload.samples for upload in screened.uploads} == {"a": 10, "b": 20, "c": 60}


@pytest.mark.parametrize("size", [40.0, 0.01])
def test_features_that_are_far_off_are_left_out(size: float) -> None:
    """Root mean squares 1, 2, 3 and one far above or below the median by more than ten."""
    uploads = [features("a", 1), features("b", 2), features("c", 3), features("d", size)]
    screened = Screen(reject_scale=10.0).apply(uploads)
    assert [upload.device for upload in screened.uploads] == ["a", "b", "c"]
    assert "'features.1' have root mean square" in screened.outliers[0].reason


def test_features_are_not_clipped_and_need_not_be_there() -> None:
    """An upload without a row has no size; clipping is for deltas."""
    uploads = [features("a", 1), features("b", 2), features("c", 3, rows=0)]
    screened = Screen(clip_norm=0.5, reject_scale=10.0).apply(uploads)
    assert [upload.device for upload in screened.uploads] == ["a", "b", "c"]
    assert float(screened.uploads[1].load()["features.1"].max()) == 2


def test_labels_of_other_tasks_are_no_update() -> None:
    """Sets of classes and numbers are floats with an axis of their own."""
    sets = np.float32([[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]])
    uploads = [features(name, size, labels=sets) for name, size in zip("abcd", (1, 2, 3, 40), strict=True)]
    screened = Screen(clip_norm=0.5, reject_scale=10.0).apply(uploads)
    assert [upload.device for upload in screened.uploads] == ["a", "b", "c"]
    assert screened.figures["median_norm"] == 0
    assert all((upload.load()["labels"] == sets).all() for upload in screened.uploads)


def test_the_order_of_arrival_does_not_matter() -> None:
    uploads = [update(name, size) for name, size in zip("abcde", (1, 2, 3, 4, 60), strict=True)]
    screen = Screen(clip_norm="median", reject_scale=5.0, max_weight=2.0)
    forwards, backwards = screen.apply(uploads), screen.apply(uploads[::-1])
    assert lengths(forwards) == lengths(backwards)
    assert forwards.outliers == backwards.outliers
