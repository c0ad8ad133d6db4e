"""Jobs: known by name, dealt out once, the same devices for every side."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.simulate.jobs import (
    COHORT,
    DEVICES,
    JOBS,
    SEED,
    Job,
    choose,
    cohorts,
    deal_images,
    decode_job,
    encode_job,
    rounds_until_all_were_asked,
)
from coordinator.compute.planning.checks import checked_config
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError
from tests.support.codes import has_code


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_job_is_a_run_that_can_begin(job: Job) -> None:
    config = checked_config({**job.config(3, SEED), "devices": DEVICES}, "bench").run
    assert (config.method, config.cohort, config.evaluate_every) == (job.method, COHORT, 3)


def test_job_survives_its_text() -> None:
    assert [decode_job(encode_job(job)) for job in JOBS] == list(JOBS)


def test_choose_names_what_there_is() -> None:
    assert choose(()) == JOBS
    assert [job.name for job in choose(("fedavg-4x64",))] == ["fedavg-4x64"]
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        choose(("fedsgd",))


def test_rounds_until_all_were_asked_are_the_fewest() -> None:
    names = [f"device-{number}" for number in range(DEVICES)]
    number = rounds_until_all_were_asked(names, COHORT, SEED)
    drawn = cohorts(names, COHORT, SEED)
    asked = [set(next(drawn)) for _ in range(number)]
    assert set().union(*asked) == set(names)
    assert set().union(*asked[:-1]) < set(names)


def test_images_are_dealt_out_once(tmp_path: Path) -> None:
    """Of 1000 images 800 are dealt out; the second time the folders are those of the first."""
    rng = np.random.default_rng(0)
    data = tmp_path / "noise"
    classes = tuple("abcdefghij")
    for name in (f"{split}/{label}" for split in ("train", "test") for label in classes):
        (data / name).mkdir(parents=True)
        for number in range(50):
            Image.fromarray(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(data / name / f"{number}.png")
    folders = deal_images(data, 800, tmp_path / "parts")
    assert len(folders) == DEVICES
    files = sorted((tmp_path / "parts").rglob("*.png"))
    assert len(files) == 800
    assert {name for folder in folders for name in DeviceData.open(folder).classes} == {*classes}
    made = [file.stat().st_mtime_ns for file in files]
    assert deal_images(data, 800, tmp_path / "parts") == folders
    assert [file.stat().st_mtime_ns for file in files] == made
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        deal_images(data, 1001, tmp_path / "other")
