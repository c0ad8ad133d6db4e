"""Laws of partitions refuse rules that break them, and say how."""

from dataclasses import dataclass

import numpy as np
import pytest

import fleet.partitions
from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.contracts import find_break
from fleet.contracts.partitions import LAWS, deal_every_sample_once, follow_the_seed, leave_samples_alone
from fleet.datasets.samples import Annotations
from fleet.partitions import PARTITIONS
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class _Halves(Partition):
    broken: str = ""

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        order = rng.permutation(len(samples))
        if self.broken == "drawn":
            order = np.random.default_rng().permutation(len(samples))
        parts = [np.sort(part).astype(np.int64) for part in np.array_split(order, devices)]
        if self.broken == "twice":
            parts[-1] = parts[0]
        if self.broken == "labels":
            samples.labels[:] = 0
        if self.broken == "refuses":
            raise ConfigError("FV2003", "too few samples")
        return {"fewer": parts[1:], "left out": [part[1:] for part in parts], "floats": [parts[0] / 1]}.get(
            self.broken, parts
        )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", PARTITIONS)
def test_fedvits_own_partitions_obey_the_laws(law: object, name: str) -> None:
    assert find_break(law, name) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "law", "reason"),
    [
        ("drawn", follow_the_seed, "two calls with seed 0 differ"),
        ("twice", deal_every_sample_once, "is on two devices"),
        ("labels", leave_samples_alone, "labels have changed"),
        ("refuses", deal_every_sample_once, "it refuses all samples: too few samples"),
        ("fewer", deal_every_sample_once, "it has 0 parts for 1 devices"),
        ("left out", deal_every_sample_once, "it leaves out 1 of 400 samples"),
        ("floats", deal_every_sample_once, "is not an ascending array of int64"),
    ],
)
def test_a_broken_rule_is_found(broken: str, law: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken(_Halves):
        pass

    Broken.__init__.__kwdefaults__["broken"] = broken
    monkeypatch.setitem(fleet.partitions.PARTITIONS, "halves", Broken)
    found = find_break(law, "halves")  # type: ignore[arg-type]
    assert found is not None
    assert reason in found
