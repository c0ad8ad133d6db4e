"""Noise inside of sums: as much as was promised, whatever drops out, and none is lost by the rounding."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from fedvit.errors import NotAllowed
from fedvit.secure.device import DeviceSum
from fedvit.secure.keys import MaskStream
from fedvit.secure.layout import Layout, make_training_payload, make_vector, read_training
from fedvit.secure.neighbours import count_least_devices, count_needed_holders
from fedvit.secure.noise import (
    LEAST_STEPS,
    NoiseShare,
    count_noise_steps,
    count_noisily,
    draw_normal,
    find_multiplier,
    find_range,
    find_ratio,
    round_randomly,
)
from fedvit.secure.vectors import Vector
from fedvit.tensors import Tensors
from fedvit.wire.messages import SumId, SumNoise, SumTerms
from tests.support.codes import has_code
from tests.support.sums import make_devices, make_terms, play

NUMBERS = 200_000
NOISE = SumNoise(2.0, 1.5, 3.0)
ZEROS = {"w": np.zeros(NUMBERS, np.float32)}


def _make_terms(devices: int, noise: SumNoise = NOISE, bits: int = 32) -> SumTerms:
    return SumTerms("", devices, 20, bits, find_range(noise, devices, 20), noise=noise)  # type: ignore[arg-type]


def _stream(number: int) -> MaskStream:
    return MaskStream(number.to_bytes(32, "big"))


def _add_up(deltas: list[Tensors], began: int, terms: SumTerms, first_key: int = 0) -> Vector:
    """Add up updates with noise, of a sum that began with so many devices."""
    total = None
    for key, delta in enumerate(deltas, first_key):
        share = NoiseShare(find_ratio(began, terms.neighbours), _stream(key))
        vector = make_vector("train", make_training_payload(delta, 20, 0.5), terms, [], share)
        if total is None:
            total = vector
        else:
            total.add(vector, terms.bits)
    assert total is not None
    return total


def _decode(deltas: list[Tensors], began: int, terms: SumTerms) -> np.ndarray:
    """Return the decoded sum."""
    layout = Layout.of_payload("train", make_training_payload(deltas[0], 1, 0.0))
    return read_training(layout, _add_up(deltas, began, terms), terms, denominator=1).mean["w"]


def test_drawn_numbers_are_normal() -> None:
    drawn = draw_normal(_stream(1), 1_000_001)
    assert len(drawn) == 1_000_001
    moments = [float((drawn**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.03)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.005
    assert (np.abs(drawn) > 3).mean() == pytest.approx(math.erfc(3 / math.sqrt(2)), rel=0.1)


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize(("began", "summed"), [(4, 4), (10, 7), (40, 40)])
def test_sum_has_the_noise_that_is_accounted_for(began: int, summed: int, bits: int) -> None:
    """The fewest devices that can make a sum add the configured noise; more devices add more."""
    terms = _make_terms(began, bits=bits)
    noise = _decode([ZEROS] * summed, began, terms)
    spread = NOISE.multiplier * NOISE.clip * math.sqrt(summed / count_least_devices(began, 20))
    assert noise.std() == pytest.approx(spread, rel=0.01)
    assert abs(noise.mean()) < 5 * spread / math.sqrt(NUMBERS)
    assert float((noise**4).mean()) == pytest.approx(3 * spread**4, rel=0.05)
    without_count = msgspec.structs.replace(terms, noise=SumNoise(NOISE.clip, NOISE.multiplier))
    assert find_multiplier(without_count, began, summed) * NOISE.clip == pytest.approx(spread)
    fewest = count_least_devices(began, 20)
    assert find_multiplier(without_count, began, fewest) == pytest.approx(NOISE.multiplier)
    assert find_multiplier(terms, began, summed) < spread / NOISE.clip  # the count has its part of the same privacy


def test_updates_are_scaled_down_to_the_norm_and_weigh_the_same() -> None:
    quiet = SumNoise(2.0, 1e-4)
    terms = _make_terms(3, quiet)
    long, short = {"w": np.float32([30.0, 40.0])}, {"w": np.float32([0.3, -0.4])}
    assert _decode([long, short, short], 3, terms) == pytest.approx([1.8, 0.8], abs=0.01)


def test_numbers_are_not_clipped_after_the_noise() -> None:
    """Clipped noise would be another one: a number beyond the range wraps, and is right again in the sum."""
    terms = msgspec.structs.replace(_make_terms(3), range=3.0)
    noise = _decode([ZEROS] * 3, 3, terms)
    alone = make_vector(
        "train", make_training_payload(ZEROS, 1, 0.0), terms, [], NoiseShare(find_ratio(3, 20), _stream(0))
    )
    steps = alone.words.view(np.int32).astype(np.int64)
    assert np.abs(steps).max() > ((1 << 31) - 1) // 3  # more than a device without noise may have
    assert noise.std() == pytest.approx(NOISE.multiplier * NOISE.clip, rel=0.05)


@pytest.mark.parametrize("offset", [0.0, 0.37, 0.5])
def test_rounded_noise_is_a_sample_of_one_density(offset: float) -> None:
    """The probability of k is that of (Gaussian + triangle) at k - x, also for x between two integers."""
    spread, count = LEAST_STEPS, 1_000_000
    stream = _stream(7)
    rounded = round_randomly(draw_normal(stream, count) * spread + offset, stream)
    places = np.arange(-15, 16)
    fine = np.linspace(-1, 1, 2001)
    triangle = (1 - np.abs(fine)) / (1 - np.abs(fine)).sum()
    density = np.exp(-(((places[:, None] - offset) - fine) ** 2) / (2 * spread**2)) / (spread * math.sqrt(2 * math.pi))
    expected = count * (density * triangle).sum(1)
    seen = np.array([(rounded == place).sum() for place in places])
    chi = float(((seen - expected) ** 2 / expected).sum())
    assert abs(chi - len(places)) < 6 * math.sqrt(2 * len(places))


def test_count_of_updates_within_the_norm() -> None:
    drawn = [count_noisily(True, 0.3, _stream(key)) / (1 << 20) for key in range(20_000)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.01)
    assert np.std(drawn) == pytest.approx(0.3, rel=0.03)
    terms = _make_terms(40, SumNoise(2.0, 1.5, 1e-3))
    deltas: list[Tensors] = [{"w": np.float32([norm, 0.0])} for norm in np.linspace(0.1, 4.0, 40)]
    layout = Layout.of_payload("train", make_training_payload(deltas[0], 1, 0.0))
    trained = read_training(layout, _add_up(deltas, 40, terms), terms, denominator=40)
    assert trained.within == pytest.approx(0.5, abs=0.01)
    assert (trained.samples, trained.loss) == (40, 0.5)


def test_noise_is_drawn_once_for_an_attempt_and_anew_for_the_next() -> None:
    """One mask covers one payload, also after `kill -9`; and no noise is used twice."""
    devices = make_devices(4)
    terms = msgspec.structs.replace(make_terms(4, 20), noise=NOISE, range=find_range(NOISE, 4, 20))
    shares = []
    for attempt in (1, 2):
        play(devices, terms, sum_id=SumId("run", 1, "train", attempt), drops=lambda device, step: step == "masked")
        kept = devices["pi-0"].kept
        assert kept
        for _ in range(2):
            share = DeviceSum("pi-0", kept, lambda attempt: None).share_noise()
            assert share
            shares.append(share.stream.read(64))
            assert share.ratio == find_ratio(4, 20)
    assert shares[0] == shares[1] != shares[2] == shares[3]


def test_device_refuses_integers_that_are_too_coarse_for_its_noise() -> None:
    devices = make_devices(4)
    coarse = msgspec.structs.replace(make_terms(4, 20, 16), noise=SumNoise(1.0, 1.0), range=6e6 / 8)
    play(devices, coarse, drops=lambda device, step: step == "masked")
    kept = devices["pi-0"].kept
    assert kept
    assert count_noise_steps(coarse, 4) < LEAST_STEPS
    with pytest.raises(NotAllowed, check=has_code("FV1451", "steps")):
        DeviceSum("pi-0", kept, lambda attempt: None).share_noise()


def test_no_sum_has_fewer_devices_than_the_noise_is_sized_for() -> None:
    """Devices are taken away at random, as long as each of the others has enough neighbours."""
    draw = np.random.default_rng(0)
    for degree, devices in itertools.product((4, 6, 8, 12, 20), (22, 40, 61)):
        holders, bound = degree + 1, count_least_devices(devices, degree)
        needed = count_needed_holders(holders)
        for _ in range(20):
            kept = np.ones(devices, bool)

            def is_possible(kept: np.ndarray, degree: int = degree, needed: int = needed) -> bool:
                around = sum(np.roll(kept, step).astype(int) for step in range(-(degree // 2), degree // 2 + 1))
                return bool((around[kept] >= needed).all())

            start = int(draw.integers(devices))
            order = draw.permutation(devices) if draw.random() < 0.5 else (start + np.arange(devices)) % devices
            for place in order:
                kept[place] = False
                if not is_possible(kept):
                    kept[place] = True
            assert kept.sum() >= bound
    assert count_least_devices(5, 20) == count_needed_holders(5)
