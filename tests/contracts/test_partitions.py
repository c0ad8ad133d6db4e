"""What every partition must be: a partition, the same for the same seed; and the laws that a partition adds."""

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet.partitions
from fedvit.data.images import Indices
from fedvit.data.split import split_train_test
from fleet.datasets.samples import Annotations
from fleet.partitions import PARTITIONS, partition
from fleet.partitions.dealing import Partition


@dataclass(frozen=True)
class Case:
    """Samples that a partition can deal out, and how many it may leave out."""

    samples: Annotations
    devices: int
    options: dict[str, Any]
    left_out: int = 0


def shuffle_samples(counts: list[int]) -> Indices:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)


@st.composite
def any_labels(draw: st.DrawFn, **options: Any) -> Case:
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
    return Case(Annotations(labels=shuffle_samples(counts)), draw(st.integers(1, sum(counts))), options)


@st.composite
def pathological(draw: st.DrawFn) -> Case:
    """Each of q shares is rounded down: fewer than q of a class are left out. A share is at least
    .4 / (.4 + .6 (q - 1)) > 2 / (3 q), so with 2 q samples of a class nobody is left without."""
    classes = draw(st.integers(1, 6))
    per_device = draw(st.integers(1, classes))
    devices = draw(st.integers(1, 12).filter(lambda count: count * per_device % classes == 0))
    shares = per_device * devices // classes
    counts = draw(st.lists(st.integers(2 * shares, 2 * shares + 30), min_size=classes, max_size=classes))
    return Case(
        Annotations(labels=shuffle_samples(counts)), devices, {"classes_per_device": per_device}, classes * (shares - 1)
    )


@st.composite
def pachinko(draw: st.DrawFn) -> Case:
    """Everybody gets floor(n / devices): n mod devices are left out. Two classes have the same coarse label."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
    labels = shuffle_samples(counts)
    devices = draw(st.integers(1, len(labels)))
    options = {"alpha": draw(st.sampled_from([1e-9, 0.3, 1e6])), "fine_alpha": draw(st.sampled_from([1e-9, 10.0]))}
    return Case(Annotations(labels=labels, coarse_labels=labels // 2), devices, options, len(labels) % devices)


@st.composite
def coarse_iid(draw: st.DrawFn) -> Case:
    groups, times = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(times, 30), min_size=2 * groups, max_size=2 * groups))
    labels = shuffle_samples(counts)
    return Case(Annotations(labels=labels, coarse_labels=labels // 2), groups * times, {})


@st.composite
def disjoint(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    devices = draw(st.sampled_from([count for count in range(1, 13) if len(counts) % count == 0]))
    return Case(Annotations(labels=shuffle_samples(counts)), devices, {})


@st.composite
def domain(draw: st.DrawFn) -> Case:
    labels = shuffle_samples(draw(st.lists(st.integers(12, 20), min_size=1, max_size=5)))
    domains = np.arange(len(labels), dtype=np.int64) % draw(st.integers(1, 4))
    per_domain = draw(st.integers(1, 3))
    return Case(
        Annotations(labels=labels, domains=domains),
        len(np.unique(domains)) * per_domain,
        {"per_domain": per_domain, "min_samples": 0},
    )


@st.composite
def natural(draw: st.DrawFn) -> Case:
    """Sources that are not drawn, or too small, are left out whole."""
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    least = draw(st.integers(1, max(counts)))
    devices = draw(st.integers(1, sum(count >= least for count in counts)))
    samples = Annotations(labels=shuffle_samples([sum(counts)]), domains=shuffle_samples(counts))
    return Case(samples, devices, {"min_samples": least}, sum(counts))


CASES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    "dirichlet": lambda: any_labels(min_samples=0),
    "iid": any_labels,
    "pathological": pathological,
    "pachinko": pachinko,
    "coarse_iid": coarse_iid,
    "disjoint": disjoint,
    "domain": domain,
    "feature_noise": any_labels,
    "natural": natural,
}

# 400 samples of 10 classes, 5 coarse labels, and 2 domains or 20: all partitions can deal them out to 10 devices
LABELS = shuffle_samples([40] * 10)
ALL = Annotations(labels=LABELS, coarse_labels=LABELS // 2, domains=np.arange(400) % 2)
SOURCES = Annotations(labels=LABELS, domains=np.arange(400) // 20)
OPTIONS: dict[str, dict[str, Any]] = {"domain": {"per_domain": 5}}


def dealt_to_ten(name: str, seed: int) -> list[Indices]:
    return partition(name, SOURCES if name == "natural" else ALL, 10, seed, **OPTIONS.get(name, {}))


def deal(name: str, case: Case, seed: int) -> list[Indices]:
    return partition(name, case.samples, case.devices, seed, **case.options)


def digest(parts: list[Indices]) -> str:
    return hashlib.blake2b(b"|".join(part.tobytes() for part in parts)).hexdigest()


def test_the_table_is_complete() -> None:
    """Every partition in the package is in the table, and is tested here."""
    folder = Path(fleet.partitions.__file__).parent
    modules = [importlib.import_module(f"fleet.partitions.{path.stem}") for path in folder.glob("*.py")]
    written = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Partition) and not inspect.isabstract(kind)
    }
    assert written == set(PARTITIONS.values())
    assert CASES.keys() == PARTITIONS.keys()


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=25)
@given(st.data())
def test_disjoint_complete_and_seeded(name: str, data: st.DataObject) -> None:
    case = data.draw(CASES[name]())
    seed = data.draw(st.integers(0, 2**32))
    parts = deal(name, case, seed)
    assert len(parts) == case.devices
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    dealt = np.sort(np.concatenate(parts))
    assert (np.diff(dealt) > 0).all()
    assert np.isin(dealt, np.arange(len(case.samples))).all()
    assert 0 <= len(case.samples) - len(dealt) <= case.left_out
    assert digest(deal(name, case, seed)) == digest(parts)


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=20)
@given(st.data())
def test_a_device_is_tested_with_what_it_trains_with(name: str, data: st.DataObject) -> None:
    """The share of a class in train and in test, both of the device, differ by what rounding one sample makes."""
    case = data.draw(CASES[name]())
    labels = case.samples.labels
    for part in deal(name, case, 0):
        train, test = split_train_test(part, labels, 0.25, np.random.default_rng(0))
        for label in np.unique(labels[part]):
            held = int((labels[part] == label).sum())
            assert abs(int((labels[test] == label).sum()) - 0.25 * held) <= 1
            assert (labels[train] == label).any()


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_deals_otherwise(name: str) -> None:
    first, other = (dealt_to_ten(name, seed) for seed in (0, 1))
    assert digest(first) != digest(other)


@pytest.mark.parametrize("name", PARTITIONS)
def test_one_device_gets_everything(name: str) -> None:
    """One domain, one coarse label; pathological with as many classes as there are."""
    labels = np.repeat(np.arange(3), 10)
    alone = Annotations(labels=labels, coarse_labels=np.zeros(30, dtype=np.int64), domains=np.zeros(30, dtype=np.int64))
    options = {"classes_per_device": 3} if name == "pathological" else {}
    (part,) = partition(name, alone, 1, 0, **options)
    np.testing.assert_array_equal(part, np.arange(30))


@pytest.mark.parametrize("cap", [False, True])
@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(0, 2**32))
def test_large_alpha_approaches_uniform(cap: bool, devices: int, seed: int) -> None:
    """The variance of a share is (1/N)(1 - 1/N) / (alpha N + 1): with alpha 1e10 below 1e-11, so shares are 1/N
    within 1e-4. Of 100 samples, each cut is 100 j / N within .01, rounded down: counts within 2 of 100 / N."""
    labels = np.repeat(np.arange(5), 100)
    for part in partition("dirichlet", labels, devices, seed, alpha=1e10, cap=cap):
        counts = np.bincount(labels[part], minlength=5)
        assert np.abs(counts - 100 / devices).max() <= 2


@settings(max_examples=25)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_small_alpha_gives_each_class_to_one_device(devices: int, seed: int) -> None:
    """With alpha 1e-9 the chance that a class is visibly divided is about alpha N times a logarithm: below 1e-6."""
    labels = np.repeat(np.arange(20), 50)
    parts = partition("dirichlet", labels, devices, seed, alpha=1e-9, min_samples=0)
    for label in range(20):
        assert max(int((labels[part] == label).sum()) for part in parts) == 50


def test_alpha_orders_how_uneven_devices_are() -> None:
    """Mean over devices and 20 seeds of the largest class's share: 1 for one class each, 1/10 for uniform."""
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: float) -> float:
        shares = [
            np.bincount(labels[part], minlength=10).max() / len(part)
            for seed in range(20)
            for part in partition("dirichlet", labels, 5, seed, alpha=alpha)
        ]
        return float(np.mean(shares))

    few, some, many = (largest_share(alpha) for alpha in (0.1, 1.0, 100.0))
    assert few > some > many
    assert few > 0.4
    assert many < 0.15


@settings(max_examples=25)
@given(pathological(), st.integers(0, 2**32))
def test_pathological_gives_at_most_c_classes_and_uses_every_class(case: Case, seed: int) -> None:
    """Fewer than q samples of each class are left out, so at least n - (q - 1) of n are dealt out."""
    labels = case.samples.labels
    parts = deal("pathological", case, seed)
    assert max(len(np.unique(labels[part])) for part in parts) <= case.options["classes_per_device"]
    classes = len(np.unique(labels))
    dealt = np.bincount(labels[np.concatenate(parts)], minlength=classes)
    assert (np.bincount(labels) - dealt <= case.left_out // classes).all()


@settings(max_examples=25)
@given(pachinko(), st.integers(0, 2**32))
def test_pachinko_gives_everybody_equally_much(case: Case, seed: int) -> None:
    sizes = {len(part) for part in deal("pachinko", case, seed)}
    assert sizes == {len(case.samples) // case.devices}


@settings(max_examples=25)
@given(coarse_iid(), st.integers(0, 2**32))
def test_coarse_iid_gives_equal_shares_of_one_coarse_label(case: Case, seed: int) -> None:
    """Devices t j .. t j + t - 1 have coarse label j; counts of a fine label differ by at most one among them."""
    groups, labels = case.samples.coarse_labels, case.samples.labels
    assert groups is not None
    times = case.devices // len(np.unique(groups))
    parts = deal("coarse_iid", case, seed)
    for device, part in enumerate(parts):
        assert set(groups[part]) == {device // times}
    for label in np.unique(labels):
        counts = [int((labels[part] == label).sum()) for part in parts if groups[part][0] == label // 2]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=25)
@given(disjoint(), st.integers(0, 2**32))
def test_disjoint_has_no_class_on_two_devices(case: Case, seed: int) -> None:
    labels = case.samples.labels
    held = [set(labels[part]) for part in deal("disjoint", case, seed)]
    assert {len(classes) for classes in held} == {len(np.unique(labels)) // case.devices}
    assert sum(map(len, held)) == len(set.union(*held))


@settings(max_examples=25)
@given(domain(), st.integers(0, 2**32))
def test_domain_gives_every_device_one_domain(case: Case, seed: int) -> None:
    domains = case.samples.domains
    assert domains is not None
    for device, part in enumerate(deal("domain", case, seed)):
        assert set(domains[part]) <= {device // case.options["per_domain"]}
