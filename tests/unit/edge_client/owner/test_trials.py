"""Training steps that a board is tried with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.owner import trials
from edge_client.owner.trials import STEPS, Compute, TrialTrainer, load_trial, write_images
from profiles.probes.host import resident_bytes


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrialTrainer]:
    write_images(tmp_path / "images")
    trainer = TrialTrainer(tmp_path / "images", threads=1)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("compute", ["float", "int8"])
def test_every_machine_computes_the_same_loss(compute: Compute, trainer: TrialTrainer) -> None:
    trained, use = trainer.train(load_trial(compute))
    assert trained is not None
    assert trained.steps == use.steps == STEPS
    assert trained.loss == pytest.approx(trials.LOSSES[compute], rel=1e-3)
    assert trials.is_right(compute, trained.loss)
    assert not trials.is_right(compute, trained.loss * 1.1)
    assert use.peak_rss_bytes


def test_too_small_a_limit_of_memory_ends_the_training_alone(trainer: TrialTrainer) -> None:
    trained, use = trainer.train(load_trial("float", 2), memory_bytes=resident_bytes() + 1_000_000)
    assert trained is None
    assert use.broke == ("memory",)
    trained, _ = trainer.train(load_trial("float", 2))
    assert trained is not None


def test_training_ends_when_it_is_stopped(trainer: TrialTrainer) -> None:
    steps = iter(range(5))
    trained, _ = trainer.train(load_trial("float", 1_000_000), stopped=lambda: next(steps, None) is None)
    assert trained is None
