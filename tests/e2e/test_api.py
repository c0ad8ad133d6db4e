"""The HTTP API in a process of its own, used by the client and by the commands of another machine."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.record.audit import check_entries
from coordinator.record.record import Record
from coordinator.security.api_tokens import ApiTokens
from coordinator.security.folder import Deployment, Settings, make_token
from fedvit.client import Service
from fedvit.errors import ConfigError, LinkDown, PeerRefused
from tests.support.children import run_child
from tests.support.codes import has_code
from tests.support.records import RUN, begin_run
from tests.support.waiting import WAIT_S

COORDINATOR = str(Path(sys.executable).with_name("coordinator"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    made = begin_run(tmp_path / "runs")
    yield made
    made.close()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    settings = Settings(federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost", "127.0.0.1"))
    return Deployment.create(tmp_path / "deployment", settings)


@pytest.fixture
def address(store: Record, deployment: Deployment, tmp_path: Path) -> Iterator[str]:
    """The API alone, encrypted with the certificate of the deployment."""
    process = subprocess.Popen(
        [COORDINATOR, "dashboard", "--api-only", "--tls", "--port", "0", "--runs", str(tmp_path / "runs"),
         "--deployment", str(deployment.folder), "--backups", str(tmp_path / "backups")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"API: (https://\S+)/ ", line)
        assert found, line
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_child([COORDINATOR, *words], env=os.environ | environment)


def test_commands_print_the_same_from_another_machine(
    store: Record, address: str, deployment: Deployment, tmp_path: Path
) -> None:
    runs, authority = str(tmp_path / "runs"), str(deployment.folder / "authority.pem")
    token = tmp_path / "ops.token"
    token.write_text(ApiTokens(tmp_path / "runs").add("ops", "operator") + "\n")
    remote = ("--server", address, "--token-file", str(token), "--server-ca", authority)
    for words in (["show", RUN], ["show", RUN, "--json"], ["runs", "--json"], ["label", "a"], ["label", "a", "b"]):
        here, there = run_command(*words, "--runs", runs), run_command(*remote, *words)
        assert (here.returncode, here.stdout) == (there.returncode, there.stdout), there.stderr
    assert run_command(*remote, "show", "none").returncode == run_command("show", "none", "--runs", runs).returncode
    assert run_command(*remote, "submit", "--rounds", "2", "--run", "new", "--priority", "3").stdout == "new\n"
    assert run_command(*remote, "cancel", "new").stdout == "run new: cancelled\n"
    environment = {"FEDVIT_SERVER": address, "FEDVIT_TOKEN": token.read_text().strip(), "FEDVIT_SERVER_CA": authority}
    assert run_command("wait", "new", **environment).returncode == 1
    refused = run_command(*remote, "revoke", "a")
    assert "[FV1812]" in refused.stderr
    token.write_text(ApiTokens(tmp_path / "runs").add("boss", "admin") + "\n")
    for name in ("x", "y"):
        make_token(deployment, name, 60.0)
    assert json.loads(run_command(*remote, "revoke", "x", "y", "--json").stdout)["revoked"] == ["x", "y"]
    with deployment.registry.read() as rows:
        assert [(entry.who, entry.subject) for entry in rows.read_audit(2)] == [("boss", "x"), ("boss", "y")]
    assert "[FV1817]" in run_command(*remote, "enroll", "z").stderr
    entries = store.audit.read()
    assert [(entry.who, entry.act, entry.origin) for entry in entries] == [
        ("ops", "submit", "API 127.0.0.1"), ("ops", "cancel", "API 127.0.0.1"),
    ]  # fmt: skip
    check_entries(entries)


@pytest.mark.slow
def test_connections_without_a_handshake_are_closed(address: str) -> None:
    """Long before the minute that servers usually wait."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as link:
        link.settimeout(45.0)
        assert link.recv(1) == b""


@pytest.mark.slow
def test_admin_keeps_the_service_tidy_from_another_machine(
    store: Record, address: str, deployment: Deployment, tmp_path: Path
) -> None:
    """Quarantines, clean-ups, removals, backups and the audit, as on the server."""
    here = ("--runs", str(tmp_path / "runs"))
    token = tmp_path / "boss.token"
    token.write_text(ApiTokens(tmp_path / "runs").add("boss", "admin") + "\n")
    there = ("--server", address, "--token-file", str(token), "--server-ca", str(deployment.folder / "authority.pem"))
    for name, start in (("first", {}), ("second", {"start_from": "first"})):
        store.runs.submit(name, {"method": "fedavg", "rounds": 1, **start})
        store.runs.cancel(name)
    store.strikes.add(RUN, 1, "a", "noise")
    store.strikes.add_quarantine(RUN, "a", 1, 9, "noise")

    def same(*words: str) -> str:
        """Run a command on both machines; it must print the same."""
        one, other = run_command(*words, *here), run_command(*there, *words)
        assert (one.returncode, one.stdout) == (other.returncode, other.stdout), other.stderr
        return other.stdout

    assert json.loads(same("quarantine", RUN, "--json"))[0]["quarantine"] == "noise"
    assert (
        json.loads(run_command(*there, "quarantine", RUN, "--release", "a", "--json").stdout)[0]["quarantine"] is None
    )
    same("gc", "--keep-runs", "0", "--dry-run", "--json")
    assert "[FV1617]" in run_command(*there, "rm", "first").stderr
    removed = json.loads(run_command(*there, "rm", "first", "second", "--json").stdout)
    assert {entry["run"] for entry in removed} == {"first", "second"}
    made = json.loads(run_command(*there, "backup", "--keep", "1", "--json").stdout)
    assert made["runs"] == [RUN]
    listed = run_command("backup", str(tmp_path / "backups"), "--list", "--json").stdout
    assert json.loads(run_command(*there, "backup", "--list", "--json").stdout) == json.loads(listed)
    assert "[FV1817]" in run_command(*there, "backup", str(tmp_path / "other")).stderr
    digest = json.loads(same("audit", "--check", "--json"))["digest"]
    assert json.loads(run_command(*there, "audit", "--check", "--expect", digest, "--json").stdout)["digest"] == digest
    assert "[FV1641]" in run_command(*there, "audit", "--check", "--expect", "blake3:none").stderr
    acts = [(entry["act"], entry["who"]) for entry in json.loads(same("audit", "--json"))]
    assert acts == [("release", "boss"), ("rm", "boss"), ("rm", "boss"), ("backup", "boss")]
    same("audit", "--last", "1", "--deployment", str(deployment.folder), "--json")


def test_client_submits_follows_and_downloads(
    store: Record, address: str, deployment: Deployment, tmp_path: Path
) -> None:
    authority, tokens = deployment.folder / "authority.pem", ApiTokens(tmp_path / "runs")
    service = Service(address, tokens.add("ci", "operator"), ca_file=authority)
    assert [run.run for run in service.runs.list_all()] == [RUN]
    assert service.runs.read_rounds(RUN)[0].accepted == 2
    assert service.runs.submit({"rounds": 2}, "new").status == "queued"
    assert service.runs.pause("new").paused_at is not None
    assert service.devices.set_labels("a", {"site": "berlin"}).labels == {"site": "berlin"}
    assert service.devices.list_all() == []
    service.runs.cancel("new")
    assert [event.kind for event in service.follow("new")] == ["run", "end"]
    assert service.runs.wait("new").status == "cancelled"
    service.download(tmp_path / "report.html", "runs", RUN, "report")
    assert RUN in (tmp_path / "report.html").read_text()
    with pytest.raises(ConfigError, check=has_code("FV1601")):
        service.runs.read("none")
    tokens.remove("ci")
    with pytest.raises(PeerRefused, check=has_code("FV1811")):
        service.runs.read(RUN)
    with pytest.raises(LinkDown, check=has_code("FV1815")):
        Service(address, "fvt_x").get("me")  # whose authority this machine does not know
