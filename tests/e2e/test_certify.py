"""`edge-client certify` on this machine: whole, with real processes, and short."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from coordinator.security.folder import Deployment
from edge_client.owner.certify_page import Document
from fleet.processes import program
from tests.support.deployments import make_deployment
from tests.support.hostile_coordinator import join_without_token

pytestmark = pytest.mark.slow


def certify(state: Path, out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [*program("edge_client.cli"), "certify", "--state", str(state), "--out", str(out), "--threads", "1"]
    return subprocess.run(
        [*command, "--minutes", "0.02", *more], capture_output=True, text=True, timeout=540, check=False
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state of a device that has joined."""
    folder = tmp_path / "state" / "identity"
    folder.mkdir(parents=True)
    deployment: Deployment = make_deployment(tmp_path / "deployment")
    join_without_token(deployment, folder, "pi-1")
    return folder.parent


def test_certificate_of_this_machine(state: Path, tmp_path: Path) -> None:
    """All parts pass, and the document is signed; a changed one is not."""
    out = tmp_path / "out"
    done = certify(state, out, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stderr
    document = msgspec.json.decode(done.stdout, type=Document)
    assert msgspec.json.decode((out / "certificate.json").read_bytes(), type=Document) == document
    one = document.certificate
    assert not one.faults
    assert [figures.name for figures in one.programs][:2] == ["float", "int8"]
    assert all(figures.right and figures.use.steps == 20 for figures in one.programs)
    assert (one.memory.fits, one.memory.refused) == (True, True)
    assert (one.survival.kills, one.survival.resumed, one.survival.same) == (3, True, True)
    assert one.heat.use.steps > 0
    assert one.profile.host.name == one.profile.broker == ""
    assert str(state) not in done.stdout
    assert {"engine", "training", "sandbox"} <= {finding.check for finding in one.doctor}
    assert not [file for file in state.iterdir() if file.name.startswith("certify-")]
    assert "## doctor" in (out / "certificate.md").read_text()

    check = [*program("edge_client.cli"), "certify", "--check", str(out / "certificate.json")]
    said = subprocess.run(check, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "signed by pi-1" in said
    changed = json.loads(done.stdout)
    changed["certificate"]["programs"][0]["use"]["step_s"] /= 2
    (out / "certificate.json").write_text(json.dumps(changed))
    refused = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 1
    assert "the signature is wrong" in refused.stdout


def test_device_without_a_deployment_is_not_signed(tmp_path: Path) -> None:
    done = certify(tmp_path / "state", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this device has not joined" in done.stdout
    assert "a row for docs/boards.md:\n| " in done.stdout
