"""The commands that programs print for what comes next are run as they are printed, by a shell."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import CONFIG, Stage, toml, wait_for


@pytest.fixture
def user(stage: Stage) -> "User":
    return User(stage)


class User:
    """Types command lines in an empty folder."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.home = stage.folder / "home"
        self.home.mkdir()
        stage.out = self.home / "runs"
        stage.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{stage.environment['PATH']}"
        stage.environment["XDG_STATE_HOME"] = str(stage.folder / "state")
        self._lines = 0

    def begin(self, line: str) -> "tuple[subprocess.Popen[bytes], str]":
        """Start a line; returns the process and the name of its log."""
        self._lines += 1
        name = f"line-{self._lines}"
        return self.stage.start(name, ["sh", "-c", f"cd {self.home} && exec {line}"]), name

    def run(self, line: str) -> str:
        """The output of a line that succeeds."""
        process, name = self.begin(line)
        code = self.stage.finish(process, name)
        assert code == 0, f"{line}: {self.stage.log(name)}"
        return self.stage.log(name)


def hints(output: str) -> list[str]:
    """The commands of closing lines."""
    closing = re.findall(r"^(?:next|.*resume with): (.*)$", output, re.MULTILINE)
    return [command for line in closing for command in re.split(r"; |, and for each device: ", line)]


def write_run(user: User, method: str) -> str:
    """The flags of a short run of one device."""
    values = {**CONFIG, "variants": {}, "options": {"epochs": 20, "batch_size": 8}, "devices": 1}
    (user.home / f"{method}.toml").write_text(toml({**values, "method": method, "rounds": 3}))
    return f"--config {method}.toml --run {method}"


@pytest.mark.slow
def test_printed_commands_lead_from_a_deployment_to_a_model(user: User) -> None:
    """`init`, `enroll`, `join`, `start`, an interrupt, the end of a run: each says what comes next. A method whose
    tensors stay on devices is exported there, another one on the server."""
    stage, images = user.stage, stage_images(user.stage)
    made = user.run("coordinator init deployment --listen 127.0.0.1 --host localhost --port 0 --enrolment-port 0")
    start, enroll = hints(made)
    enrolment, log = user.begin(enroll.replace("NAME", "pi"))
    wait_for(lambda: "waiting for it" in stage.log(log), "a token, and the broker")
    [serve] = hints(user.run(next(line for line in stage.log(log).splitlines() if line.startswith("edge-client"))))
    assert stage.finish(enrolment, log) == 0
    coordinator, log = user.begin(f"{start} {write_run(user, 'fedper')}")
    user.begin(serve.replace("FOLDER", images))
    wait_for(lambda: stage.query("select 1 from rounds where closed_at is not null"), "a closed round")
    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, log) == 130
    said = stage.log(log)
    [resume] = hints(said)
    assert said.endswith(f"resume with: {resume}\n"), "no empty line follows"
    assert resume == "coordinator start --resume fedper", "no folder that is the default"
    following = {
        "edge-client export fedper": resume,
        "coordinator export fedavg": f"{start} {write_run(user, 'fedavg')}",
    }
    for method, (exporting, line) in zip(("fedper", "fedavg"), following.items(), strict=True):
        report, export = hints(user.run(line))
        user.run(report)
        assert (user.home / "report.html").stat().st_size
        assert export.startswith(exporting)
        user.run(export.replace("IMAGES", images))
        assert (user.home / "bundle" / "model.onnx").exists()
        (user.home / "bundle").rename(user.home / f"bundle-{method}")
    for command in ("show", "report"):  # of the newest run, which nobody names
        assert "fedavg" in user.run(f"coordinator {command}")
    user.run("coordinator export --out newest")
    assert "fedavg" in (user.home / "newest" / "README.md").read_text()


def stage_images(stage: Stage) -> str:
    return str(stage.parts / "device-0")
