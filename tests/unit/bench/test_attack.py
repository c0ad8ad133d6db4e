"""Attackers among the agents of a simulation: what they send, and what a run reports of them."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.attack import (
    ATTACKS,
    PLAIN,
    RECOMMENDED,
    AttackSettings,
    Backwards,
    NotANumber,
    SignFlip,
    Tampering,
    _flipped,
    aggregations_of,
    attack_table,
    run_attacks,
)
from fedvit.errors import ConfigError

VALUE = np.float32([[1, -2], [3, 4]])


def sent(kind: type[Tampering]) -> np.ndarray:
    return kind.tampered(kind.__new__(kind), "w", VALUE)


def test_what_attackers_send() -> None:
    np.testing.assert_array_equal(sent(SignFlip), -VALUE)
    np.testing.assert_array_equal(sent(Backwards), -10 * VALUE)
    np.testing.assert_array_equal(sent(ATTACKS["times 100"]), 100 * VALUE)
    np.testing.assert_array_equal(sent(ATTACKS["label flip"]), VALUE)
    assert np.isnan(sent(NotANumber)).all()
    assert all(sent(kind).dtype == np.float32 for kind in ATTACKS.values())


def test_labels_are_flipped_and_put_back(tmp_path: Path) -> None:
    for name in "012":
        (tmp_path / "device-0" / "train" / name).mkdir(parents=True)
        (tmp_path / "device-0" / "train" / name / f"was-{name}").touch()

    def lies() -> list[str]:
        return sorted(f"{path.parent.name}: {path.name}" for path in tmp_path.rglob("was-*"))

    with _flipped([tmp_path / "device-0"], ["device-0"]):
        assert lies() == ["0: was-2", "1: was-1", "2: was-0"]
    assert lies() == ["0: was-0", "1: was-1", "2: was-2"]


def test_attack_that_is_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown attack 'bribe'"):
        AttackSettings(attacks=("bribe",))


def test_aggregation_that_is_unknown_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--protection 'prayer' is unknown, known are mean, recommended, .*geometric median"
    ):
        aggregations_of(["mean", "prayer"])


def test_a_small_bench() -> None:
    """One of six devices sends its update times 100: robust aggregation leaves it out twice, the mean never."""
    settings = AttackSettings(
        devices=6, malicious=1, rounds=2, attacks=("times 100",),
        options={"epochs": 1, "batch_size": 64, "lr": 1e-3, "optimizer": "adamw"},
        model={"image_size": 8, "patch_size": 8, "width": 4, "depth": 1, "heads": 1},
        aggregations={"mean": PLAIN, "recommended": {**RECOMMENDED, "strikes": 2}},
    )  # fmt: skip
    report = run_attacks(settings)
    assert report.malicious == ["device-5"]
    clean, unharmed, plain, protected = report.outcomes
    assert [(entry.attack, entry.aggregation) for entry in report.outcomes[:2]] == [
        ("none", "mean"), ("none", "recommended"),
    ]  # fmt: skip
    assert [entry.left_out for entry in (clean, unharmed, plain, protected)] == [0, 0, 0, 2]
    assert unharmed.loss_to_clean is not None
    assert (plain.quarantined, protected.quarantined) == ([], ["device-5"])
    assert all(entry.honest_left_out == 0 and entry.accuracy is not None for entry in report.outcomes)
    console = Console(file=io.StringIO(), width=120)
    console.print(attack_table(report))
    assert "times 100" in console.file.getvalue()  # type: ignore[attr-defined]
