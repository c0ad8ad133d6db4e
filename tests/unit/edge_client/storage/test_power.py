"""A device loses its power in the middle of keeping a round: the vault holds the old state or the new, whole."""

import os
from pathlib import Path

import pytest

from edge_client.storage.repair import repair_run
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore, digest_of
from fedvit.wire.messages import Manifest
from tests.support.power import Tree, after_power_cut, recorded, tree, write_tree
from tests.support.vaults import RUN, UPLOAD, content, personal, result, task


def keep(state: Path, number: int) -> None:
    """As a device keeps a finished round: the upload's blob first, then the vault."""
    BlobStore(state / "blobs").put(UPLOAD)
    Vault(state / "vault").commit(result(number), personal(number))


@pytest.mark.parametrize("rounds_before", [0, 1])
def test_a_power_cut_at_any_moment_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_before: int
) -> None:
    """Every call of it, every subset of what was not synced. A commit that has returned is there after any cut, and
    a result that is to be sent has its blob."""
    state = (tmp_path / "state").resolve()
    state.mkdir()
    old: tuple[int, float | None, list[tuple[str, int]]] = (0, None, [])
    if rounds_before:
        keep(state, 1)
        Vault(state / "vault").settle(RUN, 1)
        (state / "blobs" / digest_of(UPLOAD)[7:9] / digest_of(UPLOAD)[7:]).unlink()
        old = (1, 1.0, [])
    new = (rounds_before + 1, float(rounds_before + 1), [(RUN, rounds_before + 1)])
    before = tree(state)
    with recorded(state) as ops:
        keep(state, rounds_before + 1)
    kinds = {op.kind for op in ops}
    assert {"create", "mkdir", "sync", "syncdir", "rename"} <= kinds
    assert sum(op.kind == "sync" for op in ops) >= 6  # blob, local, result, PENDING, SUMS, CURRENT
    found = set()
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what is looked at need not last
    for number, (done, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        seen = content(Vault(folder / "vault"))
        found.add(str(seen))
        assert seen in (old, new), f"after {done} of {len(ops)} calls: {sorted(left)}"
        if done == len(ops):
            assert seen == new, sorted(left)
        if seen == new:
            assert BlobStore(folder / "blobs").get(digest_of(UPLOAD)) == UPLOAD
        assert repair_run(Vault(folder / "vault"), RUN) == [], "what a cut leaves is not taken for damage"
        assert content(Vault(folder / "vault")) == seen, "nor is a round that was not finished taken for a finished one"
        keep(folder, 7)  # and it goes on from there
        assert content(Vault(folder / "vault")) == (7, 7.0, [(RUN, 7)])
    assert found == {str(old), str(new)}


def test_a_power_cut_while_a_task_is_noted(tmp_path: Path) -> None:
    """The note is the old one or the new one."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    vault = Vault(state / "vault")
    vault.notes.write(task(1))
    before = tree(state)
    with recorded(state) as ops:
        vault.notes.write(task(2))
    for number, (done, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        noted = Vault(folder / "vault").notes.find_newest(RUN)
        assert noted is not None
        assert noted.round == 2 if done == len(ops) else noted.round in (1, 2)


def test_a_power_cut_while_a_blob_is_received(tmp_path: Path) -> None:
    """Under its final name a blob is whole, or not there; once `commit` has returned it is there."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    before: Tree = tree(state)
    manifest = Manifest(digest_of(UPLOAD), len(UPLOAD), 1000)
    with recorded(state) as ops:
        partial = BlobStore(state / "blobs").receive(manifest)
        for index in range(manifest.chunks):
            partial.write(index, UPLOAD[index * 1000 : (index + 1) * 1000])
        partial.commit()
    for number, (done, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        blobs = BlobStore(folder / "blobs")
        if done == len(ops) or blobs.has(manifest.digest):
            assert blobs.get(manifest.digest) == UPLOAD


def test_without_a_sync_of_the_folder_above_a_round_could_be_lost(tmp_path: Path) -> None:
    """What the cuts above are there to find: a file that was synced, in a new folder that was not."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    with recorded(state) as ops:
        (state / "new").mkdir()
        with open(state / "new" / "file", "wb") as file:
            file.write(b"content")
            file.flush()
            os.fsync(file.fileno())
    assert [op.kind for op in ops] == ["mkdir", "create", "sync"]
    left = [state for done, state in after_power_cut({}, ops) if done == len(ops)]
    assert {} in left
    assert {"new": None, "new/file": b"content"} in left
