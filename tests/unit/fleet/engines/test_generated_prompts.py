"""pFedPG's generator in a real training: the simulation's own loop on digits, with the generator's defaults."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from coordinator.record.opening import open_existing_record
from coordinator.run_view import GeneratorRound
from coordinator.views.report.document import read_report
from coordinator.views.report.page import run_page
from fedvit.tensors import map_tensors
from fleet.api import FinishedRun, run
from fleet.partition import DealSettings, deal

pytestmark = pytest.mark.slow

DEVICES, ROUNDS = 5, 6
MODEL = {"image_size": 8, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Train five devices with two digits each."""
    parts = tmp_path_factory.mktemp("parts")
    deal("digits", "disjoint", DEVICES, parts, DealSettings(test_share=0.5))
    return run(
        parts,
        method="pfedpg",
        options={"epochs": 1},
        model_options=MODEL,
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
        engine="torch",
        accelerator="cpu",
        out=tmp_path_factory.mktemp("runs"),
        progress=False,
    )


def states(trained: FinishedRun) -> list[GeneratorRound]:
    return [entry.generator for entry in trained.rounds if entry.generator is not None]


def generate_prompts(folder: Path) -> list[np.ndarray]:
    return [np.asarray(map_tensors(file)["prompts.tokens"]) for file in sorted((folder / "generated").iterdir())]


def test_prompts_of_devices_differ_after_training(trained: FinishedRun) -> None:
    """The mean over pairs of devices is at least 0.05 of the prompts' size."""
    prompts = generate_prompts(trained.folder)
    assert len(prompts) == DEVICES
    apart = [np.linalg.norm(one - other) / np.linalg.norm(one) for one, other in combinations(prompts, 2)]
    assert np.mean(apart) >= 0.05


def test_attention_is_neither_uniform_nor_on_one_prompt(trained: FinishedRun) -> None:
    """The record has every round; devices have moved away from nearly uniform weights, and none is saturated."""
    assert [entry.difference >= 0.05 for entry in states(trained)] == [True] * ROUNDS
    entropies = [entry.attention for entry in states(trained) if entry.attention is not None]
    assert len(entropies) == ROUNDS
    assert all(0.2 <= entry.lowest <= entry.mean <= entry.highest <= 0.99 for entry in entropies)


def test_report_shows_the_generator(trained: FinishedRun) -> None:
    with open_existing_record(trained.folder.parent) as store:
        page = run_page(read_report(store, trained.name))
    section = page[page.index("<h2>Generator</h2>") :]
    section = section[: section.index("<h2>", 4)]
    assert section.count("<svg") == 2
    assert f"in round {ROUNDS}" in section
