"""Programs and scripts in a folder with names that hide the packages: a clone called fedvit, an `export.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.partition import DealSettings, deal
from tests.support.children import run_child
from tests.support.tiny import TINY_MODEL

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MODEL = [word for name, size in TINY_MODEL.items() for word in ("--model-option", f"{name}={size}")]
SCRIPT = f"""
from fleet.api import run
print(run("parts", method="fedavg", rounds=1, model_options={TINY_MODEL}, name="script", progress=False).name)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A folder with a clone called fedvit, and images of two devices."""
    (tmp_path / "fedvit").symlink_to(ROOT)
    deal("digits", "iid", 2, tmp_path / "parts", DealSettings(test_share=0.8))
    return tmp_path


def run(parent: Path, cache: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return run_child(list(map(str, command)), env=environment, cwd=parent)


@pytest.mark.slow
def test_a_script_beside_a_clone(parent: Path, cache: Path) -> None:
    (parent / "nb.py").write_text(SCRIPT)
    done = run(parent, cache, sys.executable, "nb.py")
    assert done.stdout == "script\n", done.stderr


@pytest.mark.slow
def test_programs_beside_a_clone(parent: Path, cache: Path) -> None:
    for name in ("export.py", "profiles.py", "coordinator.py", "edge_client.py"):
        (parent / name).write_text("raise SystemExit('a file of the user was imported')")

    doctor = run(parent, cache, BIN / "edge-client", "doctor", "--data", "parts/device-0", "--json")
    findings = json.loads(doctor.stdout)["findings"]
    assert [each["level"] for each in findings if each["check"] == "engine"] == ["ok"], doctor.stdout

    profile = run(parent, cache, BIN / "edge-client", "profile", "--fresh", "--json")
    assert json.loads(profile.stdout)["speed"], profile.stderr

    fleet = run(
        parent, cache, BIN / "fleet", "run", "--parts", "parts", "--method", "fedavg", "--rounds", "1", *MODEL,
        "--run", "one", "--broker", "embedded", "--broker.port", "0", "--json",
    )  # fmt: skip
    assert fleet.returncode == 0, fleet.stderr
    shown = run(parent, cache, BIN / "coordinator", "show", "one")
    assert "run one: fedavg on vit_small_images, finished, 1 of 1 rounds" in shown.stdout, shown.stderr
