"""`submit`, `cancel`, and what other commands say of runs that wait for a service."""

import fcntl
import json
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.compute.engine import Engine
from coordinator.config import RunConfig
from coordinator.operations.submitting import _find_warning
from coordinator.record.database import use_database
from coordinator.record.record import open_record
from coordinator.rounds.service.status import MemberStatus, ServiceStatus, write_service_status
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, DatabaseGone
from tests.support.forked import ForkedWorker
from tests.support.postgresql import Postgresql

CONFIG = msgspec.to_builtins(RunConfig(method="fedavg"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with two queued runs, one that was interrupted, and a finished one."""
    folder = tmp_path / "runs"
    with open_record(folder) as store:
        store.runs.create("done", CONFIG)
        store.runs.update("done", status="finished")
        for name in ("begun", "first", "second"):
            store.runs.submit(name, CONFIG)
        assert store.runs.take_from_queue("begun", CONFIG, {"port": 7})
        store.runs.update("begun", status="interrupted")
    return folder


@pytest.fixture
def forked_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process that has torch at once."""
    assert Engine
    monkeypatch.setattr("coordinator.compute.process.spawn", ForkedWorker)


def said(*arguments: object) -> str:
    result = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    return str(result.exception)


def statuses(out: Path) -> dict[str, str]:
    with open_record(out) as store:
        return {record.id: record.status for record in store.runs.read_all()}


def members(out: Path, **labels: str) -> None:
    member = MemberStatus(device="pi-1", labels=labels, online=True, run=None)
    write_service_status(out, ServiceStatus(federation="home", broker="localhost:1883", running=[], members=[member]))


def test_submit_prints_the_name_of_the_run(tmp_path: Path, forked_worker: None) -> None:
    """And its service decides the federation, where the configuration does not."""
    out, file = tmp_path / "runs", tmp_path / "run.toml"
    file.write_text('method = "fedavg"\n[model_options]\ndepth = 2\n')
    assert said("submit", file, "--run", "one", "--rounds", 3, "--runs", out) == "one\n"
    name = json.loads(said("submit", file, "--federation", "home", "--runs", out, "--json"))["run"]
    with open_record(out) as store:
        assert [record.id for record in store.runs.read_submitted()] == ["one", name]
        config = store.runs.read("one").config
        assert (config["rounds"], config["model_options"]) == (3, {"depth": 2})
        assert "federation" not in config
        assert store.runs.read(name).config["federation"] == "home"
        assert "run 'one' exists already" in refused("submit", file, "--run", "one", "--runs", out)


def test_submit_takes_a_run_that_starts_from_one_before_it_in_the_queue(tmp_path: Path, forked_worker: None) -> None:
    out = tmp_path / "runs"
    said("submit", "--method", "fedavg", "--run", "one", "--runs", out)
    said("submit", "--method", "fedavg", "--run", "two", "--start-from", "one", "--runs", out)
    assert statuses(out) == {"one": "queued", "two": "queued"}
    said("cancel", "one", "--runs", out)
    never = refused("submit", "--method", "fedavg", "--start-from", "one", "--runs", out)
    assert never == "start_from = 'one': that run closed no round"
    assert "no run 'onee'; did you mean 'one'?" in refused("submit", "--start-from", "onee", "--runs", out)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("quorun = 0.5", "unknown key 'quorun'; did you mean 'quorum'?"),
        ("[broker]\nport = 7", "[broker] is for `coordinator start` and `serve`"),
        ('devices_where = "berlin"', "devices_where = 'berlin' must be written LABEL=VALUE,LABEL=VALUE"),
    ],
)
def test_submit_refuses_as_start_does(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert complaint in refused("submit", file, "--runs", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("where", "labels", "warns"),
    [
        ("", {}, False),
        ("site=berlin", {"site": "berlin", "board": "rpi5"}, False),
        ("site=berlin", {"site": "munich"}, True),
    ],
)
def test_submit_warns_of_labels_that_no_device_has(out: Path, where: str, labels: Any, warns: bool) -> None:
    members(out, **labels)
    warning = _find_warning(RunConfig(devices_where=where), out)
    assert (warning is not None) == warns
    assert warning is None or "existing labels: site=munich (1 device)." in warning


@pytest.mark.parametrize("run", ["first", "begun"])
def test_cancel_ends_unserved_run_at_once(out: Path, run: str) -> None:
    assert said("cancel", run, "--runs", out) == f"run {run}: cancelled\n"
    assert statuses(out)[run] == "cancelled"
    assert refused("cancel", run, "--runs", out) == f"run {run!r} is cancelled already"
    with open_record(out) as store:
        assert run not in [record.id for record in store.runs.read_submitted()]
        assert store.runs.has_ended(run), "results of it are refused"
        assert not store.runs.take_from_queue(run, CONFIG, {})
    assert f"run {run!r} is cancelled" in refused("start", "--resume", run, "--runs", out)


def test_cancel_leaves_a_run_that_is_served_to_its_coordinator(out: Path) -> None:
    (out / "begun").mkdir()
    with open(out / "begun" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert json.loads(said("cancel", "begun", "--runs", out, "--json")) == {"run": "begun", "status": "interrupted"}
    with open_record(out) as store:
        assert store.runs.is_cancelled("begun")
        assert not store.runs.is_cancelled("first")


def test_cancel_names_runs_that_are_over_or_unknown(out: Path) -> None:
    assert refused("cancel", "done", "--runs", out) == "run 'done' is finished already"
    assert "no run 'nosuch'" in refused("cancel", "nosuch", "--runs", out)


@pytest.mark.parametrize("run", ["first", "begun"])
def test_rm_refuses_runs_that_a_service_will_serve(out: Path, run: str) -> None:
    assert "a service will continue it: cancel it first" in refused("rm", run, "--runs", out)
    said("cancel", run, "--runs", out)
    said("rm", run, "--runs", out)
    assert run not in statuses(out)


def test_start_does_not_resume_a_queued_run(out: Path) -> None:
    assert "run 'first' is queued: `coordinator serve` begins it" in refused(
        "start", "--resume", "first", "--runs", out
    )


def test_serve_serves_a_folder_once(out: Path) -> None:
    with open(out / "service.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "being served by another `coordinator serve`" in refused("serve", "--runs", out, "--broker.port", 0)


def test_status_shows_the_service(out: Path) -> None:
    members(out, site="berlin")
    lines = said("status", "--runs", out).splitlines()
    assert lines == [
        "service: federation home at localhost:1883",
        "  run begun: begins",
        "  queue: first, second",
        "  pi-1 site=berlin: no run has work for it now",
    ]
    shown = json.loads(said("status", "--runs", out, "--json"))["service"]
    assert (shown["alive"], shown["begun"], shown["queued"]) == (True, ["begun"], ["first", "second"])
    (out / "service.json").unlink()
    assert "service: not running" in said("status", "--runs", out)
    queued = f"run first: queued; `coordinator serve --runs {out}` begins it\n"
    assert said("status", "first", "--runs", out) == queued


def test_runs_lists_the_queue(out: Path) -> None:
    listed = {entry["run"]: entry["status"] for entry in json.loads(said("runs", "--runs", out, "--json"))}
    assert listed == {"done": "finished", "begun": "interrupted", "first": "queued", "second": "queued"}


def test_standby_needs_a_record_and_a_broker_that_outlive_the_leader(out: Path) -> None:
    broker = refused("serve", "--standby", "--runs", out)
    assert broker == (
        "broker = 'auto' would end with this coordinator: --standby needs the address of a broker that both services "
        "use, by --broker mqtts://HOST"
    )
    record = refused("serve", "--standby", "--runs", out, "--broker", "mqtt://127.0.0.1:1")
    assert record.startswith(
        f"--standby: the record of {out} is not in PostgreSQL, which decides which service leads; "
    )
    assert "--record postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in record


def test_standby_refuses_a_record_of_a_newer_version_and_a_database_that_is_away(
    tmp_path: Path, postgresql: Postgresql
) -> None:
    out, url = tmp_path / "runs", postgresql.schema()
    use_database(out, url)
    with psycopg.connect(url) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    command = ("serve", "--standby", "--runs", out, "--broker", "mqtt://127.0.0.1:1")
    assert "has schema 9999, and fedvit" in refused(*command)
    (out / "record.url").write_text(f"postgresql://u:secret@127.0.0.1:{claim_port('127.0.0.1', 0)}/d")
    result = CliRunner().invoke(cli, list(map(str, command)))
    assert isinstance(result.exception, DatabaseGone)
    assert "secret" not in str(result.exception)
    assert "Connection refused" in str(result.exception)
