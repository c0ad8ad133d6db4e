"""Numbers of a sum: of a training the deltas of shared tensors by weight, of an evaluation the counts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from fedvit.blobs import digest_of
from fedvit.program import Program
from fedvit.secure.fixed_point import decode_mean, encode_values
from fedvit.secure.noise import COUNT_STEPS, NoiseShare, count_noisily, encode_noisily
from fedvit.secure.vectors import Exact, Vector
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import SumNoise, SumTerms, TaskKind

NUMBERS = "#numbers"
"""The part of a payload that is added up exactly."""
_TRAIN_NUMBERS = 4  # weight, loss, numbers that were clipped, noisy count of updates within the norm; largest number
_KEPT_NUMBERS = 2  # of a training: images, loss; largest number
_EVALUATION_NUMBERS = 3  # images, right answers, devices that count by class; then images and right answers by class
_LOSS_STEPS = 1 << 12
"""Steps of a loss of 1, times the weight."""
_MAX_LOSS = 1e4
_LARGEST_STEPS = 1 << 20
"""Steps of a largest number of 1."""
_MAX_LARGEST = 1e6


class TrainedSum(NamedTuple):
    """The sum of a round's training."""

    mean: Tensors  # float32 deltas by name, weighted by training images
    samples: int
    loss: float | None  # mean; None if no device has trained
    clipped: int  # numbers outside of the range, of all devices together
    within: float | None = None  # noisy share of devices with an update within the norm; None: not counted
    largest: float | None = None  # sum of each device's largest number; None: not measured


class EvaluatedSum(NamedTuple):
    """The sum of a round's evaluation."""

    samples: int
    correct: int
    by_class: list[tuple[int, int]]  # images and right answers of each class; empty: a device does not count them


class Layout(NamedTuple):
    """The form of a sum: it follows from a payload, and from a Program."""

    shapes: dict[str, tuple[int, ...]]  # of the tensors whose deltas are added up, in the order of their names
    exact: int  # numbers that are added up exactly

    @classmethod
    def of_program(cls, program: Program, kind: TaskKind) -> "Layout":
        """The form of the results of a Program."""
        if kind == "evaluate":
            return cls({}, _EVALUATION_NUMBERS + 2 * len(program.classes))
        shapes = {name: program.tensors[name].shape for name in sorted(program.list_summed())}
        return cls(shapes, _TRAIN_NUMBERS + program.is_sum_coded)

    @classmethod
    def of_payload(cls, kind: TaskKind, payload: Mapping[str, Array]) -> "Layout":
        """The form of a device's result."""
        shapes = {name: payload[name].shape for name in sorted(payload) if name != NUMBERS}
        numbers = len(payload[NUMBERS])
        return cls(shapes, numbers if kind == "evaluate" else _TRAIN_NUMBERS + numbers - _KEPT_NUMBERS)

    @property
    def words(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def digest(self) -> str:
        return digest_of(msgspec.msgpack.encode((list(self.shapes.items()), self.exact)))


def make_training_payload(
    deltas: Mapping[str, Array], samples: int, loss: float, *, measures_largest: bool = False
) -> Tensors:
    """Return what a device keeps of a training until it is added up."""
    largest = [max((float(np.abs(delta).max(initial=0.0)) for delta in deltas.values()), default=0.0)]
    return {**deltas, NUMBERS: np.array([samples, loss, *(largest if measures_largest else [])], np.float64)}


def make_evaluation_payload(
    program: Program, samples: int, correct: int, by_class: Sequence[tuple[int, int, int]] | None
) -> Tensors:
    """Return what a device keeps of an evaluation; `by_class`: label, images, right answers; None: not counted."""
    numbers = np.zeros(_EVALUATION_NUMBERS + 2 * len(program.classes), np.int64)
    numbers[:_EVALUATION_NUMBERS] = samples, correct, by_class is not None
    for label, images, right in by_class or ():
        numbers[_EVALUATION_NUMBERS + 2 * label :][:2] = images, right
    return {NUMBERS: numbers}


def make_vector(
    kind: TaskKind, payload: Mapping[str, Array], terms: SumTerms, draw: Sequence[int], noise: NoiseShare | None = None
) -> Vector:
    """Return a payload as the integers of a sum, which follow from the arguments.

    `draw`: seeds of the rounding without noise; `noise`: needed if the terms ask for it.
    """
    numbers = payload[NUMBERS]
    if kind == "evaluate":
        return Vector(np.zeros(0, np.uint32), numbers.astype(np.int64).view(np.uint64))
    if terms.noise:
        assert noise is not None  # the terms ask for it
        return _make_noisy_vector(payload, terms, terms.noise, noise)
    weight, loss = min(int(numbers[0]), terms.max_weight), float(np.clip(numbers[1], -_MAX_LOSS, _MAX_LOSS))
    generator, parts, clipped = np.random.default_rng(list(draw)), [np.zeros(0, np.uint32)], 0
    for name in Layout.of_payload(kind, payload).shapes:
        words, outside = encode_values(payload[name].ravel(), weight, terms, generator)
        parts.append(words)
        clipped += outside
    largest = [math.ceil(min(float(number), _MAX_LARGEST) * _LARGEST_STEPS) for number in numbers[_KEPT_NUMBERS:]]
    exact = np.array([weight, round(loss * weight * _LOSS_STEPS), clipped, 0, *largest], np.int64).view(np.uint64)
    return Vector(np.concatenate(parts), exact)


def _make_noisy_vector(payload: Mapping[str, Array], terms: SumTerms, noise: SumNoise, share: NoiseShare) -> Vector:
    """Scale an update down to the norm, and add the device's share of the noise; all devices weigh the same."""
    names = list(Layout.of_payload("train", payload).shapes)
    norm = math.sqrt(sum(float(np.sum(np.square(payload[name], dtype=np.float64))) for name in names))
    factor, spread = min(1.0, noise.clip / norm) if norm else 1.0, noise.multiplier * noise.clip * share.ratio
    stream, parts = share.stream, [np.zeros(0, np.uint32)]
    within = count_noisily(norm <= noise.clip, noise.counting * share.ratio, stream) if noise.counting else 0
    parts += [encode_noisily(payload[name].ravel(), spread, factor, terms, stream) for name in names]
    loss = float(np.clip(payload[NUMBERS][1], -_MAX_LOSS, _MAX_LOSS))
    exact = np.array([1, round(loss * _LOSS_STEPS), 0, within], np.int64).view(np.uint64)
    return Vector(np.concatenate(parts), exact)


def add_plainly(
    payloads: Mapping[str, Mapping[str, Array]],
    terms: SumTerms,
    seed: int,
    number: int,
    make_noise: Callable[[], NoiseShare | None] = lambda: None,
) -> Vector:
    """Return the sum of a training without masks, by device: that of a secure sum. `make_noise`: of a device."""
    total = None
    for device, payload in payloads.items():
        vector = make_vector("train", payload, terms, find_rounding_seeds(seed, number, device), make_noise())
        if total is None:
            total = vector
        else:
            total.add(vector, terms.bits)
    assert total is not None  # there is a device
    return total


def find_rounding_seeds(seed: int, number: int, device: str) -> list[int]:
    """Return the seeds of a device's rounding: a simulation rounds as the devices do."""
    return [seed, number, int(digest_of(device.encode()).partition(":")[2][:16], 16)]


def read_training(layout: Layout, total: Vector, terms: SumTerms, denominator: int | None = None) -> TrainedSum:
    """Decode the sum of a training. Without a training image the mean is zero.

    `denominator`: what the sum is divided by instead of its weight, so that the mean of noisy updates does not depend
    on who answers.
    """
    samples, loss, clipped, within, *largest = (int(number) for number in _read_signed(total.exact))
    decoded, first, mean = decode_mean(total.words, denominator or max(1, samples), terms), 0, Tensors()
    for name, shape in layout.shapes.items():
        size = math.prod(shape)
        mean[name] = decoded[first : first + size].astype(np.float32).reshape(shape)
        first += size
    share = 0.5 + within / COUNT_STEPS / samples if terms.noise and terms.noise.counting else None
    mean_loss = loss / _LOSS_STEPS / samples if samples else None
    return TrainedSum(mean, samples, mean_loss, clipped, share, largest[0] / _LARGEST_STEPS if largest else None)


def read_evaluation(total: Vector, devices: int) -> EvaluatedSum:
    """Decode the sum of an evaluation of so many devices."""
    samples, correct, counting, *by_class = (int(number) for number in _read_signed(total.exact))
    counts = list(zip(by_class[::2], by_class[1::2], strict=True)) if counting == devices else []
    return EvaluatedSum(samples, correct, counts)


def _read_signed(exact: Exact) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return exact.view(np.int64)
