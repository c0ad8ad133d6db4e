"""Repairs of a vault: the round before stands in for damage, and nothing is lost beside it."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.storage.repair import repair_all, repair_run
from edge_client.storage.vault import Vault
from fedvit import blobs as blobs_module
from fedvit.errors import StorageFailed
from tests.support.codes import has_code
from tests.support.damage import flip
from tests.support.power import after_power_cut, recorded, tree, write_tree
from tests.support.vaults import RUN, content, personal, residual, result, round_folder, task, work


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault")


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
    file = round_folder(two_rounds, 2) / "local.safetensors"
    flip(file, 0.99)
    vault = Vault(two_rounds.folder)
    with pytest.raises(StorageFailed, check=has_code("FV1704", "local.safetensors")):
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
    flip(round_folder(vault, 3) / "local.safetensors", 0.99)
    repair_run(Vault(vault.folder), RUN)
    assert [path.name[:15] for path in (vault.folder / RUN).glob("damaged-*")] == ["damaged-round-3"]


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_personal_tensors_that_are_damaged_twice_begin_anew_and_are_kept_aside(two_rounds: Vault, damage: str) -> None:
    files = [round_folder(two_rounds, number) / "local.safetensors" for number in (1, 2)]
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


@pytest.mark.parametrize(
    ("name", "said", "left", "lost"),
    [
        ("round-2-*/SUMS", "SUMS damaged", (1, 1, []), (RUN, 2)),
        ("CURRENT", "CURRENT names no stored round", (2, 2, [(RUN, 2)]), None),
        ("round-2-*/result.msgpack", "result of round 2", (2, 2, []), (RUN, 2)),
    ],
)
def test_a_flipped_bit_anywhere_in_a_file_is_repaired(
    two_rounds: Vault, name: str, said: str, left: object, lost: object
) -> None:
    """The residual is that of round 1, as if round 2 had been refused."""
    [file] = (two_rounds.folder / RUN).glob(name)
    for vault, place in copies(two_rounds, file):
        [repair] = repair_all(vault)
        assert said in repair.message, place
        assert repair.lost == lost, place
        assert content(vault) == left, place
        assert residual(vault) == {"w": 0.5}, place
        assert repair_run(vault, RUN) == [], place


def test_the_name_of_the_newest_round_may_be_gone(two_rounds: Vault) -> None:
    (two_rounds.folder / RUN / "CURRENT").unlink()
    assert content(two_rounds) == (0, None, [])
    [repair] = repair_run(two_rounds, RUN)
    assert "CURRENT" in repair.message
    assert content(two_rounds) == (2, 2, [(RUN, 2)])


def test_a_result_that_was_acknowledged_may_be_damaged(two_rounds: Vault) -> None:
    two_rounds.settle(RUN, 2)
    flip(round_folder(two_rounds, 2) / "result.msgpack")
    assert repair_run(Vault(two_rounds.folder), RUN) == []


@pytest.mark.parametrize("name", ["left", "owed"])
@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_damaged_feedback_is_not_sent_and_nothing_else_is_lost(two_rounds: Vault, name: str, damage: str) -> None:
    file = round_folder(two_rounds, 2) / f"{name}.safetensors"
    flip(file, 0.99) if damage == "flip" else file.unlink()
    vault = Vault(two_rounds.folder)
    [repair] = repair_run(vault, RUN)
    assert str(file) in repair.message
    assert content(vault) == (2, 2, [(RUN, 2)])
    vault.settle(RUN, 2, accepted=name == "left")
    assert residual(vault) == {}
    assert repair_run(Vault(vault.folder), RUN) == []


def test_a_bit_of_a_note_is_found(two_rounds: Vault) -> None:
    two_rounds.notes.write(task(2))
    for vault, place in copies(two_rounds, two_rounds.folder / RUN / "TASK"):
        with pytest.raises(StorageFailed, check=has_code("FV1704", "TASK")):
            vault.notes.find_newest(RUN)
        assert repair_run(vault, RUN) == [], place
        vault.notes.write(task(3))
        assert vault.notes.find_newest(RUN) is not None


def test_what_is_settled_late_is_settled_in_the_round_before_too(vault: Vault) -> None:
    """Its acknowledgement came when a newer round was kept already; damage then leads back to it."""
    work(vault, 1, 0.5)
    work(vault, 2, 0.25)
    vault.settle(RUN, 1, accepted=True)
    flip(round_folder(vault, 2) / "local.safetensors", 0.99)
    again = Vault(vault.folder)
    repair_run(again, RUN)
    assert content(again) == (1, 1, [])
    assert residual(again) == {"w": 0.5}


def test_want_of_something_else_is_no_damage(two_rounds: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files: nothing is gone back to, and nothing is moved."""
    before = sorted(two_rounds.folder.rglob("*"))
    flip(round_folder(two_rounds, 2) / "local.safetensors")

    def too_many(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    for where in ("os.listdir", "pathlib.Path.read_bytes", "pathlib.Path.read_text", "fedvit.blobs.digest_of_file"):
        with monkeypatch.context() as patch:
            patch.setattr(where, too_many)
            with pytest.raises(StorageFailed, check=has_code("FV0013")):
                repair_run(Vault(two_rounds.folder), RUN)
    assert sorted(two_rounds.folder.rglob("*")) == before


def test_a_medium_that_fails_is_damage(two_rounds: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that ends with an error of input or output: the round before is whole."""
    local, real = round_folder(two_rounds, 2) / "local.safetensors", blobs_module.digest_of_file

    def failing(path: Path) -> str:
        if path == local:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(blobs_module, "digest_of_file", failing)
    vault = Vault(two_rounds.folder)
    assert "returns to the tensors of round 1" in repair_run(vault, RUN)[0].message
    assert content(vault) == (1, 1, [])


@pytest.mark.parametrize("damaged", ["local.safetensors", "result.msgpack", "SUMS", "CURRENT", "both"])
def test_power_cut_during_a_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str) -> None:
    """Mended again, it is what it would have become without the cut; what is damaged is never read."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    vault = Vault(state / "vault")
    vault.commit(result(1), personal(1))
    vault.settle(RUN, 1)
    vault.commit(result(2), personal(2))
    home, first, second = vault.folder / RUN, round_folder(vault, 1), round_folder(vault, 2)
    after = {"result.msgpack": (2, 2.0, []), "CURRENT": (2, 2.0, [(RUN, 2)]), "both": (0, None, [])}
    if damaged == "CURRENT":
        flip(home / damaged)
    elif damaged == "both":
        flip(first / "local.safetensors", 0.99)
        flip(second / "local.safetensors", 0.99)
    else:
        flip(second / damaged, 0.99)
    before = tree(state)
    with recorded(state) as ops:
        repair_run(Vault(vault.folder), RUN)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for number, (_, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        again = Vault(folder / "vault")
        repair_run(again, RUN)
        assert content(again) == after.get(damaged, (1, 1.0, []))
        assert repair_run(Vault(again.folder), RUN) == []
        again.commit(result(7), personal(7))
        assert content(again) == (7, 7.0, [(RUN, 7)])
