"""A folder of images that changes while its device takes part in a run."""

import shutil
import signal

import pytest

from tests.support.forked import Forked
from tests.support.programs import CONFIG, Stage, wait_for

RUN = {
    "method": "fedavg",
    "rounds": 1000,
    "seed": 5,
    "devices": 1,
    "options": {"epochs": 1, "batch_size": 8, "lr": 0.01},
    "model_options": CONFIG["model_options"],
    "deadline_s": 120.0,
}


@pytest.mark.slow
def test_pictures_of_a_virtual_device_count_from_the_next_round_on(stage: Stage) -> None:
    """Of a host of two devices with the same folder."""
    pictures = stage.folder / "parts" / "device-0"
    shutil.copytree(stage.parts / "device-0", pictures)
    before = sorted((pictures / "train").glob("*/*.png"))
    coordinator = endless(stage, devices=2)
    given = ["--broker", f"mqtt://127.0.0.1:{stage.port}", "--parts", str(pictures.parent), "--devices", "2"]
    given += ["--state", str(stage.folder / "hosted")]
    stage.keep(Forked("fleet.commands.host", given, stage.log_path("host"), stage.environment))
    wait_for(lambda: images_of(stage, 1) == [len(before)] * 2, "the first round")

    shutil.copy(before[0], before[0].parent / "new.png")
    wait_for(lambda: images_of(stage, max(rounds(stage)) - 1) == [len(before) + 1] * 2, "a round with the new picture")

    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, "coordinator") == 130
    assert stage.query("select count(*) from refusals") == [(0,)]
    assert "Traceback" not in stage.log("host")


@pytest.mark.slow
def test_class_folder_that_is_empty_on_all_devices_is_no_class(stage: Stage) -> None:
    """The second device's folder "2" is empty, which the first one fills; a folder of the run that is filled counts."""
    for name in ("device-0", "device-1"):
        shutil.copytree(stage.parts / "device-0", stage.folder / "parts" / name)
        (stage.folder / "parts" / name / "train" / "zebra").mkdir()
    stage.parts = stage.folder / "parts"
    for part in ("train", "test"):
        emptied = stage.parts / "device-1" / part / "2"
        shutil.rmtree(emptied)
        emptied.mkdir()
    before = len(list((stage.parts / "device-1" / "train").glob("*/*.png")))
    coordinator = endless(stage, devices=2)
    for name in ("device-0", "device-1"):
        stage.device(name)
    wait_for(lambda: len(images_of(stage, 1)) == 2, "the first round")
    [(classes,)] = stage.query("select classes from runs")
    assert "zebra" not in classes
    assert '"2"' in classes
    [left_out] = [line for line in stage.log("coordinator").splitlines() if "without an image on any device" in line]
    assert left_out.endswith("'zebra'")

    picture = next((stage.parts / "device-0" / "train" / "2").glob("*.png"))
    shutil.copy(picture, stage.parts / "device-1" / "train" / "2" / "new.png")
    grown = [images_of(stage, 1)[0], before + 1]
    wait_for(lambda: images_of(stage, max(rounds(stage)) - 1) == grown, "a round with the filled folder")

    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, "coordinator") == 130
    assert stage.query("select count(*) from refusals") == [(0,)]


def images_of(stage: Stage, number: int) -> list[int]:
    """Training images of the devices of a round."""
    return [
        samples
        for _, samples in stage.query(
            f"select device, samples from results where kind = 'train' and round = {number} order by device"
        )
    ]


def endless(stage: Stage, devices: int = 1) -> Forked:
    """A coordinator whose run is not over before it is stopped."""
    return stage.coordinator(broker="mosquitto", values={**RUN, "devices": devices})


def rounds(stage: Stage) -> dict[int, int]:
    """Training images of every round that has a result."""
    return dict(stage.query("select round, samples from results where kind = 'train'"))


def next_round(stage: Stage) -> int:
    """A round whose task is sent after this call: that of the one before may be on its way."""
    return max(rounds(stage)) + 2


def count_trained(stage: Stage, number: int) -> int:
    """Training images of a round, which are also those of the round after it."""
    wait_for(lambda: {number, number + 1} <= rounds(stage).keys(), f"round {number + 1}")
    samples = rounds(stage)
    assert samples[number] == samples[number + 1]
    return samples[number]
