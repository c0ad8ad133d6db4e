"""The real program as an operator meets it: one line on what is wrong, an exit code, nothing else."""

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from click.testing import CliRunner

import edge_client.owner
import edge_client.storage
import edge_client.work
import fedvit.data
import profiles.probes
from coordinator.security.broker import Broker
from edge_client.cli import cli
from edge_client.owner.speed import find_speed
from fedvit.errors import ConfigError, DataError
from fedvit.resources import Budget
from fedvit.transport.base import Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import Hello, decode
from fedvit.wire.topics import Topics
from tests.support.brokers import mosquitto, served
from tests.support.children import run_child
from tests.support.speeds import some_speed
from tests.support.waiting import WAIT_S

PROGRAM = [sys.executable, "-c", "from edge_client.cli import main; main()"]
NOBODY = "127.0.0.1:1"  # a port where no broker listens

WITHOUT = """
# Import everything that a device needs to train, while what it must not need cannot be found.
import importlib, sys

FORBIDDEN = {"torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "sqlalchemy", "rich", "cryptography"}
FORBIDDEN |= {"fleet", "coordinator"}  # on a server
sys.modules.update(dict.fromkeys(FORBIDDEN))  # an import of None fails
for name in sys.argv[1:]:
    importlib.import_module(name)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        return run_child([*PROGRAM, *map(str, arguments)], env=environment(tmp_path / "home"), cwd=tmp_path)

    return run


class Serving:
    """An edge client that looks for a broker which is not there."""

    def __init__(self, home: Path, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "--broker", NOBODY, *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(home),
        )
        assert self.process.stderr is not None
        self.line = ""
        self.said = ""
        while "device ready" not in self.line:  # ends with the process at the latest
            self.line = self.process.stderr.readline()
            self.said += self.line
            assert self.line, "the program ended early"

    @property
    def device(self) -> str:
        [name] = [word for word in self.line.split() if word.startswith("device=")]
        return name.removeprefix("device=")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def serve(*arguments: object) -> Serving:
        started.append(Serving(tmp_path / "home", *arguments))
        return started[-1]

    yield serve
    for one in started:
        one.process.kill()
        one.process.communicate()


def assert_refused(done: "subprocess.CompletedProcess[str]", code: int, *named: object) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("edge-client: ")
    for text in named:
        assert str(text) in line


def test_a_typing_error_is_one_line(run: Run, digits: Path, tmp_path: Path) -> None:
    assert_refused(run(), ConfigError.exit_code, "--data")
    assert_refused(run("--data", tmp_path / "nowhere"), DataError.exit_code, tmp_path / "nowhere", "no such folder")
    done = run("--data", digits, "--threads", "many")
    assert done.returncode == ConfigError.exit_code
    assert "many" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((("--id", name), (repr(name), "--id")) for name in ("two words", "", "süd/1", "-rf", "..")),
        *((("--broker", broker), (repr(broker),)) for broker in ("http://h", "h:port")),
        (("--federation", "a/b"), ("'a/b'", "federation")),
        (("--state", __file__), (__file__,)),
        (("--memory-budget", "12 quarts"), ("--memory-budget", "'12 quarts'", "expected")),
        (("--flops-budget", "2 MB"), ("--flops-budget", "'2 MB'", "expected")),
        (("--round-deadline", "soon"), ("--round-deadline", "'soon'", "expected")),
        (("--upload-budget", "0"), ("--upload-budget", "'0'", "expected")),
        (("--temperature-limit", "80F"), ("--temperature-limit", "'80F'", "expected")),
        *(
            (("--label", label), (repr(label), "expected KEY=VALUE"))
            for label in ("berlin", "=berlin", "site=", "site=berlin mitte", "site=a=b", "site=" + "x" * 65)
        ),
        (("--label", "site=berlin", "--label", "site=rome"), ("'site=rome'", "site has the value 'berlin' already")),
        ([word for number in range(17) for word in ("--label", f"l{number}=x")], ("17 labels", "16")),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], words: Sequence[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    refused = CliRunner().invoke(cli, ["--data", str(digits), *arguments])
    assert isinstance(refused.exception, ConfigError)
    assert all(word in str(refused.exception) for word in words)
    assert [*tmp_path.rglob("lock")] == []


def test_a_state_folder_in_use_names_who_uses_it(
    run: Run, serve: Callable[..., Serving], digits: Path, tmp_path: Path
) -> None:
    """And it is free again when that process is gone, even by kill -9. The process that uses it closes it to others."""
    arguments = ("--data", digits, "--state", tmp_path / "device")
    for kept in ("blobs", "vault"):
        (tmp_path / "device" / kept).mkdir(parents=True)
        (tmp_path / "device" / kept).chmod(0o755)
    first = serve(*arguments)
    modes = {kept: (tmp_path / "device" / kept).stat().st_mode & 0o777 for kept in ("blobs", "vault")}
    assert modes == {"blobs": 0o700, "vault": 0o700}, "an earlier version left them open"
    refused = run(*arguments)
    assert_refused(refused, ConfigError.exit_code, tmp_path / "device", f"process {first.process.pid}", "--state")
    first.end(signal.SIGKILL)
    assert serve(*arguments).end() == 0


def test_a_devices_name_is_kept_from_start_to_start(serve: Callable[..., Serving], digits: Path) -> None:
    """Made once from the data folder's name; given once, kept; both folders of state are apart by data folder."""
    first = serve("--data", digits)
    assert first.device.startswith(f"{digits.name}-")
    assert first.end() == 0
    again = serve("--data", digits)
    assert again.device == first.device
    assert again.end(signal.SIGINT) == 0
    renamed = serve("--data", digits, "--id", "pi-4")
    assert renamed.device == "pi-4"
    renamed.end()
    assert serve("--data", digits).device == "pi-4"


def test_a_data_folder_may_have_any_name(serve: Callable[..., Serving], digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "Löwe 7")
    assert serve("--data", tmp_path / "Löwe 7").device.startswith("L-we-7-")
    shutil.copytree(digits, tmp_path / ".-hidden")
    assert serve("--data", tmp_path / ".-hidden").device.startswith("hidden-")


def test_help_and_version_answer(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--broker", "--data", "--id", "--state", "--threads", "--federation", "--ca-file", "--once"):
        assert flag in done.stdout
    assert run("--version").stdout.strip().endswith("0.1.0")


# --- what a device knows of itself --------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with mosquitto(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a device whose speed with one thread is known."""
    find_speed(tmp_path / "known", 1, lambda threads: some_speed(threads))
    return tmp_path / "known"


def hello_of(broker: Broker, serve: Callable[..., Serving], *arguments: object) -> tuple[Hello, str]:
    """What a device that starts with these arguments says, and its log until it was ready."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    listener = MqttTransport(inbox, broker.address, "listener")
    listener.subscribe(Topics("home").from_all_devices[0], 1)
    listener.open()
    assert not isinstance(inbox.get(timeout=WAIT_S), Received)
    started = serve("--broker", broker.address, *arguments)
    hello = decode(inbox.get(timeout=WAIT_S).payload)
    listener.close()
    started.end()
    assert isinstance(hello, Hello)
    return hello, started.said


def test_labels_are_read_from_the_environment(
    broker: Broker, serve: Callable[..., Serving], digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the service file sets them: several in one variable."""
    monkeypatch.setenv("FEDVIT_LABELS", "site=berlin room=kitchen")
    hello, _ = hello_of(broker, serve, "--data", digits, "--state", tmp_path / "new", "--threads", 1)
    assert hello.labels == {"site": "berlin", "room": "kitchen"}


def test_budgets_labels_and_the_known_speed_go_with_the_hello(
    broker: Broker, serve: Callable[..., Serving], digits: Path, state: Path
) -> None:
    budgets = ("--memory-budget", "512MB", "--flops-budget", "2TFLOP", "--round-deadline", "10m")
    given = ("--data", digits, "--state", state, "--threads", 1, *budgets, "--upload-budget", "5MB")
    labels = ("--label", "site=berlin", "--label", "board=pi-4.1")
    hello, said = hello_of(broker, serve, *given, "--temperature-limit", "80", *labels)
    assert hello.labels == {"site": "berlin", "board": "pi-4.1"}
    assert hello.profile.budget == Budget(
        memory_bytes=512_000_000, flops_per_round=2 * 10**12, round_deadline_s=600.0, upload_bytes=5_000_000
    )
    assert hello.profile.speed == some_speed(1)
    assert hello.profile.base_rss_bytes is not None
    assert hello.profile.base_rss_bytes > 40e6, "the engine is in it"
    assert hello.profile.free_disk_bytes is not None
    assert "compute speed is known" in said
    assert "measured" not in said


def test_a_device_without_budgets_measures_nothing(
    broker: Broker, serve: Callable[..., Serving], digits: Path, tmp_path: Path
) -> None:
    hello, said = hello_of(broker, serve, "--data", digits, "--state", tmp_path / "new", "--threads", 1)
    assert (hello.profile.budget, hello.profile.speed) == (Budget(), None)
    assert "compute speed is not known: --profile or 'edge-client profile' measures it" in said


@pytest.mark.parametrize("asked", [("--profile",), ("--upload-budget", "5MB")])
def test_a_speed_that_is_not_known_is_measured_where_it_is_wanted(
    serve: Callable[..., Serving], digits: Path, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    started = serve("--data", digits, "--state", tmp_path / "new", "--threads", 1, *asked)
    assert "measuring the compute speed" in started.said


def test_a_memory_budget_below_the_program_itself_is_said_at_the_start(
    serve: Callable[..., Serving], digits: Path, state: Path
) -> None:
    started = serve("--data", digits, "--state", state, "--threads", 1, "--memory-budget", "10MB")
    assert "the program and its engine alone take" in started.said
    assert "the memory budget is 10.0 MB: no task can keep it" in started.said


def test_the_profile(run: Run, broker: Broker, digits: Path, state: Path) -> None:
    """Options may stand before and behind the command's name; progress goes to standard error."""
    given = ("--state", state, "--broker", NOBODY, "profile", "--broker", broker.address, "--threads", 1)
    shown = run(*given)
    assert shown.returncode == 0, shown.stderr
    assert "stored in" in shown.stdout
    assert "round trip" in shown.stdout
    assert shown.stderr.splitlines()[0] == "measuring: temperature, clocks and idle power"
    report = json.loads(run(*given, "--json", "--memory-budget", "1GB").stdout)
    assert report["threads"] == 1
    assert report["speed"]["threads"] == 1
    assert report["round_trip_s"] > 0
    assert report["budget"] == {"memory_bytes": 10**9}


def test_a_healthy_device(run: Run, broker: Broker, digits: Path) -> None:
    with served(broker.address):
        done = run("doctor", "--broker", broker.address, "--data", digits)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20 training and 12 test images of 3 classes" in done.stdout
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"ok"}


def test_a_device_that_may_be_well(run: Run, broker: Broker) -> None:
    """Without --data its images cannot be looked at."""
    done = run("doctor", "--json", "--broker", broker.address)
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["worst"] == "warning"
    [data] = [finding for finding in said["findings"] if finding["check"] == "data"]
    assert (data["level"], data["remedy"]) == ("warning", "edge-client doctor --data FOLDER")


def test_a_device_that_is_not_well(run: Run, digits: Path) -> None:
    done = run("--broker", NOBODY, "--data", digits, "doctor")
    assert done.returncode == 2
    assert "error    broker       127.0.0.1:1: connection refused" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("doctor",), ("--broker", "127.0.0.1:1", "doctor"), ("doctor", "--broker", NOBODY)]
)
def test_a_broker_from_the_environment_is_one_that_flags_win_over(
    run: Run, digits: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Its URL holds a password, which a command line would show to everybody on the machine."""
    monkeypatch.setenv("FEDVIT_BROKER", "mqtt://fedvit:secret@127.0.0.1:2")
    done = run(*arguments, "--data", digits) if arguments[0] == "doctor" else run("--data", digits, *arguments)
    port = 2 if arguments == ("doctor",) else 1
    assert f"error    broker       127.0.0.1:{port}: connection refused" in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_a_device_needs_no_framework() -> None:
    modules = [
        f"{package.__name__}.{module.name}"
        for package in (fedvit.data, profiles.probes, edge_client.work, edge_client.storage, edge_client.owner)
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("certify")  # reads the device's certificate, for its owner alone
    ]
    modules += ["edge_client.cli", "edge_client.agent", "fedvit.transport.mqtt", "export.bundle.write"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *modules], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
