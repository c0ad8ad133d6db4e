"""Attacks on uploaded features: more of them show more, and balanced uploads say nothing of the class distribution."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.experiments.feature_attacks import attack_features
from fleet.experiments.report import html_report, markdown_report
from fleet.finished import FinishedRun
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.report.experiment import FeatureAttack
from tests.support.experiments import run_experiment, written_experiment
from tests.support.tiny import TINY_MODEL

EPOCHS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two devices: the first with unequal classes, the second with many images like them."""
    digits = read_digits(32)
    by_class = [np.flatnonzero(digits.labels == label) for label in range(10)]
    first = np.concatenate([by_class[0][:40], by_class[1][:10], by_class[2][:5]])
    out = tmp_path_factory.mktemp("dealt") / "parts"
    write_device_folders(digits, [first, np.concatenate([rows[60:] for rows in by_class])], out, test_share=0.4, seed=0)
    return device_folders(out, 2)


def attack(folders: list[Path], out: Path, privacy: Any = None, **options: Any) -> list[FeatureAttack]:
    options = {"epochs": EPOCHS, "batch_size": 16, "local_blocks": 1, "warmup_rounds": 0, "lr": 1e-3, **options}
    values = {"method": "eftvit", "rounds": 1, "options": options, "model_options": TINY_MODEL}
    values["privacy"] = privacy or {}
    outcome = simulate(RunRequest(folders, values, out=out, run="run", engine="torch", at_once=1))
    config = {
        **values, "model": "vit_small_images", "pretrained": False,
        "privacy": {"feature_noise": 0.0, "feature_clip": None, **values["privacy"]},
    }  # fmt: skip
    run = FinishedRun("run", outcome.folder, 0.0, outcome.summary)
    return attack_features(run, config, folders, seed=0, count=1)


def test_more_uploads_show_more(folders: list[Path], tmp_path: Path) -> None:
    """4 of 16 patches are kept, so 1 - 0.75^3 of them are seen in three epochs."""
    own, first_values = attack(folders, tmp_path, mask=0.75, sampler="median")
    assert (own.device, own.attacker, first_values.attacker) == ("device-0", "encoder", "first values")
    assert own.seen_once == 0.25
    assert own.seen_ever == pytest.approx(1 - 0.75**EPOCHS, abs=0.05)
    assert own.error_ever < 0.9 * own.error_once < 0.9
    assert own.error_once < first_values.error_once + 0.01
    assert own.membership == 1.0  # the very features
    assert 0.5 <= first_values.membership <= 1.0
    picture = Image.open(io.BytesIO(own.picture))
    assert picture.size == (4 * 32, 3 * 32)


def test_full_images_are_rebuilt_and_noise_hides_them(folders: list[Path], tmp_path: Path) -> None:
    own, _ = attack(folders, tmp_path / "plain", mask=0.0)
    assert (own.seen_once, own.seen_ever) == (1.0, 1.0)
    assert own.error_once < 0.1
    noisy, _ = attack(
        folders, tmp_path / "noisy", {"feature_noise": 1.0, "feature_clip": 1.0, "deterministic_noise": True}, mask=0.0
    )
    assert noisy.error_once > 0.5
    assert noisy.membership < 1.0


def test_a_balanced_upload_tells_the_classes_alone(folders: list[Path], tmp_path: Path) -> None:
    """The first device trains with 24, 6 and 3 images: the median is 6, and three epochs give 9 of the last class."""
    median, _ = attack(folders, tmp_path / "median", sampler="median", mask=0.5)
    shares, sent = np.array([24, 6, 3]) / 33, np.array([6, 6, 6]) / 18
    assert median.class_distance == pytest.approx(np.abs(shares - sent).sum() / 2)
    assert median.even_distance == pytest.approx(np.abs(shares - 1 / 3).sum() / 2)
    one, _ = attack(folders, tmp_path / "one", sampler="median", mask=0.5, epochs=1)
    assert one.class_distance == pytest.approx(np.abs(shares - np.array([6, 6, 3]) / 15).sum() / 2)
    balanced, _ = attack(folders, tmp_path / "balanced", sampler="balanced", mask=0.5, epochs=1)
    assert balanced.class_distance == pytest.approx(balanced.even_distance)
    assert one.class_distance < one.even_distance


def test_a_device_without_test_images_is_passed_over(folders: list[Path], tmp_path: Path) -> None:
    """Nothing tells how well its images can be told from others; the next device is attacked instead."""
    shutil.copytree(folders[1], first := tmp_path / "device-0")
    for image in (first / "test").rglob("*.png"):
        image.unlink()
    shutil.copytree(folders[0], second := tmp_path / "device-1")
    attacks = attack([first, second], tmp_path / "out", mask=0.5)
    assert [one.device for one in attacks] == ["device-1", "device-1"]


FILE = """
dataset = "digits"
image_size = 32
devices = 3
rounds = 1
seeds = [0, 1]
engine = "torch"
attacks = 2
[model]
options = {patch_size = 8, width = 32, depth = 3, heads = 2, mlp_ratio = 4.0}
[partitions.even]
partition = "iid"
[methods.eftvit]
method = "eftvit"
epochs = 1
[methods.fedavg]
method = "fedavg"
"""


@pytest.mark.slow
def test_a_report_shows_the_attacks_of_the_first_seed(tmp_path: Path, graph_cache: Path) -> None:
    outcome, _, lines = run_experiment(written_experiment(tmp_path, FILE), tmp_path, graph_cache=graph_cache)
    results = {cell.name: cell.result for cell in outcome.cells}
    assert all(results.values()), lines
    counts = {name: len(result.attacks) for name, result in results.items() if result}
    assert counts == {
        "eftvit/even/seed-0": 4, "fedavg/even/seed-0": 0, "eftvit/even/seed-1": 0, "fedavg/even/seed-1": 0,
    }  # fmt: skip
    table = markdown_report(outcome)
    assert "| eftvit | even | encoder | 0.250 |" in table
    assert "| eftvit | even | first values | 0.250 |" in table
    page = html_report(outcome)
    assert page.count("data:image/png;base64,") == 2
    assert "<h3>eftvit: images from features</h3>" in page
