"""The example package, built and installed: its plugins obey all laws, and work together in a real run.

Only the server has the package: devices run what it sends.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fedvit import plugins
from fleet.contracts import LAWS
from tests.support.children import run_child
from tests.support.packages import build_and_install
from tests.support.programs import Stage, program, toml

PACKAGE = "fedvit-example-extras"
SOURCE = Path(__file__).parents[2] / "examples" / PACKAGE
DEVICES = ("device-0", "device-1", "device-2")
RUN = {
    "method": "norms_alone",
    "selection": "by_loss",
    "cohort": 2,
    "rounds": 2,
    "devices": len(DEVICES),
    "options": {"batch_size": 8, "lr": 0.05, "server_optimizer": "lion", "server_lr": 0.01},
    "model": "small_cnn",
    "model_options": {"image_size": 12, "width": 8},
    "robust": {"aggregator": "clipped_mean"},
}
"""Each kind of plugin that a run can name; the method's loss needs the package's operators."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("installed")
    build_and_install(SOURCE, folder / "site", folder / "build")
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def stage(tmp_path: Path, cache: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, tmp_path / "parts", cache)
    yield made
    made.close()


def call(environment: Mapping[str, str], folder: Path, module: str, *words: str) -> str:
    """Standard output of a command that succeeds where the package is installed."""
    return execute(environment, folder, *program(module), *words)


def execute(environment: Mapping[str, str], folder: Path, *words: str) -> str:
    done = run_child(words, env={**os.environ, **environment}, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_has_a_plugin_of_each_kind_that_obeys_its_laws(environment: dict[str, str], tmp_path: Path) -> None:
    verdicts = json.loads(call(environment, tmp_path, "fleet.cli", "contracts", PACKAGE, "--json"))
    assert {verdict["kind"] for verdict in verdicts} == {kind.noun for kind in plugins.KINDS} == {*map(noun, LAWS)}
    assert [verdict for verdict in verdicts if verdict["broken"] is not None] == []
    assert all(verdict["law"] for verdict in verdicts)


def noun(kind: plugins.PluginKind) -> str:
    return kind.noun


def test_plugins_work_together_on_devices_without_the_package(environment: dict[str, str], stage: Stage) -> None:
    write = "from pathlib import Path; from fedvit_example_extras.reader import write_example; write_example(Path())"
    execute(environment, stage.folder, sys.executable, "-c", write)
    words = ["--dataset", "example.raw12", "--devices", "3", "--partition", "power_law", "-p", "exponent=0.2"]
    call(environment, stage.folder, "fleet.cli", "partition", *words, "--size", "12", "--out", "parts")
    summary = json.loads((stage.parts / "partition.json").read_text())
    sizes = [sum(device["train"].values()) + sum(device["test"].values()) for device in summary["devices"]]
    assert sum(sizes) == 41
    assert sizes == sorted(sizes, reverse=True)
    (stage.folder / "run.toml").write_text(toml(RUN))
    start = ["start", "--config", str(stage.folder / "run.toml"), "--run", "run", "--runs", str(stage.out)]
    broker = ["--broker", "embedded", "--broker.port", str(stage.port)]
    coordinator = stage.start("coordinator", [*program("coordinator.cli"), *start, *broker], environment)
    stage.finish_run(coordinator, {name: stage.device(name) for name in DEVICES})
    shown = stage.show()
    assert (shown["method"], shown["status"], len(shown["rounds"])) == ("norms_alone", "finished", 2)
    assert [each["cohort"] for each in shown["rounds"]] == [2, 2]
