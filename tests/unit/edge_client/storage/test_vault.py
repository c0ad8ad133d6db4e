"""The vault holds the whole old state or the whole new one, whatever happens."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.repair import repair_run
from edge_client.storage.vault import Vault
from fedvit.errors import BadPayload, StorageFailed
from tests.support.children import run_child
from tests.support.codes import has_code
from tests.support.vaults import RUN, content, personal, residual, result, task, work

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


def folders(vault: Vault, run: str = RUN) -> list[Path]:
    return list((vault.folder / run).glob("round-*"))


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault")


def test_what_is_committed_comes_back_after_a_restart(vault: Vault) -> None:
    assert content(vault) == (0, None, [])
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
    again.commit(result(4), {})
    assert again.local(RUN) == {}


def test_an_acknowledged_result_is_settled_and_the_personal_tensors_stay(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    vault.settle(RUN, 1)
    vault.settle(RUN, 1)
    assert content(Vault(vault.folder)) == (1, 1, [])
    vault.commit(result(1), personal(5))
    assert content(vault) == (1, 5, [(RUN, 1)]), "a round may be done again"


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


def test_two_runs_lie_side_by_side(vault: Vault) -> None:
    vault.commit(result(1, "a"), personal(1))
    vault.commit(result(7, "b"), personal(2))
    assert content(vault, "a") == (1, 1, [("a", 1), ("b", 7)])
    vault.settle("a", 1)
    vault.commit(result(8, "b"), personal(3))
    assert content(vault, "a") == (1, 1, [("b", 8)])
    assert content(vault, "b") == (8, 3, [("b", 8)])


@pytest.mark.parametrize("accident", ["kill", pytest.param("fail", marks=pytest.mark.slow)])
def test_an_accident_at_any_point_leaves_the_old_state_or_the_new(tmp_path: Path, accident: str) -> None:
    """kill -9, or an error of the disk, at each system call of a commit in turn."""
    base = Vault(tmp_path / "base")
    base.commit(result(1), personal(1), personal(5))
    base.settle(RUN, 1)
    base.commit(result(1), personal(1), personal(1), base.residual(RUN))
    before, after = (1, 1, [(RUN, 1)]), (2, 2, [(RUN, 2)])
    (tmp_path / "out").mkdir()
    done = run_child([sys.executable, "-c", ACCIDENTS, accident, str(base.folder), str(tmp_path / "out")])
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
    done = run_child([sys.executable, "-c", DISK_FULL, str(vault.folder)])
    assert done.stdout.startswith(f"cannot write {vault.folder / RUN / 'round-2-'}"), done.stderr
    assert "File too large" in done.stdout
    assert content(vault) == (1, 1, [(RUN, 1)])
    assert sorted(vault.folder.rglob("*")) == before


def test_a_vault_that_cannot_be_read_is_named(vault: Vault) -> None:
    vault.folder.mkdir()
    (vault.folder / RUN).write_text("in the way")
    with pytest.raises(StorageFailed, check=has_code("FV1702", str(vault.folder / RUN))):
        vault.local(RUN)
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(vault.folder / RUN))):
        vault.commit(result(1), personal(1))


@pytest.mark.parametrize("run", ["..", "../../elsewhere", "/elsewhere", "a/b", "", "-rf"])
def test_a_run_whose_name_leads_elsewhere_is_refused(vault: Vault, run: str) -> None:
    """The name comes from the network."""
    with pytest.raises(BadPayload, check=has_code("FV1006", repr(run))):
        vault.local(run)
    with pytest.raises(BadPayload, check=has_code("FV1006", repr(run))):
        vault.commit(result(1, run), personal(1))
    assert not vault.folder.exists()


# --- notes --------------------------------------------------------------------------------------------


def test_the_newest_task_is_noted(vault: Vault) -> None:
    assert vault.notes.find_newest(RUN) is None
    for number in (1, 2):
        vault.notes.write(task(number))
    noted = Vault(vault.folder).notes.find_newest(RUN)
    assert noted is not None
    assert (noted.run, noted.round, noted.kind, noted.seed) == (RUN, 2, "train", 7)
    assert (noted.program, noted.groups) == (task(2).program, task(2).groups)
    assert content(vault) == (0, None, [])  # a note is no result


def test_runs_are_those_with_a_note_newest_first(vault: Vault) -> None:
    for age_s, run in enumerate(("c", "a", "b")):
        vault.notes.write(task(1, run))
        os.utime(vault.folder / run / "TASK", (1e9 - age_s, 1e9 - age_s))
    vault.commit(result(1, "without"), personal(1.0))
    assert vault.notes.list_runs() == ["c", "a", "b"]


def test_a_damaged_note_is_named(vault: Vault) -> None:
    vault.notes.write(task(1))
    (vault.folder / RUN / "TASK").write_bytes(b"\xc1")
    with pytest.raises(StorageFailed, check=has_code("FV1704", "TASK")):
        vault.notes.find_newest(RUN)


# --- what coding left out -----------------------------------------------------------------------------


def test_residual_counts_once_the_result_is_accepted(vault: Vault) -> None:
    assert residual(vault) == {}
    work(vault, 1, 0.5)
    assert residual(vault) == {}, "nobody knows yet whether anything of it was taken"
    vault.settle(RUN, 1, accepted=True)
    assert residual(vault) == {"w": 0.5}
    vault.commit(result(2), personal(2), {}, vault.residual(RUN))
    vault.settle(RUN, 2, accepted=True)
    assert residual(vault) == {}, "a result may leave nothing"


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
