"""The ledger: a line for each thing that left, on the disk before it is sent, and once also after kill -9."""

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.storage import ledger as module
from edge_client.storage.ledger import DAY_S, LEDGER_FILE, OLD_FILE, Ledger, describe_sent, sum_lines
from fedvit.errors import StorageFailed
from fedvit.program import Program
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Hello, Manifest, ModelReport, Result, Task, TaskKind
from tests.support.agents import PROFILE, World
from tests.support.settings import Setting


def result(number: int = 1, kind: TaskKind = "train", size: int = 86_000, digest: str = "blake3:aa") -> Result:
    upload = Manifest(digest, size, 1024) if kind == "train" else None
    return Result("run", number, kind, 12, {"loss": 1.0}, ResourceUse(), upload, task="id")


def task(run: str = "run") -> Task:
    return Task("i", 1, run, 1, "train", 0, "blake3:00", {}, (), 60.0)


def test_update_features_evaluation_and_refusal_have_their_lines(
    tmp_path: Path, fedavg: Setting, eftvit: Setting
) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_result(result(), fedavg.program)
    ledger.note_result(result(2, digest="blake3:bb"), eftvit.program)
    ledger.note_result(result(2, "evaluate"), fedavg.program)
    ledger.note_log(task(), "one\ntwo")
    ledger.note_refusal(task(), "policy: \N{ESCAPE}[2J")
    update, features, tested, log, refused = ledger.read()
    assert (update.kind, update.form, update.bytes, update.left_out) == ("update", "single", 86_000, None)
    assert update.what.startswith("44 tensors: blocks.0.attn.proj.bias 32, ")
    assert update.what.endswith(", and 40 more")
    assert (features.kind, features.form, features.left_out) == ("features", "", 0.5)
    assert (tested.kind, tested.what, log.what, log.bytes) == ("evaluation counts", "12 images, loss", "2 lines", 7)
    assert (refused.kind, refused.bytes) == ("refused", 0)
    assert describe_sent(sum_lines(ledger.read())) == (
        "sent 1 update of 86 kB (single) and 1 feature upload of 86 kB and 1 evaluation; no image; 1 task refused"
    )
    assert describe_sent(sum_lines([])) == "sent nothing; no image, no feature; 0 tasks refused"
    assert (tmp_path / LEDGER_FILE).stat().st_mode & 0o077 == 0


def test_a_result_has_one_line_however_often_it_is_sent(tmp_path: Path, fedavg: Setting) -> None:
    for _ in range(3):  # processes
        ledger = Ledger(tmp_path)
        for _ in range(2):
            assert ledger.note_result(result(), fedavg.program) == result()
        assert ledger.has(result())
    ledger.note_result(result(digest="blake3:cc"), None)  # the round was repeated with other images
    assert [line.bytes for line in ledger.read()] == [86_000, 86_000]


def test_hello_is_noted_when_its_numbers_change(tmp_path: Path) -> None:
    hello = Hello("i", "1", PROFILE, ("bee", "fly"), 20, 4)
    for _ in range(2):
        ledger = Ledger(tmp_path)
        ledger.note_hello(hello)
    ledger.note_hello(msgspec.structs.replace(hello, train_samples=21))
    assert [line.what for line in ledger.read()] == [
        "20 + 4 images, 2 classes: bee, fly",
        "21 + 4 images, 2 classes: bee, fly",
    ]


def test_a_torn_line_is_passed_over_and_ended(tmp_path: Path) -> None:
    Ledger(tmp_path).note_refusal(task(), "one")
    with (tmp_path / LEDGER_FILE).open("ab") as file:
        file.write(b'{"time_s":1.0,"kind":"upd')
    Ledger(tmp_path).note_refusal(task(), "two")
    assert [line.reason for line in Ledger(tmp_path).read()] == ["one", "two"]


def test_a_line_with_a_flipped_bit_is_passed_over(tmp_path: Path) -> None:
    """Also one that is no UTF-8 any more."""
    for reason in ("one", "two"):
        Ledger(tmp_path).note_refusal(task(), reason)
    file = tmp_path / LEDGER_FILE
    file.write_bytes(file.read_bytes().replace(b"one", b"\xefne"))
    Ledger(tmp_path).note_refusal(task(), "three")
    assert [line.reason for line in Ledger(tmp_path).read()] == ["two", "three"]


@pytest.mark.parametrize("failing", ["rb", "r+b"])
def test_lines_that_could_not_be_read_once_count_and_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    for number in (1, 2):
        Ledger(tmp_path).note_result(result(number, size=75), None)
    opened = Path.open

    def fail_once(path: Path, mode: str) -> IO[Any]:
        if mode != failing:
            return opened(path, mode)
        monkeypatch.undo()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ledger = Ledger(tmp_path)
    monkeypatch.setattr(Path, "open", fail_once)
    with pytest.raises(StorageFailed, match="Input/output error"):
        ledger.wait_s(75, 200)
    assert ledger.wait_s(75, 200) > 0
    assert ledger.wait_s(50, 200) == 0
    ledger.note_result(result(2, size=75), None)
    assert len(list(ledger.read())) == 2


def test_two_files_bound_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    ledger = Ledger(tmp_path)
    for number in range(100):
        ledger.note_result(result(number, "evaluate"), None)
    assert {path.name for path in tmp_path.iterdir()} == {LEDGER_FILE, OLD_FILE}
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert [line.round for line in ledger.read()][-1] == 99


def test_lines_that_a_coordinator_can_cause_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_A_DAY", 3)
    for start in range(2):
        ledger = Ledger(tmp_path)
        noted = []
        for number in range(5):
            ledger.note_refusal(task(), "no" * 1000)
            noted.append(ledger.note_log(task(), "one\ntwo"))
            ledger.note_models(ModelReport("i", {}, answered=number))
        assert noted == [start == 0] * 3 + [False] * 2
    counts = Counter(line.kind for line in ledger.read())
    assert counts == {"refused": 3, "failure log": 3, "model counts": 3}
    assert {len(line.reason) for line in ledger.read() if line.kind == "refused"} == {module.MAX_TEXT}


def test_room_of_a_day_comes_back_as_its_results_grow_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    ledger = Ledger(tmp_path)
    for number in range(3):
        ledger.note_result(result(number, size=40), None)
        clock[0] += 100
    assert ledger.wait_s(0, 100) == DAY_S - 300  # 120 bytes were sent
    assert ledger.wait_s(40, 160) == 0
    assert ledger.wait_s(60, 100) == DAY_S - 200
    assert ledger.wait_s(101, 100) == math.inf
    clock[0] += DAY_S
    assert Ledger(tmp_path).wait_s(100, 100) == 0


def test_disk_that_is_full_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_refusal(task(), "one")
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, raw: write(handle, raw[:5]))
    with pytest.raises(StorageFailed):
        ledger.note_result(result(), None)
    monkeypatch.undo()
    assert not ledger.has(result())
    assert [line.reason for line in Ledger(tmp_path).read()] == ["one"]


def test_a_line_survives_kill_9(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from edge_client.storage.ledger import Ledger
        from fedvit.resources import ResourceUse
        from fedvit.wire.messages import Manifest, Result
        upload = Manifest("blake3:aa", 86000, 1024)
        result = Result("run", 1, "train", 12, {{"loss": 1.0}}, ResourceUse(), upload, task="id")
        Ledger(Path({str(tmp_path)!r})).note_result(result, None)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
        assert done.returncode == -9
    assert [line.kind for line in Ledger(tmp_path).read()] == ["update"]


def test_agent_writes_the_line_before_the_result_is_sent(world: World, fedavg: Setting) -> None:
    """Also for a result that a process stored before it was killed: without its line, the next one adds it."""
    world.device()
    sent = world.result(fedavg)
    ledger = Ledger(world.state)
    sent_lines = [line for line in ledger.read() if line.run != "mark"]  # a mark is a task that cannot be done
    assert [line.kind for line in sent_lines] == ["hello counts", "update"]
    assert sent_lines[1].key.endswith(str(sent.upload and sent.upload.digest))
    world.stop()
    lines = (world.state / LEDGER_FILE).read_bytes().splitlines(keepends=True)
    (world.state / LEDGER_FILE).write_bytes(lines[0])
    for _ in range(2):
        device = world.device()
        assert world.server.expect(Result).upload == sent.upload
        device.stop()
    assert [line.kind for line in ledger.read() if line.run != "mark"] == ["hello counts", "update"]


def test_command_lists_lines_for_people_and_programs(tmp_path: Path, fedavg: Program) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_result(result(), None)
    ledger.note_refusal(task("a\N{ESCAPE}[2J"), "policy: no")
    shown = CliRunner().invoke(cli, ["ledger", "--state", str(tmp_path)])
    assert len(shown.output.splitlines()) == 2
    assert "86 kB" in shown.output
    assert "\N{ESCAPE}" not in shown.output
    listed = CliRunner().invoke(cli, ["ledger", "--state", str(tmp_path), "--json", "--since", "1h"])
    assert [line["kind"] for line in json.loads(listed.output)] == ["update", "refused"]
    later = CliRunner().invoke(cli, ["ledger", "--state", str(tmp_path), "--json", "--since", "2999-01-01"])
    assert json.loads(later.output) == []
    wrong = CliRunner().invoke(cli, ["ledger", "--state", str(tmp_path), "--since", "soon"])
    assert wrong.exit_code != 0
