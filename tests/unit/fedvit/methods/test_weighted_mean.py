import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coordinator.record.record import Record, open_record
from fedvit.errors import EmptyCohort
from fedvit.methods.base import ServerState, Upload
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import whole_step
from fedvit.models import SMALL, build_vit
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, delta
from fedvit.wire.messages import Manifest, Result
from tests.support.method_steps import make_context
from tests.support.records import add_result
from tests.support.uploads import upload

VIT = build_vit(SMALL, 4, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2})


def one(value: float) -> Tensors:
    return {"w": np.array([value], np.float32)}


def close(start: Tensors, uploads: list[Upload]) -> Tensors:
    return WeightedMean().close(ServerState(start), uploads, make_context(VIT))[0].tensors


def test_the_mean_weighs_devices_by_images_and_discounts_late_ones() -> None:
    # each device weighs as much as it has images: Sizes 1 and 3, tensors 0 and 4 from a start of 0: (1 * 0 + 3 * 4)
    # / 4 = 3, not 2
    after = close(one(0), [upload("a", 1, one(0)), upload("b", 3, one(4))])
    np.testing.assert_array_equal(after["w"], [3.0])
    # a late update counts by its discount and nobody makes up for it: FedBuff: sizes 1 and 3, deltas 8 and 4, the
    # first three rounds late: (1 * 8 / sqrt(1 + 3) + 3 * 4) / 4 = 4
    late = upload("a", 1, one(8))._replace(discount=(1 + 3) ** -0.5)
    after = close(one(0), [late, upload("b", 3, one(4))])
    np.testing.assert_array_equal(after["w"], [4.0])
    # the mean delta is added to the start: From a start of 10 the devices went to 10 and 14: 10 + 3 = 13, the mean
    # of the weights themselves
    after = close(one(10), [upload("a", 1, one(0)), upload("b", 3, one(4))])
    np.testing.assert_array_equal(after["w"], [13.0])


def test_missing_devices_and_tensors_leave_the_others_as_they_are() -> None:
    # devices that were not asked do not pull toward zero: Two devices with 100 images each bring no result; weights
    # over all 204 images would give 12 / 204. A device that found no readable image has nothing to say, whatever it
    # sends
    uploads = [upload("a", 1, one(0)), upload("b", 3, one(4))]
    assert close(one(0), uploads)["w"] == 3.0
    assert close(one(0), [*uploads, upload("empty", 0, one(1e9))])["w"] == 3.0
    start = {**one(0), "frozen": np.array([7.0], np.float32)}
    after = close(start, [upload("a", 1, one(2))])
    assert after["frozen"] == 7.0
    assert after["w"] == 2.0
    assert start["w"] == 0.0  # what was given is not written to
    start: Tensors = {"w": np.zeros((2, 3), np.float16), "x": np.zeros((), np.float64)}
    after = close(start, [upload("a", 1, {"w": np.ones((2, 3), np.float16), "x": np.array(1.0)})])
    assert {name: (value.shape, value.dtype) for name, value in after.items()} == {
        "w": ((2, 3), np.float16),
        "x": ((), np.float64),
    }


def test_the_report_says_how_far_the_model_moved() -> None:
    """Mean deltas 3 and 4 in two tensors: the norm is sqrt(9 + 16) = 5."""
    start = {"w": np.array([0.0], np.float32), "x": np.array([0.0], np.float32)}
    uploads = [upload("a", 1, {"w": np.array([3.0], np.float32), "x": np.array([4.0], np.float32)})]
    state, figures = WeightedMean().close(
        ServerState(start, {"m": one(1)["w"]}, {"a": "d"}), uploads, make_context(VIT)
    )
    assert figures == {"update_norm": 5.0}
    assert state.memory == {"m": np.array([1.0], np.float32)}
    assert state.uploads == {"a": "d"}


@pytest.mark.parametrize("uploads", [[], [upload("a", 0, one(1))]])
def test_without_an_image_there_is_no_mean(uploads: list[Upload]) -> None:
    with pytest.raises(EmptyCohort):
        WeightedMean().close(ServerState(one(0)), uploads, make_context(VIT, 7))


def test_uploads_are_loaded_one_at_a_time() -> None:
    """Memory does not grow with the cohort: when the next is loaded, at most one tensor of all before is still held."""
    arrays: list[weakref.ref[np.ndarray]] = []
    held: list[int] = []

    def load() -> Tensors:
        held.append(sum(array() is not None for array in arrays))
        tensors = {name: np.ones(5, np.float32) for name in "wxyz"}
        arrays.extend(weakref.ref(array) for array in tensors.values())
        return dict(tensors)

    uploads = [Upload(str(number), 1, "", load) for number in range(6)]
    WeightedMean().close(ServerState({name: np.zeros(5, np.float32) for name in "wxyz"}), uploads, make_context(VIT))
    assert len(held) == 6
    assert max(held) <= 1


# --- laws ---------------------------------------------------------------------------------------------

DELTAS = hnp.arrays(np.float32, 5, elements=st.floats(-100, 100, width=32))


@given(DELTAS, DELTAS, st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_the_mean_of_equal_deltas_is_that_delta(start: np.ndarray, step: np.ndarray, sizes: list[int]) -> None:
    """Sums in float64 of weights that sum to 1 within 1e-15: float32 cannot tell it from the sum of two."""
    uploads = [upload(str(number), size, {"w": step}) for number, size in enumerate(sizes)]
    after = close({"w": start}, uploads)["w"]
    expected = start.astype(np.float64) + step
    np.testing.assert_allclose(after, expected, rtol=1.2e-7, atol=1e-12 * max(1.0, float(np.abs(start).max())))


@given(st.lists(st.tuples(st.integers(1, 1000), DELTAS), min_size=2, max_size=5), DELTAS)
def test_averaging_deltas_is_averaging_weights(results: list[tuple[int, np.ndarray]], start: np.ndarray) -> None:
    total = sum(size for size, _ in results)
    expected = sum(size / total * (start.astype(np.float64) + step) for size, step in results)
    uploads = [upload(str(number), size, {"w": step}) for number, (size, step) in enumerate(results)]
    np.testing.assert_allclose(close({"w": start}, uploads)["w"], expected, rtol=1e-6, atol=1e-4)


# --- the order of arrival -----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with open_record(tmp_path) as store:
        yield store


def test_the_order_of_arrival_cannot_change_a_bit(store: Record) -> None:
    """Twelve results of very different size go through the store, from which the coordinator reads them; sums in
    the order of arrival would differ in the last bits (which the last line shows)."""
    draw = np.random.default_rng(0)
    tensors = {f"pi-{number}": {"w": draw.normal(0, 10.0 ** (number % 5), 2000)} for number in range(12)}
    samples = {device: 1 + 37 * number for number, device in enumerate(tensors)}
    outcomes, unsorted = [], []
    for attempt in range(3):
        run, order = f"run-{attempt}", list(tensors)
        random.Random(attempt).shuffle(order)
        store.runs.create(run, {})
        store.rounds.open(run, 1, order)
        for device in order:
            manifest = Manifest(f"blake3:{device}", 1, 4096)
            add_result(store, device, Result(run, 1, "train", samples[device], {}, ResourceUse(), manifest))
        uploads = [
            upload(result.device, result.samples, tensors[result.device])
            for result in store.tasks.read_results(run, 1, "train")
        ]
        outcomes.append(close({"w": np.zeros(2000)}, uploads)["w"].tobytes())
        arrived = [upload(device, samples[device], tensors[device]) for device in order]
        unsorted.append(close({"w": np.zeros(2000)}, arrived)["w"].tobytes())
    assert len(set(outcomes)) == 1
    assert len(set(unsorted)) > 1


# --- FedAvg as a whole --------------------------------------------------------------------------------


def test_a_round_of_fedavg_equals_a_step_on_the_pooled_data() -> None:
    """Three devices with 2, 3 and 5 images, one epoch of one full batch with SGD: the weighted mean of the steps is
    lr times the mean gradient over all ten images. In float64, so that nothing hides in rounding; batches are padded
    to 6, and what is in the padding must not count."""
    method = FedAvg(lr=0.5, weight_decay=0.1)
    vit = build_vit(SMALL, 4, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2})
    vit = vit.double()
    (phase,) = method.phases(vit)
    step = whole_step(method, vit, phase)
    draw = torch.Generator().manual_seed(0)
    patches = torch.randn(10, 4, 192, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 4, (10,), generator=draw)
    start = {name: value.numpy() for name, value in vit.tensors().items()}

    def trained(rows: slice, size: int) -> Tensors:
        count = len(labels[rows])
        inputs = {f"tensor/{name}": value for name, value in vit.tensors().items()}
        inputs["batch/patches"] = torch.full((size, 4, 192), 1e3, dtype=torch.float64)
        inputs["batch/patches"][:count] = patches[rows]
        inputs["batch/labels"] = torch.zeros(size, dtype=torch.int64)
        inputs["batch/labels"][:count] = labels[rows]
        inputs["batch/weight"] = (torch.arange(size) < count).double()
        inputs["hyper/lr"] = torch.tensor(phase.lr, dtype=torch.float64)
        inputs["hyper/step"] = torch.tensor(1.0, dtype=torch.float64)
        outputs = step(inputs)
        return {name: outputs[f"new/tensor/{name}"].numpy() for name in start}

    parts = {"a": slice(0, 2), "b": slice(2, 5), "c": slice(5, 10)}
    uploads = [upload(name, part.stop - part.start, delta(trained(part, 6), start)) for name, part in parts.items()]
    after, pooled = close(start, uploads), trained(slice(0, 10), 10)
    assert after.keys() == pooled.keys()
    for name, want in pooled.items():
        np.testing.assert_allclose(after[name], want, rtol=0, atol=1e-13, err_msg=name)
    assert max(float(np.abs(pooled[name] - start[name]).max()) for name in start) > 1e-3
