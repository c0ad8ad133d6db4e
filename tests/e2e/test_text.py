"""A model of text is trained by edge processes over a real broker."""

from pathlib import Path

from fedvit.models import TEXT
from fleet.partition import deal
from tests.support.forked import Forked
from tests.support.plays import TEXT_MODEL, write_play
from tests.support.programs import Stage, toml


def test_processes_train_on_speaking_roles(tmp_path: Path, cache: Path) -> None:
    parts = tmp_path / "parts"
    deal(str(write_play(tmp_path / "play.txt")), "natural", 2, parts, size=8)
    stage = Stage(tmp_path, parts, cache)
    values = {
        "method": "fedtp", "model": TEXT, "model_options": TEXT_MODEL, "devices": 2, "rounds": 2, "deadline_s": 120.0,
        "options": {"batch_size": 8, "optimizer": "adamw", "lr": 0.01, "hidden": 8, "embedding_dim": 4},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(toml(values))
    try:
        given = ["start", "--runs", str(stage.out), "--broker", "mosquitto", "--broker.port", str(stage.port)]
        given += ["--config", str(tmp_path / "run.toml"), "--run", "run"]
        log = stage.log_path("coordinator")
        coordinator = stage.keep(Forked("coordinator.cli", given, log, stage.environment))
        devices = {name: stage.device(name) for name in ("device-0", "device-1")}
        assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
        for name, process in devices.items():
            assert stage.finish(process, name) == 0, stage.log(name)
        shown = stage.show()
    finally:
        stage.close()
    assert [entry["accepted"] for entry in shown["rounds"]] == [2, 2]
    assert not shown["refusals"]
    assert min(shown["rounds"][-1]["accuracy"].values()) > 0.3, "a single character has less than a fifth"
