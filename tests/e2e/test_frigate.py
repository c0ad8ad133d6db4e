"""Frigate writes snapshots while a real device trains on them."""

import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from fedvit.data.split import KeptSplit
from tests.e2e.test_growing_folder import count_trained, endless, images_of, rounds
from tests.support.frigate import encode, event_id, write_snapshot
from tests.support.programs import Stage, wait_for


@pytest.mark.slow
def test_snapshot_counts_when_it_is_whole(stage: Stage) -> None:
    clips = stage.folder / "parts" / "clips"
    clips.mkdir(parents=True)
    pictures = sorted((stage.parts / "device-0" / "train").glob("*/*.png"))
    stage.parts = clips.parent
    for number, picture in enumerate(pictures):
        write_snapshot(clips, f"camera-{picture.parent.name}", number, read(picture))
    cameras = sorted({picture.parent.name for picture in pictures})
    (clips / "frigate.toml").write_text("[cameras]\n" + "".join(f'camera-{name} = "{name}"\n' for name in cameras))
    coordinator = endless(stage)
    stage.device("clips")
    before = count_trained(stage, 1)
    assert 0 < before < len(pictures), "a fifth tests"

    camera = f"camera-{pictures[0].parent.name}"
    new = [n for n in range(2000, 2100) if not KeptSplit(0.2).is_test(f"{camera}-{event_id(n)}.jpg")][:2]
    write_snapshot(clips, camera, new[0], read(pictures[0]), age_s=0.0)
    half = write_snapshot(clips, camera, new[1], read(pictures[1])[:300], age_s=0.0)
    with half.open("ab") as file:
        last = max(rounds(stage))
        wait_for(lambda: max(rounds(stage)) > last + 1, "two rounds meanwhile")
        file.write(read(pictures[1])[300:])
    wait_for(lambda: images_of(stage, max(rounds(stage)) - 1) == [before + 2], "a round with both snapshots")

    (clips / f"{camera}-{event_id(new[0])}.jpg").unlink()  # Frigate's retention
    wait_for(lambda: images_of(stage, max(rounds(stage)) - 1) == [before + 1], "a round without the removed one")
    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, "coordinator") == 130
    assert stage.query("select count(*) from refusals") == [(0,)]
    assert "Traceback" not in stage.log("clips")
    assert os.path.getmtime(half) <= time.time()


def read(picture: Path) -> bytes:
    with Image.open(picture) as opened:
        return encode(opened)
