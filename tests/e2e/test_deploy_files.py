"""What deploy/ starts, killed and started again by the same line: the run goes on, where its devices expect it."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coordinator.security.broker.process import claim_port
from tests.support.forked import Forked
from tests.support.programs import CONFIG, Stage, program, toml, wait_for
from tests.support.waiting import WAIT_S

DEPLOY = Path(__file__).parents[2] / "deploy"
USER = 61947
"""A user id without an entry among the users of the system."""
TRAINED = ("device-0", "device-1")  # the second one trains for so long that a kill comes in the middle of a round


def exec_start(unit: str = "fedvit-coordinator.service", name: str = "coordinator") -> list[str]:
    program_path, *arguments = shlex.split(set_by(unit, "ExecStart"))
    assert Path(program_path).name == name
    return arguments


def set_by(unit: str, key: str) -> str:
    """Return the value of a unit file's only line with this key."""
    [value] = re.findall(rf"^{key}=(.*)$", (DEPLOY / "systemd" / unit).read_text(), re.MULTILINE)
    return str(value)


def read_compose(service: str) -> list[str]:
    """Return the words of a service's command in compose.yaml, as Compose reads them."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"][service]
    return [str(word).replace("$$", "$") for word in [*compose.get("entrypoint", []), *compose["command"]]]


def begin(stage: Stage, arguments: list[str]) -> Forked:
    return stage.fork("coordinator", *arguments)


def kill_in_round(stage: Stage, process: Forked, number: int) -> None:
    """kill -9 when the first device has brought its result of a round, and the second one is still at work."""
    result = f"select 1 from results where kind = 'train' and round = {number}"
    wait_for(lambda: stage.query(result), f"a result of round {number}")
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL


def check_outcome(stage: Stage, devices: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """One run, all results accepted, by devices that were there all the while."""
    for name, device in devices.items():
        assert stage.finish(device, name) == 0, stage.log(name)
        assert "run ended" in stage.log(name)
    assert stage.query("select id, status from runs") == [("main", "finished")]
    brought = stage.query("select round, count(*) from results where kind = 'train' group by round order by round")
    assert brought == [(1, len(TRAINED)), (2, len(TRAINED))]


@pytest.mark.slow
def test_unit_of_systemd_resumes_its_run_with_its_deployment(stage: Stage) -> None:
    """Killed twice, and started by the unit's own line, then by hand with a line that says nothing of a broker: the
    broker is recorded with the run. Once more there is nothing to do."""
    folder = str(stage.folder / "deployment")
    ports = [str(claim_port()) for _ in range(2)]

    def read_output(module: str, *arguments: str) -> str:
        command = [*program(module), *arguments]
        return subprocess.run(command, env=stage.environment, capture_output=True, text=True, check=True).stdout

    read_output(
        "coordinator.cli", "init", folder, "--listen", "127.0.0.1", "--host", "localhost", "--port", ports[0],
        "--enrolment-port", ports[1],
    )  # fmt: skip
    file = stage.folder / "service.toml"
    file.write_text(toml({"broker": {"deployment": folder}}))
    paths = {"/etc/fedvit/service.toml": str(file), "/var/lib/fedvit/runs": str(stage.out)}
    line = [paths.get(word, word) for word in exec_start()]
    coordinator = begin(stage, line)
    wait_for(lambda: "for devices of" in stage.log("coordinator"), "the deployment's broker")
    devices = {}
    for name in TRAINED:
        token = read_output("coordinator.cli", "enroll", name, "--deployment", folder, "--no-wait").split()[-1]
        state = str(stage.folder / "state" / name)
        read_output("edge_client.cli", "join", token, "--state", state)
        command = [*program("edge_client.cli"), "--data", str(stage.parts / name), "--state", state]
        devices[name] = stage.start(name, [*command, "--threads", "1", "--once"])
    stage.submit("main", devices=2, rounds=2, variants=CONFIG["variants"])
    kill_in_round(stage, coordinator, 1)
    coordinator = begin(stage, line)
    kill_in_round(stage, coordinator, 2)
    by_hand = ["start", "--resume-or-new", "--run", "main", "--runs", str(stage.out)]
    assert stage.finish(begin(stage, by_hand), "coordinator") == 0, stage.log("coordinator")
    check_outcome(stage, devices)
    assert stage.finish(begin(stage, by_hand), "coordinator") == 0, stage.log("coordinator")
    assert "run main is finished: there is nothing to do" in stage.log("coordinator")
    assert stage.log("coordinator").count(f":{ports[0]}, only for devices of {folder}") == 3


@pytest.mark.slow
def test_containers_join_and_resume_their_run(stage: Stage) -> None:
    """The commands of compose.yaml: the server's is killed and started again, a device's a second time."""
    for folder in ("tokens", "state/device-0", "state/device-1", "bin"):
        (stage.folder / folder).mkdir(parents=True)
    for name, module in {"coordinator": "coordinator.cli", "edge-client": "edge_client.cli"}.items():
        script = stage.folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(program(module))} "$@"\n')
        script.chmod(0o755)
    stage.environment["PATH"] = f"{stage.folder / 'bin'}:{os.environ['PATH']}"
    ports = [str(claim_port()) for _ in range(2)]

    def read_command(service: str, **paths: str) -> list[str]:
        # at once: a path that was put in may have such a folder itself
        mounted = re.compile(rf"/({'|'.join(paths)})\b")
        words = [mounted.sub(lambda found: paths[found[1]], word) for word in read_compose(service)]
        # every port and name is this machine's
        where = f"--host localhost --listen 127.0.0.1 --port {ports[0]} --enrolment-port {ports[1]}"
        return [
            word.replace("--host coordinator", where).replace("512MB", "512MB --threads 1 --once") for word in words
        ]

    tokens = str(stage.folder / "tokens")
    prepare = read_command("prepare", state=str(stage.folder), tokens=tokens)
    for _ in range(2):  # the second time there is nothing to do
        assert stage.finish(stage.start("prepare", prepare), "prepare") == 0, stage.log("prepare")
    line = read_command("coordinator", state=str(stage.folder), tmp=str(stage.folder))
    coordinator = begin(stage, line)
    metrics = stage.folder / "metrics"
    wait_for(metrics.exists, "the server's pages")
    devices = {}
    for name in TRAINED:
        state = str(stage.folder / "state" / name)
        command = read_command(name, state=state, tokens=tokens, images=str(stage.parts / name))
        devices[name] = stage.start(name, command, {"NAME": name})
    stage.submit("main", devices=2, rounds=2, variants=CONFIG["variants"])
    kill_in_round(stage, coordinator, 1)
    coordinator = begin(stage, line)
    check_outcome(stage, devices)
    health = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["coordinator"]["healthcheck"]
    check = [word.replace("/tmp/metrics", str(metrics)) for word in health["test"][1:]]
    assert subprocess.run(check, check=False).returncode == 0
    coordinator.send_signal(signal.SIGTERM)
    assert stage.finish(coordinator, "coordinator") == 130
    assert subprocess.run(check, check=False).returncode != 0


@pytest.mark.slow
def test_unit_of_a_device_needs_neither_a_home_nor_a_named_user(stage: Stage, public: Path) -> None:
    """DynamicUser on a Debian without libnss-systemd: the device's user has no entry among the users, and no HOME."""
    unit = "fedvit-edge.service"
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1")
    state = public / set_by(unit, "StateDirectory")
    state.mkdir(mode=0o700)
    images = shutil.copytree(stage.parts / "device-0", public / "images")
    settings = dict(line.split("=", 1) for line in lines_of("edge.env.example"))
    settings |= {
        "FEDVIT_BROKER": f"mqtt://127.0.0.1:{stage.port}",
        "FEDVIT_DATA": str(images),
        "STATE_DIRECTORY": str(state),
    }
    words: list[str] = []
    for word in exec_start(unit, "edge-client"):
        if word == "$FEDVIT_OPTIONS":  # systemd makes several words of it
            words += settings["FEDVIT_OPTIONS"].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: settings[name[1]], word))
    line = [str(state) if word == f"/var/lib/{state.name}" else word for word in words]
    assert str(state) in line
    assert set_by(unit, "DynamicUser") == "yes"
    clean = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
    command = [*as_a_user_without_a_name(state), *clean, *program("edge_client.cli"), *line, "--once"]
    assert stage.finish(stage.start("device", command), "device") == 0, stage.log("device")
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.query("select device, kind from results order by kind") == [
        ("pi-kitchen", "evaluate"), ("pi-kitchen", "train"),
    ]  # fmt: skip


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def lines_of(file: str) -> list[str]:
    text = (DEPLOY / "systemd" / file).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def as_a_user_without_a_name(state: Path) -> list[str]:
    """Return a prefix that runs a command as such a user, who owns `state`; only root can become another user."""
    if os.geteuid() != 0:
        return []
    os.chown(state, USER, USER)
    # as in the unit no capability is left, but one: the tests' Python and folders may be readable by root alone
    reads = "-all,+dac_read_search"
    kept = [f"--{kind}-caps={reads}" for kind in ("inh", "ambient")]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", f"--bounding-set={reads}", *kept]
