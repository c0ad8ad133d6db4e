"""A device loses its power in the middle of keeping a round: the vault holds the old state or the new, whole."""

import os
from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.repair import repair_run
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore, digest_of
from fedvit.tensors import Tensors
from fedvit.wire.messages import Manifest, Result, Task
from tests.support import messages
from tests.support.damage import flip
from tests.support.power import Tree, after_power_cut, recorded, tree, write_tree

RUN = "run"
UPLOAD = b"what the device sends of round " * 40


def result(number: int) -> Result:
    upload = Manifest(digest_of(UPLOAD), len(UPLOAD), 126_976)
    return messages.result(number, run=RUN, upload=upload)


def personal(number: int) -> Tensors:
    return {"w": np.full(4, number, np.float32)}


def content(state: Path) -> tuple[int, float | None, list[int]]:
    """(round, the personal tensors' value, rounds not acknowledged) of a device that starts again."""
    vault = Vault(state / "vault")
    local = vault.local(RUN)
    return vault.round_of(RUN), None if local is None else float(local["w"][0]), [one.round for one in vault.pending()]


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
    old: tuple[int, float | None, list[int]] = (0, None, [])
    if rounds_before:
        keep(state, 1)
        Vault(state / "vault").settle(RUN, 1)
        (state / "blobs" / digest_of(UPLOAD)[7:9] / digest_of(UPLOAD)[7:]).unlink()
        old = (1, 1.0, [])
    new = (rounds_before + 1, float(rounds_before + 1), [rounds_before + 1])
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
        seen = content(folder)
        found.add(str(seen))
        assert seen in (old, new), f"after {done} of {len(ops)} calls: {sorted(left)}"
        if done == len(ops):
            assert seen == new, sorted(left)
        if seen == new:
            assert BlobStore(folder / "blobs").get(digest_of(UPLOAD)) == UPLOAD
        assert repair_run(Vault(folder / "vault"), RUN) == [], "what a cut leaves is not taken for damage"
        assert content(folder) == seen, "nor is a round that was not finished taken for a finished one"
        keep(folder, 7)  # and it goes on from there
        assert content(folder) == (7, 7.0, [7])
    assert found == {str(old), str(new)}


@pytest.mark.parametrize("damaged", ["local.safetensors", "result.msgpack", "SUMS", "CURRENT", "both"])
def test_power_cut_during_a_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str) -> None:
    """Mended again, it is what it would have become without the cut; what is damaged is never read."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    keep(state, 1)
    Vault(state / "vault").settle(RUN, 1)
    keep(state, 2)
    home = state / "vault" / RUN
    [first], [second] = home.glob("round-1-*"), home.glob("round-2-*")
    after = {"result.msgpack": (2, 2.0, []), "CURRENT": (2, 2.0, [2]), "both": (0, None, [])}
    if damaged == "CURRENT":
        flip(home / damaged)
    elif damaged == "both":
        flip(first / "local.safetensors", 0.99)
        flip(second / "local.safetensors", 0.99)
    else:
        flip(second / damaged, 0.99)
    before = tree(state)
    with recorded(state) as ops:
        repair_run(Vault(state / "vault"), RUN)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for number, (_, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        repair_run(Vault(folder / "vault"), RUN)
        assert content(folder) == after.get(damaged, (1, 1.0, []))
        assert repair_run(Vault(folder / "vault"), RUN) == []
        keep(folder, 7)
        assert content(folder) == (7, 7.0, [7])


def test_a_power_cut_while_a_task_is_noted(tmp_path: Path) -> None:
    """The note is the old one or the new one."""
    state = tmp_path.resolve() / "state"
    state.mkdir()
    vault = Vault(state / "vault")

    def note(number: int) -> None:
        digest = "blake3:" + "ef" * 32
        vault.note(Task("instance", 1, RUN, number, "train", 7, digest, {}, (), 60.0, 1.0))

    note(1)
    before = tree(state)
    with recorded(state) as ops:
        note(2)
    for number, (done, left) in enumerate(after_power_cut(before, ops)):
        folder = tmp_path / f"cut-{number}"
        write_tree(left, folder)
        noted = Vault(folder / "vault").newest_task(RUN)
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
