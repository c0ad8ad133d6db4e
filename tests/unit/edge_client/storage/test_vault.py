"""The vault holds the whole old state or the whole new one, whatever happens."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.repair import repair_all, repair_run
from edge_client.storage.vault import Vault
from fedvit import blobs as blobs_module
from fedvit.errors import BadPayload, StorageFailed
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors
from fedvit.wire.messages import Manifest, Result, Task
from tests.support import messages
from tests.support.damage import flip

RUN = "run"

ACCIDENTS = """
# For n = 0, 1, ...: in a copy of the vault BASE, commit round 2 and let an accident happen at the n-th
# system call that changes or syncs something, until a commit ends without one. A line of JSON each.
import json, os, pathlib, shutil, signal, sys
import numpy as np
from edge_client.storage.vault import Vault
from fedvit.errors import StorageFailed
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result

accident, base, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])

def arm(calls_left):
    def guard(name):
        real = getattr(os, name)
        def call(*arguments, **keywords):
            nonlocal calls_left
            calls_left -= 1
            if calls_left == -1 and accident == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if calls_left == -1:
                raise OSError(5, f"made to fail: {name}")
            return real(*arguments, **keywords)
        setattr(os, name, call)
    for name in ("open", "mkdir", "fsync", "replace", "link", "unlink", "rmdir"):
        guard(name)
    return lambda: calls_left >= 0

for number in range(200):
    folder = out / str(number)
    shutil.copytree(base, folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        report = "committed"
        passed = arm(number)
        try:
            vault, new = Vault(folder), {"w": np.full(4, 2, np.float32)}
            vault.commit(Result("run", 2, "train", 5, {"loss": 0.5}, ResourceUse()), new, new, vault.residual("run"))
        except StorageFailed as error:
            report = str(error)
        except BaseException as error:
            report = f"raised {type(error).__name__}: {error}"
        os.write(writer, json.dumps([report, passed()]).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 10000)
    os.close(reader)
    report, untouched = json.loads(said) if said else (f"signal {os.WTERMSIG(status)}", False)
    print(json.dumps({"folder": str(folder), "report": report, "untouched": untouched}), flush=True)
    if untouched:
        break
"""

DISK_FULL = """
# Nobody may write a file of more than 2000 bytes; then commit 100 kB of personal tensors.
import pathlib, resource, sys
import numpy as np
from edge_client.storage.vault import Vault
from fedvit.errors import StorageFailed
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result

resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    result = Result("run", 2, "train", 5, {"loss": 0.5}, ResourceUse())
    Vault(pathlib.Path(sys.argv[1])).commit(result, {"w": np.zeros(25_000, np.float32)})
except StorageFailed as error:
    print(error)
"""


def result(number: int, run: str = RUN) -> Result:
    upload = Manifest("blake3:" + "ab" * 32, 1234, 126_976)
    return messages.result(number, run=run, use=ResourceUse(train_s=1.5, steps=3), upload=upload)


def personal(value: float) -> Tensors:
    return {"w": np.full(4, value, np.float32)}


def content(vault: Vault, run: str = RUN) -> tuple[int, float | None, list[tuple[str, int]]]:
    """(round, the personal tensors' value, what is not acknowledged)."""
    local = vault.local(run)
    value = None if local is None else float(local["w"][0])
    return vault.round_of(run), value, [(pending.run, pending.round) for pending in vault.pending()]


def folders(vault: Vault, run: str = RUN) -> list[Path]:
    return list((vault.folder / run).glob("round-*"))


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault")


def test_a_new_vault_is_empty(vault: Vault) -> None:
    assert content(vault) == (0, None, [])


def test_what_is_committed_comes_back_after_a_restart(vault: Vault) -> None:
    vault.commit(result(3), {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int64)})
    again = Vault(vault.folder)
    assert again.round_of(RUN) == 3
    local = again.local(RUN)
    assert local is not None
    assert {name: (value.shape, value.dtype.name) for name, value in local.items()} == {
        "a.weight": ((2, 3), "float32"),
        "b": ((), "int64"),
    }
    np.testing.assert_array_equal(local["a.weight"], [[0, 1, 2], [3, 4, 5]])
    assert again.pending() == [result(3)]


def test_a_method_without_personal_tensors_keeps_its_result(vault: Vault) -> None:
    vault.commit(result(1), {})
    assert vault.local(RUN) == {}
    assert vault.pending() == [result(1)]


def test_an_acknowledged_result_is_settled_and_the_personal_tensors_stay(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    vault.settle(RUN, 1)
    vault.settle(RUN, 1)
    assert content(Vault(vault.folder)) == (1, 1, [])


def test_settling_another_round_or_run_changes_nothing(vault: Vault) -> None:
    vault.commit(result(2), personal(1))
    vault.settle(RUN, 1)
    vault.settle("other", 2)
    assert content(vault) == (2, 1, [(RUN, 2)])


def test_a_commit_replaces_the_round_before_and_keeps_it_beside_the_new_one(vault: Vault) -> None:
    for number in (1, 2, 3):
        vault.commit(result(number), personal(number))
        assert content(vault) == (number, number, [(RUN, number)])
    assert sorted(folder.name[:8] for folder in folders(vault)) == ["round-2-", "round-3-"]


def test_a_round_may_be_done_again(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    vault.settle(RUN, 1)
    vault.commit(result(1), personal(5))
    assert content(vault) == (1, 5, [(RUN, 1)])


def test_two_runs_lie_side_by_side(vault: Vault) -> None:
    vault.commit(result(1, "a"), personal(1))
    vault.commit(result(7, "b"), personal(2))
    assert content(vault, "a") == (1, 1, [("a", 1), ("b", 7)])
    vault.settle("a", 1)
    vault.commit(result(8, "b"), personal(3))
    assert content(vault, "a") == (1, 1, [("b", 8)])
    assert content(vault, "b") == (8, 3, [("b", 8)])


@pytest.mark.parametrize("accident", ["kill", "fail"])
def test_an_accident_at_any_point_leaves_the_old_state_or_the_new(tmp_path: Path, accident: str) -> None:
    """kill -9, or an error of the disk, at each system call of a commit in turn."""
    base = Vault(tmp_path / "base")
    base.commit(result(1), personal(1), personal(5))
    base.settle(RUN, 1)
    base.commit(result(1), personal(1), personal(1), base.residual(RUN))
    before, after = (1, 1, [(RUN, 1)]), (2, 2, [(RUN, 2)])
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ACCIDENTS, accident, str(base.folder), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    assert lines[-1]["untouched"], done.stderr
    assert lines[-1]["report"] == "committed"
    seen = []
    for line in lines:
        vault, report = Vault(Path(line["folder"])), line["report"]
        found = content(vault)
        seen.append(found)
        assert found in (before, after), line
        if accident == "kill":
            assert report in ("signal 9", "committed")
        else:
            assert report == "committed" or report.startswith("cannot write "), line
        if report == "committed":
            assert found == after, line
        assert residual(vault) == {"w": 5}, "nothing was accepted since"
        vault.settle(RUN, found[0])
        assert residual(vault) == {"w": found[0]}
        # and the vault goes on from there, without anything left over
        vault.commit(result(3), personal(3))
        assert content(vault) == (3, 3, [(RUN, 3)])
        assert sorted(folder.name[:8] for folder in folders(vault)) == [f"round-{found[0]}-", "round-3-"]
        assert repair_run(vault, RUN) == []
    if accident == "kill":
        assert seen == sorted(seen), "once the new state is there, it stays"
    assert seen.count(before) >= 12, "four files, each of them opened, synced and renamed"


def test_a_full_disk_is_named_and_the_old_state_stands(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    before = sorted(vault.folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(vault.folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"cannot write {vault.folder / RUN / 'round-2-'}"), done.stderr
    assert "File too large" in done.stdout
    assert content(vault) == (1, 1, [(RUN, 1)])
    assert sorted(vault.folder.rglob("*")) == before


def test_a_missing_round_folder_is_named(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    [folder] = folders(vault)
    folder.rename(vault.folder.parent / "moved")
    for ask in (lambda: vault.local(RUN), lambda: vault.pending(), lambda: vault.round_of(RUN)):
        with pytest.raises(StorageFailed, match=folder.name):
            ask()


@pytest.mark.parametrize("file", ["local.safetensors", "result.msgpack"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(vault: Vault, file: str, damage: str) -> None:
    vault.commit(result(1), personal(1))
    [path] = vault.folder.rglob(file)
    path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"nonsense")
    with pytest.raises(StorageFailed, match=file):
        vault.local(RUN) if file.startswith("local") else vault.pending()


def test_a_vault_that_cannot_be_read_is_named(vault: Vault) -> None:
    vault.folder.mkdir()
    (vault.folder / RUN).write_text("in the way")
    with pytest.raises(StorageFailed, match=str(vault.folder / RUN)):
        vault.local(RUN)
    with pytest.raises(StorageFailed, match=str(vault.folder / RUN)):
        vault.commit(result(1), personal(1))


@pytest.mark.parametrize("run", ["..", "../../elsewhere", "/elsewhere", "a/b", "", "-rf"])
def test_a_run_whose_name_leads_elsewhere_is_refused(vault: Vault, run: str) -> None:
    """The name comes from the network."""
    with pytest.raises(BadPayload, match="run"):
        vault.local(run)
    with pytest.raises(BadPayload, match="run"):
        vault.commit(result(1, run), personal(1))
    assert not vault.folder.exists()


# --- notes --------------------------------------------------------------------------------------------


def task(number: int, run: str = RUN) -> Task:
    groups = {"model": "blake3:" + "cd" * 32}
    program = "blake3:" + "ef" * 32
    return Task("instance", 1, run, number, "train", 7, program, groups, (), 60.0, 1.0)


def test_the_newest_task_is_noted(vault: Vault) -> None:
    assert vault.newest_task(RUN) is None
    for number in (1, 2):
        vault.note(task(number))
    noted = Vault(vault.folder).newest_task(RUN)
    assert noted is not None
    assert (noted.run, noted.round, noted.kind, noted.seed) == (RUN, 2, "train", 7)
    assert (noted.program, noted.groups) == (task(2).program, task(2).groups)
    assert content(vault) == (0, None, [])  # a note is no result


def test_runs_are_those_with_a_note_newest_first(vault: Vault) -> None:
    for age_s, run in enumerate(("c", "a", "b")):
        vault.note(task(1, run))
        os.utime(vault.folder / run / "TASK", (1e9 - age_s, 1e9 - age_s))
    vault.commit(result(1, "without"), personal(1.0))
    assert vault.runs() == ["c", "a", "b"]


def test_a_damaged_note_is_named(vault: Vault) -> None:
    vault.note(task(1))
    (vault.folder / RUN / "TASK").write_bytes(b"\xc1")
    with pytest.raises(StorageFailed, match="TASK is damaged"):
        vault.newest_task(RUN)


# --- what coding left out -----------------------------------------------------------------------------


def residual(vault: Vault) -> dict[str, float]:
    return {name: float(value[0]) for name, value in vault.residual(RUN).tensors.items()}


def work(vault: Vault, number: int, left: float) -> None:
    """A round's result, coded with what was owed before."""
    coded = {"w": np.full(3, left, np.float32)}
    vault.commit(result(number), personal(number), coded, vault.residual(RUN))


def test_residual_counts_once_the_result_is_accepted(vault: Vault) -> None:
    assert residual(vault) == {}
    work(vault, 1, 0.5)
    assert residual(vault) == {}, "nobody knows yet whether anything of it was taken"
    vault.settle(RUN, 1, accepted=True)
    assert residual(vault) == {"w": 0.5}


@pytest.mark.parametrize("refused", [True, False])
def test_residual_is_unchanged_after_a_refused_result(vault: Vault, refused: bool) -> None:
    """Late twice, then accepted: what was owed before is carried over, undiminished; also by another process."""
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    for number in (2, 3):
        work(vault, number, 0.25)
        if refused:
            vault.settle(RUN, number, accepted=False)
        assert residual(vault) == residual(Vault(vault.folder)) == {"w": 0.5}
    work(vault, 4, 0.125)
    vault.settle(RUN, 4, accepted=True)
    assert residual(vault) == {"w": 0.125}


def test_a_result_may_leave_nothing(vault: Vault) -> None:
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    vault.commit(result(2), personal(2), {}, vault.residual(RUN))
    vault.settle(RUN, 2, accepted=True)
    assert residual(vault) == {}


def test_a_power_cut_while_a_refusal_is_noted_takes_nothing(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is on disk before the mark of what is pending goes: in between, it is both, and stays owed."""
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    work(vault, 2, 0.25)
    with monkeypatch.context() as patch:

        def cut(*_: object, **__: object) -> None:
            raise OSError(5, "power cut")

        patch.setattr("pathlib.Path.unlink", cut)
        with pytest.raises(StorageFailed):
            vault.settle(RUN, 2, accepted=False)
    assert residual(Vault(vault.folder)) == {"w": 0.5}
    assert [pending.round for pending in vault.pending()] == [2], "it is sent again, and refused again"


def test_where_files_cannot_be_linked_they_are_copied(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr("os.link", no_links)
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    work(vault, 2, 0.25)
    vault.settle(RUN, 2, accepted=False)
    assert residual(vault) == {"w": 0.5}


# --- damage -------------------------------------------------------------------------------------------


def newest(vault: Vault, number: int) -> Path:
    [folder] = (vault.folder / RUN).glob(f"round-{number}-*")
    return folder


@pytest.fixture
def two_rounds(vault: Vault) -> Vault:
    """Round 1 was accepted, round 2 is not acknowledged yet."""
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    work(vault, 2, 0.25)
    return vault


def copies(vault: Vault, file: Path) -> Iterator[tuple[Vault, int]]:
    """The vault with one bit of a file flipped, at 60 places of it; as another process finds it."""
    size = file.stat().st_size
    for place in range(0, size, -(-size // 60)):
        copy = vault.folder.with_name(f"{file.name}-{place}")
        shutil.copytree(vault.folder, copy)
        flipped = copy / file.relative_to(vault.folder)
        raw = bytearray(flipped.read_bytes())
        raw[place] ^= 1 << place % 8
        flipped.write_bytes(raw)
        yield Vault(copy), place


def test_what_is_whole_needs_no_mending(two_rounds: Vault) -> None:
    before = sorted(two_rounds.folder.rglob("*"))
    for vault in (two_rounds, Vault(two_rounds.folder)):
        assert repair_run(vault, RUN) == repair_all(vault) == repair_run(vault, "unknown") == []
    assert sorted(two_rounds.folder.rglob("*")) == before
    assert dict(two_rounds.files()).keys() == {
        file for file in two_rounds.folder.rglob("*") if file.suffix in (".safetensors", ".msgpack")
    }


def test_damaged_personal_tensors_are_those_of_the_round_before(two_rounds: Vault) -> None:
    file = newest(two_rounds, 2) / "local.safetensors"
    flip(file, 0.99)
    vault = Vault(two_rounds.folder)
    with pytest.raises(StorageFailed, match=r"local\.safetensors is damaged"):
        vault.local(RUN)
    [repair] = repair_run(vault, RUN)
    assert str(file) in repair.message
    assert "returns to the tensors of round 1" in repair.message
    assert repair.lost == (RUN, 2)
    assert content(vault) == content(Vault(vault.folder)) == (1, 1, [])
    assert residual(vault) == {"w": 0.5}
    assert repair_run(vault, RUN) == []
    [aside] = (vault.folder / RUN).glob("damaged-*")
    assert (aside / "local.safetensors").is_file(), "personal tensors are not thrown away"
    work(vault, 3, 0.125)
    assert content(Vault(vault.folder)) == (3, 3, [(RUN, 3)])
    flip(newest(vault, 3) / "local.safetensors", 0.99)
    repair_run(Vault(vault.folder), RUN)
    assert [path.name[:15] for path in (vault.folder / RUN).glob("damaged-*")] == ["damaged-round-3"]


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_personal_tensors_that_are_damaged_twice_begin_anew_and_are_kept_aside(two_rounds: Vault, damage: str) -> None:
    files = [newest(two_rounds, number) / "local.safetensors" for number in (1, 2)]
    for file in files:
        flip(file, 0.99) if damage == "flip" else file.unlink()
    vault = Vault(two_rounds.folder)
    [repair] = repair_run(vault, RUN)
    assert all(str(file) in repair.message for file in files)
    assert "are lost, and start from" in repair.message
    assert "from a backup" in repair.message
    assert content(vault) == content(Vault(vault.folder)) == (0, None, [])
    assert repair_run(vault, RUN) == []
    assert len([*(vault.folder / RUN).glob("damaged-*")]) == 2
    work(vault, 3, 0.125)
    assert content(Vault(vault.folder)) == (3, 3, [(RUN, 3)])


def test_a_bit_of_the_sums_leads_back_to_the_round_before(two_rounds: Vault) -> None:
    for vault, place in copies(two_rounds, newest(two_rounds, 2) / "SUMS"):
        [repair] = repair_run(vault, RUN)
        assert "SUMS damaged" in repair.message, place
        assert content(vault) == (1, 1, []), place


def test_a_bit_of_the_name_of_the_newest_round_changes_nothing(two_rounds: Vault) -> None:
    for vault, place in copies(two_rounds, two_rounds.folder / RUN / "CURRENT"):
        [repair] = repair_all(vault)
        assert "CURRENT names no stored round" in repair.message, place
        assert content(vault) == (2, 2, [(RUN, 2)]), place
        assert repair_run(vault, RUN) == []


def test_the_name_of_the_newest_round_may_be_gone(two_rounds: Vault) -> None:
    (two_rounds.folder / RUN / "CURRENT").unlink()
    assert content(two_rounds) == (0, None, [])
    [repair] = repair_run(two_rounds, RUN)
    assert "CURRENT" in repair.message
    assert content(two_rounds) == (2, 2, [(RUN, 2)])


def test_a_bit_of_a_result_loses_it_and_nothing_else(two_rounds: Vault) -> None:
    file = newest(two_rounds, 2) / "result.msgpack"
    for vault, place in copies(two_rounds, file):
        with pytest.raises(StorageFailed, match=r"result\.msgpack is damaged"):
            vault.pending()
        [repair] = repair_all(vault)
        assert repair.lost == (RUN, 2), place
        assert "result of round 2" in repair.message
        assert content(vault) == (2, 2, []), place
        assert residual(vault) == {"w": 0.5}, "as if it had been refused"
        assert repair_run(vault, RUN) == []


def test_a_result_that_was_acknowledged_may_be_damaged(two_rounds: Vault) -> None:
    two_rounds.settle(RUN, 2)
    flip(newest(two_rounds, 2) / "result.msgpack")
    assert repair_run(Vault(two_rounds.folder), RUN) == []


@pytest.mark.parametrize("name", ["left", "owed"])
@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_damaged_feedback_is_not_sent_and_nothing_else_is_lost(two_rounds: Vault, name: str, damage: str) -> None:
    file = newest(two_rounds, 2) / f"{name}.safetensors"
    flip(file, 0.99) if damage == "flip" else file.unlink()
    vault = Vault(two_rounds.folder)
    [repair] = repair_run(vault, RUN)
    assert str(file) in repair.message
    assert content(vault) == (2, 2, [(RUN, 2)])
    vault.settle(RUN, 2, accepted=name == "left")
    assert residual(vault) == {}
    assert repair_run(Vault(vault.folder), RUN) == []


def test_a_bit_of_a_note_is_found(two_rounds: Vault) -> None:
    two_rounds.note(task(2))
    for vault, place in copies(two_rounds, two_rounds.folder / RUN / "TASK"):
        with pytest.raises(StorageFailed, match="TASK is damaged"):
            vault.newest_task(RUN)
        assert repair_run(vault, RUN) == [], place
        vault.note(task(3))
        assert vault.newest_task(RUN) is not None


def test_what_is_settled_late_is_settled_in_the_round_before_too(vault: Vault) -> None:
    """Its acknowledgement came when a newer round was kept already; damage then leads back to it."""
    work(vault, 1, 0.5)
    work(vault, 2, 0.25)
    vault.settle(RUN, 1, accepted=True)
    flip(newest(vault, 2) / "local.safetensors", 0.99)
    again = Vault(vault.folder)
    repair_run(again, RUN)
    assert content(again) == (1, 1, [])
    assert residual(again) == {"w": 0.5}


def test_want_of_something_else_is_no_damage(two_rounds: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files: nothing is gone back to, and nothing is moved."""
    before = sorted(two_rounds.folder.rglob("*"))
    flip(newest(two_rounds, 2) / "local.safetensors")

    def too_many(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    for where in ("os.listdir", "pathlib.Path.read_bytes", "pathlib.Path.read_text", "fedvit.blobs.digest_of_file"):
        with monkeypatch.context() as patch:
            patch.setattr(where, too_many)
            with pytest.raises(StorageFailed, match="too many"):
                repair_run(Vault(two_rounds.folder), RUN)
    assert sorted(two_rounds.folder.rglob("*")) == before


def test_a_medium_that_fails_is_damage(two_rounds: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that ends with an error of input or output: the round before is whole."""
    local, real = newest(two_rounds, 2) / "local.safetensors", blobs_module.digest_of_file

    def failing(path: Path) -> str:
        if path == local:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(blobs_module, "digest_of_file", failing)
    vault = Vault(two_rounds.folder)
    assert "returns to the tensors of round 1" in repair_run(vault, RUN)[0].message
    assert content(vault) == (1, 1, [])
