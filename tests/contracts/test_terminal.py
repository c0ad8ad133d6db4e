"""No program lets a peer, a record or a file name control the operator's terminal, whichever command prints it."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from PIL import Image

from coordinator.record import tables
from coordinator.record.liveness import STATUS_FILE
from coordinator.record.record import open_record
from coordinator.record.tables import Announced, DeviceLog, ModelRecord, RefusalRecord, SavedState, now
from coordinator.rounds.service.status import MemberStatus, ServiceStatus, write_service_status
from coordinator.rounds.status import MEMBERS, AtWork, LiveStatus, Member
from coordinator.security.folder import Deployment
from coordinator.security.registry import Certificate
from edge_client.health import status as device_status
from edge_client.storage.ledger import Ledger
from edge_client.storage.models import DeviceModel, DeviceModels, ModelList
from edge_client.storage.serving import ServingStatus, write_serving
from edge_client.storage.state import status_file
from fedvit import command_line
from fedvit.resources import ResourceUse
from fedvit.wire.messages import ClassCount, Result, Task
from tests.support.command_lines import PROGRAMS

ATTACK = "x\x1b[2J\x1b]0;owned\x07\x1b]8;;file:a\x1b\\\x9b31m\x85\x7f\r\u061c\u200e\u202e\u2066\u2028\u2029[red]"
"""A text that clears the screen, sets its title and a link, and turns the direction of text."""
IN_FILE = ATTACK.encode().decode("utf-8", "surrogateescape") + "\udcff"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

LINES: dict[str, list[list[str]]] = {
    "coordinator adopt": [["--deployment", "no {attack}"]],
    "coordinator audit": [["--runs", "runs"], ["--runs", "runs", "--json"], ["--runs", "{attack}"]],
    "coordinator backup": [["{attack}", "--runs", "{attack}"]],
    "coordinator boards": [["{attack}"]],
    "coordinator bugreport": [["--runs", "runs", "--out", "{attack}"]],
    "coordinator cancel": [["{attack}", "--runs", "spare"], ["{attack}", "--runs", "spare", "--json"]],
    "coordinator dashboard": [["--runs", "{attack}"]],
    "coordinator devices": [
        ["--deployment", "deployment"],
        ["--deployment", "deployment", "--runs", "runs"],
        ["--deployment", "deployment", "--runs", "runs", "--json"],
    ],
    "coordinator enroll": [["{attack}", "--deployment", "deployment"]],
    "coordinator evaluate": [["{attack}", "--runs", "runs"]],
    "coordinator export": [["{attack}", "--runs", "runs", "--out", "bundle"]],
    "coordinator gc": [["--runs", "{attack}"]],
    "coordinator init": [["{attack}"]],
    "coordinator label": [["{attack}", "--runs", "runs"], ["{attack}", "--runs", "runs", "--json"]],
    "coordinator logs": [["{attack}", "--runs", "runs"], ["{attack}", "--runs", "runs", "--json"]],
    "coordinator methods": [["--method", "{attack}"]],
    "coordinator pause": [["{attack}", "--runs", "spare"], ["{attack}", "--runs", "spare", "--json"]],
    "coordinator models": [
        ["--runs", "runs"],
        ["--runs", "runs", "--json"],
        ["promote", "{attack}", "--where", "{attack}", "--runs", "spare"],
        ["rollback", "{attack}", "--runs", "spare"],
        ["retire", "{attack}", "--runs", "spare"],
    ],
    "coordinator plan": [["--run", "{attack}", "--runs", "runs", "--device", "rpi5-8"]],
    "coordinator profile": [["--device", "rpi5-8", "--method", "{attack}"]],
    "coordinator quarantine": [
        ["{attack}", "--runs", "runs"],
        ["{attack}", "--runs", "runs", "--json"],
        ["{attack}", "--runs", "runs", "--release", "{attack}"],
    ],
    "coordinator release": [["{attack}", "{attack}.zip", "--key", "{attack}"]],
    "coordinator renew": [["--deployment", "no {attack}"]],
    "coordinator report": [["{attack}", "--runs", "runs"], ["{attack}", "--runs", "runs", "--json"]],
    "coordinator restore": [["{attack}", "--runs", "new"]],
    "coordinator retry": [["{attack}", "--runs", "spare"]],
    "coordinator revoke": [["{attack}", "--deployment", "deployment"]],
    "coordinator rm": [["{attack}", "--runs", "spare"]],
    "coordinator rotate-authority": [["--deployment", "no {attack}"], ["--within", "{attack}"]],
    "coordinator runs": [["--runs", "runs"], ["--runs", "runs", "--json"]],
    "coordinator serve": [["--runs", "runs", "--config", "{attack}"]],
    "coordinator show": [["{attack}", "--runs", "runs", *flags] for flags in ([], ["--json"], ["--track"])],
    "coordinator sign": [["{attack}", "{attack}"], ["{attack}", "--new"]],
    "coordinator start": [["--runs", "runs", "--resume", "no {attack}"], ["--config", "{attack}"]],
    "coordinator status": [
        ["{attack}", "--runs", "runs"],
        ["{attack}", "--runs", "runs", "--json"],
        ["--runs", "served"],
        ["--runs", "served", "--json"],
    ],
    "coordinator submit": [["{attack}", "--runs", "runs"]],
    "coordinator token": [["new", "{attack}", "--runs", "spare"], ["list", "--runs", "{attack}"]],
    "coordinator unpause": [["{attack}", "--runs", "spare"]],
    "coordinator trace": [["{attack}.1", "--runs", "runs"], ["{attack}.1", "--runs", "runs", "--json"]],
    "coordinator wait": [["{attack}", "--runs", "runs", "--timeout", "0.1s"]],
    "edge-client bugreport": [["--broker", "127.0.0.1:1", "--state", "state", "--out", "{attack}"]],
    "edge-client certify": [["--check", "{attack}"]],
    "edge-client doctor": [
        ["--data", "images", "--state", "state"],
        ["--data", "images", "--state", "state", "--json"],
    ],
    "edge-client export": [["run", "--data", "images", "--state", "{attack}"]],
    "edge-client gc": [["--data", "images", "--state", "{attack}"]],
    "edge-client home": [["--home", "{attack}", "--state", "state"]],
    "edge-client join": [["fedvit1-", "{attack}"]],
    "edge-client label": [["--data", "nothing{attack}", "--state", "state"]],
    "edge-client ledger": [["--state", "state"], ["--state", "state", "--json"]],
    "edge-client models": [
        ["--state", "state"],
        ["--state", "state", "--json"],
        ["promote", "{attack}", "--state", "state"],
    ],
    "edge-client page": [["--data", "images", "--listen", "{attack}"]],
    "edge-client predict": [["images", "--bundle", "{attack}"]],
    "edge-client profile": [["{attack}"]],
    "edge-client rm": [["run", "--data", "images", "--state", "{attack}"]],
    "edge-client serve": [["--state", "state", "--listen", "{attack}"]],
    "edge-client status": [
        ["--data", "images", "--state", "state"],
        ["--data", "images", "--state", "state", "--json"],
    ],
    "edge-client update": [["--update-key", "{attack}"]],
    "fleet bugreport": [["--runs", "runs", "--out", "{attack}"]],
    "fleet contracts": [["{attack}"]],
    "fleet demo": [["--method", "{attack}"]],
    "fleet experiment": [["{attack}"]],
    "fleet host": [["--parts", "{attack}", "--devices", "1", "--state", "hosted", "--broker", "{attack}"]],
    "fleet partition": [
        ["--dataset", "images", "--devices", "2", "--partition", "iid", "--out", "{attack}"],
        ["--dataset", "images", "--devices", "2", "--partition", "iid", "--out", "parts", "--json"],
    ],
    "fleet region": [["--config", "{attack}", "--state", "region", "--centre", "{attack}"]],
    "fleet results": [["{attack}"]],
    "fleet run": [["--parts", "{attack}"]],
    **{f"{program} explain": [["{attack}"]] for program in ("coordinator", "edge-client", "fleet")},
}
"""Calls of every command that make it print a foreign text; `{attack}` stands for one."""


def commands() -> set[str]:
    """Names of all commands that the programs show."""
    found = set()
    for program, group in PROGRAMS.items():
        context = click.Context(group, info_name=program)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None and not command.hidden:
                found.add(f"{program} {name}")
    return found


def _record(folder: Path) -> None:
    """A record in which every text that a device, a file or an error can bring is an attack."""
    store = open_record(folder)
    for name in ("older", ATTACK):
        store.runs.create(name, {"method": "fedavg", "model": ATTACK, "rounds": 3})
        store.runs.update(name, status="failed", classes=[ATTACK, "bee"], protocol=ATTACK, reason=ATTACK)
        store.rounds.open(name, 1, [ATTACK, "pi"])
        use = ResourceUse(train_s=1.0, step_s=0.1, peak_rss_bytes=10**6, energy_source=ATTACK)
        counts = (ClassCount(0, 1, 2), ClassCount(1, 1, 2))
        store.tasks.add_results([(ATTACK, Result(name, 1, "train", 10, {"loss": 1.0, ATTACK: 1.0}, use), None)])
        store.rounds.close(name, 1, SavedState({}, None, {}), {"devices_s": 1.0, "server_s": 1.0})
        answer = Result(name, 1, "evaluate", 4, {"correct": 2.0}, use, by_class=counts)
        store.tasks.add_results([(ATTACK, answer, None)])
        store.rounds.close_evaluation(name, 1)
        store.devices.set_announced(name, {ATTACK: Announced(ATTACK, (ATTACK,))})
        store.audit.add("label", ATTACK, ATTACK)
        store.devices.add_refusal(name, RefusalRecord(1, ATTACK, "train", ATTACK))
        store.strikes.add(name, 1, ATTACK, ATTACK)
        store.strikes.add_quarantine(name, ATTACK, 1, None, ATTACK)
        store.devices.add_log(
            DeviceLog(name, 1, ATTACK, "train", ATTACK, "2026-01-02T03:04:05+00:00", f"{ATTACK}\n{ATTACK}")
        )
    store.devices.set_label(ATTACK, ATTACK, ATTACK)
    model = ModelRecord(
        name=ATTACK, run=ATTACK, round=1, method=ATTACK, classes=2, created_at=now(), stage="canary", rules={},
        reason=ATTACK, changed_at=now(),
    )  # fmt: skip
    on_device = tables.DeviceModelRecord(
        model=ATTACK, device=ATTACK, labels={ATTACK: ATTACK}, actual="canary", reason=ATTACK
    )
    store.models.add(model, [on_device])
    store.close()
    at = datetime.now(UTC).isoformat(timespec="seconds")
    run = folder / ATTACK
    run.mkdir()
    (run / "models").mkdir()
    (run / IN_FILE).write_bytes(b"left over")
    awaited = AtWork(
        device=ATTACK, round=1, kind="train", state="working", done_steps=3, total_steps=40, since=at, until=at
    )
    status = LiveStatus(at=at, doing=ATTACK, waiting_for=[awaited], backing_off=[], online=1)
    (run / STATUS_FILE).write_bytes(msgspec.json.encode(status))
    member = Member(
        device=ATTACK, online=True, seen=at, since=at, board=ATTACK, host=ATTACK, machine=ATTACK, cores=4, ram_bytes=1,
        memory_budget_bytes=1, software=ATTACK, labels={ATTACK: ATTACK},
    )  # fmt: skip
    (run / MEMBERS).write_bytes(msgspec.json.encode([member]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, a deployment, and a device's images and state, all full of attacks."""
    tmp_path = tmp_path_factory.mktemp("world")
    _record(tmp_path / "runs")
    with open_record(tmp_path / "spare") as spare:
        spare.runs.create(ATTACK, {"method": "fedavg"})
    with open_record(tmp_path / "served") as served:
        served.runs.submit(ATTACK, {"method": "fedavg"})
    made = CliRunner().invoke(PROGRAMS["coordinator"], ["init", str(tmp_path / "deployment"), "--port", "0"])
    assert made.exit_code == 0, made.output
    with Deployment.open(tmp_path / "deployment").registry.change() as rows:
        rows.put_device(ATTACK, Certificate("1f", 0.0, 2e9), 1.7e9)
    member = MemberStatus(device=ATTACK, online=True, labels={ATTACK: ATTACK}, run=ATTACK)
    status = ServiceStatus(federation=ATTACK, broker=ATTACK, running=[ATTACK], members=[member])
    write_service_status(tmp_path / "served", status)
    for name in ("bee", ATTACK):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{IN_FILE}.png").write_bytes(b"no picture")
    (tmp_path / "images" / "unlabelled").mkdir()
    (tmp_path / "images" / "unlabelled" / f"{IN_FILE}.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "unlabelled" / f"{IN_FILE}2.png")
    doing = device_status.Doing(
        state=ATTACK, run=ATTACK, round=1,
        last=device_status.LastTask(
            run=ATTACK, round=1, kind="train", outcome=ATTACK, metrics={ATTACK: 1.0}, ended_s=1.0
        ),
        last_error=device_status.LastError(what=ATTACK, at_s=1.0),
        classes={ATTACK: device_status.ClassImages(1, 2)},
        unusable={ATTACK: device_status.Unusable(1, (ATTACK,))},
    )  # fmt: skip
    shown = device_status.Status(
        device=ATTACK, federation=ATTACK, broker=ATTACK, software=ATTACK, process=1, started_s=1.0, written_s=1.0,
        doing=doing, rss_bytes=1, peak_rss_bytes=1, memory_budget_bytes=1,
    )  # fmt: skip
    (tmp_path / "state").mkdir()
    Ledger(tmp_path / "state").note_refusal(Task("i", 1, ATTACK, 1, "train", 0, "d", {}, (), 1.0), ATTACK)
    status_file(tmp_path / "state").write_bytes(msgspec.json.encode(shown))
    model = DeviceModel(run="run", round=1, method=ATTACK, state="champion", changed_s=1.0, reason=ATTACK)
    models = DeviceModels(tmp_path / "state")
    models.new_folder()
    models.file.write_bytes(msgspec.json.encode(ModelList(models=(model,), withdrawn={ATTACK: ATTACK})))
    write_serving(tmp_path / "state", ServingStatus(name=ATTACK, drift={ATTACK: 1.0}, trouble=ATTACK))
    return tmp_path


def _call(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What a program writes to standard output and standard error, as bytes of UTF-8 that nothing has changed."""
    contents = [io.BytesIO(), io.BytesIO()]
    streams = [io.TextIOWrapper(content, "utf-8", errors="surrogatepass", write_through=True) for content in contents]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        patch.setattr(sys, "argv", [program, *words])
        with suppress(SystemExit):
            command_line.run(PROGRAMS[program], program)
    out, errors = (content.getvalue().decode("utf-8", "surrogatepass") for content in contents)
    return out, errors


def test_every_command_is_called() -> None:
    assert LINES.keys() == commands()


@pytest.mark.parametrize("name", sorted(LINES))
def test_no_text_of_a_peer_controls_the_terminal(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, command = name.split()
    monkeypatch.chdir(world)
    for line in LINES[name]:
        words = [word.replace("{attack}", ATTACK) for word in line]
        out, errors = _call(program, [command, *words], monkeypatch)
        assert "Traceback" not in errors, errors
        for text in (out, errors):
            assert not RAW.findall(text), ascii(text)
        assert re.search(r"\\(x|u00)1b", out + errors), f"{name} {line} printed no foreign text: {out}{errors}"
        if "--json" in line and out:
            assert ATTACK in _strings(json.loads(out)), out


def _strings(value: object) -> str:
    """All texts of a JSON document in one."""
    if isinstance(value, dict):
        return "".join(f"{name}{_strings(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "".join(map(_strings, value))
    return str(value)


@pytest.mark.parametrize("program", ["coordinator", "edge-client", "fleet"])
def test_programs_print_their_completion(program: str) -> None:
    """click writes it as bytes."""
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    done = subprocess.run(
        [Path(sys.executable).parent / program],
        env={**os.environ, variable: "bash_source"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"complete -o nosort -F _{program.replace('-', '_')}_completion {program}" in done.stdout
