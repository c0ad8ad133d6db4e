"""The answers of the endpoints: the same as the commands, by the same functions."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.http_api import events
from coordinator.record.record import Record, open_record
from coordinator.record.tables import SavedState
from coordinator.rounds.service.status import ServiceStatus, write_service_status
from coordinator.run_view import read_document, read_rounds, read_run, show_document
from coordinator.security.folder import Deployment, Settings
from coordinator.security.registry import Certificate
from tests.support.http_api import Api, serve_api
from tests.support.models import BETTER, FIRST, WORSE, compare_on
from tests.support.records import RUN, begin_run, write_status
from tests.support.waiting import WAIT_S


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    made = begin_run(tmp_path / "runs")
    yield made
    made.close()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = Deployment.create(tmp_path / "deployment", Settings(
        federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)))  # fmt: skip
    with made.change() as rows:
        rows.put_device("a", Certificate("1f", 0.0, 4e9), 0.0)
    return made


@pytest.fixture
def api(store: Record, deployment: Deployment, tmp_path: Path) -> Iterator[Api]:
    with serve_api(tmp_path / "runs", deployment, tmp_path / "backups") as made:
        yield made


def run_command(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_runs_are_listed_by_pages_and_filters(api: Api, store: Record) -> None:
    for number in range(5):
        store.runs.submit(f"next-{number}", {"method": "fedavg", "model": "vit_tiny", "rounds": 2})
    assert api.get("/runs", limit=2)["total"] == 6
    pages = [entry["run"] for offset in (0, 2, 4) for entry in api.get("/runs", limit=2, offset=offset)["runs"]]
    assert pages == [record.id for record in store.runs.read_all()]
    assert api.get("/runs", status=["running", "failed"])["total"] == 1
    assert api.get("/runs", method="fedavg", name="-3")["runs"][0]["run"] == "next-3"
    assert api.get("/runs", model="none") == {"runs": [], "total": 0}
    assert set(api.get("/sizes")["bytes"]) == {record.id for record in store.runs.read_all()}


def test_run_is_shown_as_by_the_command(api: Api, store: Record, tmp_path: Path) -> None:
    shown = json.loads(run_command("show", RUN, "--json", "--runs", tmp_path / "runs"))
    assert api.get(f"/runs/{RUN}/details") == shown
    assert api.get("/runs/~newest/details") == shown
    assert read_document(shown) == read_run(store, RUN)
    assert msgspec.json.decode(msgspec.json.encode(show_document(read_document(shown)))) == shown
    assert api.get(f"/runs/{RUN}")["rounds"] == 2
    assert [entry["round"] for entry in api.get(f"/runs/{RUN}/rounds")["rounds"]] == [1]
    assert [entry["device"] for entry in api.get(f"/runs/{RUN}/devices", limit=1)["devices"]] == ["a"]


def test_unknown_things_have_the_codes_of_the_commands(api: Api) -> None:
    for path, code in (("/runs/none", "FV1601"), ("/runs/none/rounds", "FV1601"), ("/nothing", "FV1813")):
        answer = api.ask("GET", path)
        assert (answer.status_code, answer.json()["code"]) == (404, code)
    for path in ("/runs?limit=0", "/runs?limit=501", "/runs?status=odd", "/runs?offset=x"):
        assert api.ask("GET", path).status_code == 422
    assert api.ask("POST", f"/runs/{RUN}/unpause").json()["code"] == "FV1611"


def test_run_is_submitted_paused_and_cancelled(api: Api, store: Record) -> None:
    config = {"method": "fedavg", "model": "vit_small_images", "rounds": 3}
    made = api.send("POST", "/runs", {"config": config, "name": "new", "priority": 5, "at": "+8h"}, "operator")
    assert made == {"run": "new", "status": "queued", "warning": None}
    record = store.runs.read("new")
    assert (record.priority, record.is_due()) == (5, False)
    assert api.get("/runs/new", "viewer")["status"] == "queued", "an answer from before the change is not used"
    assert api.ask("POST", "/runs", json={"config": config, "name": "new"}).status_code == 409
    assert api.ask("POST", "/runs", json={"config": {"method": "none"}}).status_code == 400
    assert api.ask("POST", "/runs", json={"at": "tomorrow"}).json()["code"] == "FV1818"
    paused = api.send("POST", "/runs/new/pause", role="operator")
    assert paused["paused_at"] == store.runs.read("new").paused_at is not None
    assert api.send("POST", "/runs/new/unpause")["paused_at"] is None
    assert api.send("POST", "/runs/new/cancel")["status"] == "cancelled"
    assert api.send("DELETE", "/runs/new")[0]["what"] == "run"
    assert api.ask("GET", "/runs/new").status_code == 404


def test_models_are_listed_and_changed(api: Api, store: Record) -> None:
    for name, compared in (("r-1", FIRST), ("r-2", BETTER)):
        compare_on(store, name, {"a": compared, "b": compared}, after=0)
    assert [(model["model"], model["stage"]) for model in api.get("/models", "viewer")] == [
        ("r-2", "champion"), ("r-1", "former"),
    ]  # fmt: skip
    done = api.send("POST", "/models/r-2/rollback", role="operator")
    assert (done["stage"], done["done"]) == ("retired", "model r-2 is rolled back on 2 devices")
    assert api.get("/models/r-2", "viewer")["stage"] == "retired", "an answer from before the change is not used"
    assert api.ask("POST", "/models/r-2/promote", json={}).status_code == 409
    assert api.ask("POST", "/models/none-1/promote", json={}).status_code == 404
    assert api.ask("POST", "/models/r-1/promote", json={"which": "all"}).status_code == 422
    compare_on(store, "r-3", {"a": WORSE}, after=0)
    assert api.send("POST", "/models/r-3/promote", {"where": "site=berlin"})["stage"] == "champion"
    assert api.send("POST", "/models/r-3/rollback")["stage"] == "retired"
    entry = store.audit.read()[-1]
    assert (entry.who, entry.act, entry.origin.partition(" ")[0]) == ("of-admin", "roll back model", "API")


def test_failed_run_is_tried_again(api: Api, store: Record) -> None:
    for name, begun in (("early", False), ("late", True)):
        store.runs.submit(name, {"method": "fedavg", "rounds": 2})
        if begun:
            store.runs.update(name, status="waiting")
            store.rounds.open(name, 1, ["a"])
        store.runs.update(name, status="failed", reason="no such model")
    assert api.send("POST", "/runs/early/retry")["status"] == "queued"
    assert api.send("POST", "/runs/late/retry")["status"] == "interrupted"
    assert store.runs.read("early").reason is None
    assert api.ask("POST", "/runs/early/retry").json()["code"] == "FV1612"
    store.runs.update(RUN, status="failed")
    assert api.ask("POST", f"/runs/{RUN}/retry").json()["code"] == "FV1615", "it was begun by `start`"


def test_queue_is_by_priority_and_then_by_submission(api: Api, store: Record) -> None:
    for name, priority in (("first", 0), ("second", 0), ("urgent", 7), ("idle", -1)):
        api.send("POST", "/runs", {"name": name, "priority": priority})
    assert api.get("/service")["queued"] == ["urgent", "first", "second", "idle"]


def test_activity_is_that_of_the_status_file(api: Api, tmp_path: Path) -> None:
    (tmp_path / "runs" / RUN).mkdir(exist_ok=True)
    write_status(tmp_path / "runs" / RUN, ["a"], 2)
    assert api.get(f"/runs/{RUN}/activity")["live"]["waiting_for"]
    write_service_status(tmp_path / "runs", ServiceStatus(federation="f", broker="b", running=[RUN], members=[]))
    assert api.get("/service")["alive"] is True


def test_devices_are_labelled_released_invited_and_revoked(api: Api, store: Record, deployment: Deployment) -> None:
    assert api.send("PATCH", "/devices/a/labels", {"set": {"site": "berlin"}}, "operator")["labels"]["site"] == "berlin"
    assert api.send("PATCH", "/devices/a/labels", {"remove": ["site"]})["labels"] == {}
    store.strikes.add(RUN, 1, "a", "a number is not finite")
    assert api.get(f"/runs/{RUN}/standings", "viewer")[0]["strikes"] == 1
    assert api.send("POST", f"/runs/{RUN}/release", {"devices": ["a"]}, "operator")[0]["strikes"] == 0
    assert api.get("/devices/a/logs") == []
    assert api.send("POST", "/devices/b/enroll", {"valid_s": 60})["token"].startswith("fedvit")
    assert api.ask("POST", "/devices/a/enroll").json()["code"] == "FV1306"
    listed = api.get("/devices", standings=True)
    assert [entry["device"] for entry in listed["devices"]] == ["a"]
    assert (listed["run"], listed["waiting"][0]["device"]) == (RUN, "b")
    assert api.send("POST", "/devices/a/revoke")["lines"][0] == "a is revoked"
    with deployment.registry.read() as rows:
        assert rows.revocations.list_devices() == ["a"]
    entries = api.get("/audit", of="deployment")
    assert [(entry["act"], entry["subject"]) for entry in entries] == [("enroll", "b"), ("revoke", "a")]
    assert {entry["who"] for entry in entries} == {"of-admin"}


def test_certificate_beyond_the_calendar_has_the_last_date(api: Api, deployment: Deployment) -> None:
    with deployment.change() as rows:
        rows.put_device("z", Certificate("2f", 0.0, 4e12), 0.0)
    assert {entry["device"]: entry["expires"][:4] for entry in api.get("/devices")["devices"]}["z"] == "9999"
    assert "9999-12-31" in run_command("devices", "--deployment", deployment.folder)


def test_backups_are_made_and_listed(api: Api) -> None:
    made = api.send("POST", "/backups", {"keep": 2})
    assert made["runs"] == [RUN]
    assert [entry["name"] for entry in api.get("/backups")] == [made["name"]]
    assert [entry["act"] for entry in api.get("/audit")] == ["backup"]


def test_slow_disk_of_backups_holds_up_no_other_request(api: Api, tmp_path: Path) -> None:
    slow = tmp_path / "backups/slow.json"
    slow.parent.mkdir()
    os.mkfifo(slow)
    with ThreadPoolExecutor() as pool:
        listed = pool.submit(api.ask, "GET", "/backups")
        try:
            with slow.open("w"):  # it is being read from here on
                assert pool.submit(api.get, "/me").result(WAIT_S)["role"] == "admin"
        finally:
            assert listed.result(WAIT_S).json()["code"] == "FV1632"


def test_clean_up_is_that_of_the_command(api: Api, tmp_path: Path) -> None:
    leftover = tmp_path / "runs" / RUN / ".writing-1"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"x")
    assert [entry["what"] for entry in api.send("POST", "/gc", {"dry_run": True})] == ["file"]
    assert leftover.exists()
    api.send("POST", "/gc")
    assert not leftover.exists()


def test_server_without_deployment_and_backups_names_what_it_lacks(tmp_path: Path) -> None:
    open_record(tmp_path / "runs").close()
    with serve_api(tmp_path / "runs") as api:
        for path in ("/devices", "/backups", "/audit?of=deployment"):
            answer = api.ask("GET", path)
            assert (answer.status_code, answer.json()["code"]) == (404, "FV1816")


def test_body_is_bounded_and_of_known_keys(api: Api) -> None:
    assert api.ask("POST", "/runs", content=b" " * (1 << 21)).status_code == 422
    assert api.ask("POST", "/runs", content=b"{").json()["code"] == "FV1813"
    assert api.ask("POST", "/runs", content=b"[" * 100_000).json()["code"] == "FV1813"
    assert api.ask("POST", "/runs", json={"config": {}, "odd": 1}).json()["code"] == "FV1813"


def test_tokens_are_made_by_an_admin(api: Api) -> None:
    made = api.send("POST", "/tokens", {"name": "ci", "role": "operator", "days": 30})
    me = api.client.get("/api/v1/me", headers={"authorization": f"Bearer {made['token']}"}).json()
    assert (me["name"], me["role"]) == ("ci", "operator")
    listed = {entry["name"]: entry for entry in api.get("/tokens")}
    assert "digest" not in listed["ci"]
    api.send("DELETE", "/tokens/ci")
    assert api.client.get("/api/v1/me", headers={"authorization": f"Bearer {made['token']}"}).status_code == 401
    assert [entry["act"] for entry in api.get("/audit")] == ["token new", "token rm"]


def test_report_is_downloaded(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client that asks for a part, as to go on; no file is left."""
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    answer = api.ask("GET", f"/runs/{RUN}/report", "viewer", headers={"range": "bytes=part"})
    assert not any(made.iterdir())
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert RUN in answer.text
    assert api.ask("GET", f"/runs/{RUN}/bundle").status_code in (400, 404), "it has no tensors"


def test_events_of_a_run_end_with_it(api: Api, store: Record) -> None:
    store.runs.update(RUN, status="finished")
    lines = api.ask("GET", f"/runs/{RUN}/events", "viewer").text.splitlines()
    assert [line for line in lines if line.startswith("event")] == ["event: round", "event: run", "event: end"]
    known = api.ask("GET", f"/runs/{RUN}/events", headers={"last-event-id": "1"}).text
    assert "event: round" not in known


def test_one_user_does_not_hold_all_streams(api: Api, store: Record) -> None:
    store.runs.update(RUN, status="finished")
    api.site.streams.update({object(): "of-viewer" for _ in range(events.MOST_STREAMS_OF_ONE)})
    refused = api.ask("GET", f"/runs/{RUN}/events", "viewer")
    assert refused.status_code == 429
    assert "25 of them for of-viewer" in refused.text
    assert api.ask("GET", f"/runs/{RUN}/events", "operator").status_code == 200
    api.site.streams.popitem()
    assert api.ask("GET", f"/runs/{RUN}/events", "viewer").status_code == 200


def test_events_of_a_long_run_leave_out_no_round(api: Api, store: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's reader asks a question that takes long again only after a while."""

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        return read_rounds(*arguments)

    async def follow() -> list[str]:
        names = list[str]()
        async for event in events._run_events(api.site, RUN, 1):
            if event is not None:
                names.append(event.decode().split()[1])
            elif store.runs.read(RUN).status != "finished":
                store.rounds.close(RUN, 2, SavedState({}, None, {}), {})
                store.runs.update(RUN, status="finished")
        return names

    monkeypatch.setattr(events, "EVERY_S", 0.01)
    monkeypatch.setattr(events, "read_rounds", read_slowly)
    assert asyncio.run(follow()) == ["run", "round", "run", "end"]
