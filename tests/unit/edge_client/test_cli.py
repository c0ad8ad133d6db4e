"""The real program as an operator meets it: one line on what is wrong, an exit code, nothing else."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedvit.data
from fedvit.errors import ConfigError, DataError

PROGRAM = [sys.executable, "-c", "from edge_client.cli import main; main()"]
NOBODY = "127.0.0.1:1"  # a port where no broker listens
WAIT_S = 60

WITHOUT = """
# Import everything that a device imports, while what it must not need cannot be found.
import importlib, importlib.abc, sys

FORBIDDEN = {"torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "sqlalchemy", "rich"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"a device has no {name}")

sys.meta_path.insert(0, Blocker())
for name in FORBIDDEN:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert str(error) == f"a device has no {name}"
    else:
        raise SystemExit(f"{name} was not blocked")
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {name.partition(".")[0] for name in sys.modules} & FORBIDDEN
assert not loaded, loaded
print("imported", len(sys.argv) - 1)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            env=environment(tmp_path / "home"),
            cwd=tmp_path,
        )

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
        while "device ready" not in self.line:  # ends with the process at the latest
            self.line = self.process.stderr.readline()
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


def test_without_data(run: Run) -> None:
    assert_refused(run(), ConfigError.exit_code, "--data")


def test_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert_refused(run("--data", tmp_path / "nowhere"), DataError.exit_code, tmp_path / "nowhere", "no such folder")


def test_an_empty_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(run("--data", tmp_path / "empty"), DataError.exit_code, tmp_path / "empty", "no class folders")


@pytest.mark.parametrize("name", ["two words", "", "süd/1"])
def test_an_id_that_cannot_be_one(run: Run, digits: Path, name: str) -> None:
    assert_refused(run("--data", digits, "--id", name), ConfigError.exit_code, repr(name), "--id")


@pytest.mark.parametrize("broker", ["http://h", "h:port"])
def test_a_broker_that_cannot_be_one(run: Run, digits: Path, broker: str) -> None:
    assert_refused(run("--data", digits, "--broker", broker), ConfigError.exit_code, repr(broker))


def test_a_federation_that_cannot_be_one(run: Run, digits: Path) -> None:
    assert_refused(run("--data", digits, "--federation", "a/b"), ConfigError.exit_code, "'a/b'", "federation")


def test_a_state_folder_that_is_a_file(run: Run, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(run("--data", digits, "--state", tmp_path / "file"), ConfigError.exit_code, tmp_path / "file")


def test_a_state_folder_in_use_names_who_uses_it(
    run: Run, serve: Callable[..., Serving], digits: Path, tmp_path: Path
) -> None:
    """And it is free again when that process is gone, even by kill -9."""
    arguments = ("--data", digits, "--state", tmp_path / "device")
    first = serve(*arguments)
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


def test_help_and_version_answer(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--broker", "--data", "--id", "--state", "--threads", "--federation", "--ca-file", "--once"):
        assert flag in done.stdout
    assert run("--version").stdout.strip().endswith("0.1.0")


def test_a_typing_error_is_named(run: Run, digits: Path) -> None:
    done = run("--data", digits, "--threads", "many")
    assert done.returncode == ConfigError.exit_code
    assert "many" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_needs_no_framework() -> None:
    folder = Path(fedvit.data.__file__).parent
    data = [f"fedvit.data.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(data) >= 7
    modules = [
        *("edge_client.cli", "edge_client.agent", "edge_client.runtime", "edge_client.vault", "edge_client.sampler"),
        *("edge_client.trained", "export.bundle.write", "export.bundle.read"),
        *("profiles.probes.host", "fedvit.data", "fedvit.transport.mqtt", "fedvit.transport.memory"),
        *data,
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *modules], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.stdout.strip() == f"imported {len(modules)}", done.stderr
