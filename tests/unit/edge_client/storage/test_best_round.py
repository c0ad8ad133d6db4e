"""The vault and the device keep the model of a run's best round."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_client.storage.best_round import best_task, find_test, keep_best
from edge_client.storage.repair import repair_run
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from tests.support.vaults import RUN, personal, result, round_folder, task


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def vault(request: pytest.FixtureRequest, tmp_path: Path) -> Vault:
    key = VaultKey.load(tmp_path / "key", make=True) if request.param else None
    return Vault(tmp_path / "vault", key)


def go_through(vault: Vault, number: int, best: int) -> None:
    """Train and test a round while the coordinator names the best one."""
    keep_best(vault, RUN, best)
    vault.notes.write(task(number))
    vault.commit(result(number), personal(number), best=best)
    keep_best(vault, RUN, best)
    vault.notes.write(replace(task(number), kind="evaluate", groups={"model": f"after {number}"}))


def value(vault: Vault, upto: int) -> float:
    local = vault.local(RUN, upto)
    assert local is not None
    return float(local["w"][0])


def test_vault_keeps_the_best_round_until_there_is_a_better_one(vault: Vault) -> None:
    for number, best in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)):
        go_through(vault, number, best)
    kept = best_task(vault, RUN)
    assert kept is not None
    assert (kept.round, kept.groups, value(vault, 2)) == (2, {"model": "after 2"}, 2.0)
    assert sorted(folder.name[:7] for folder in vault.path(RUN).glob("round-*")) == ["round-2", "round-5", "round-6"]
    assert vault.round_of(RUN) == 6
    go_through(vault, 7, 6)
    kept = best_task(vault, RUN)
    assert kept is not None
    assert (kept.round, value(vault, 6)) == (6, 6.0)
    assert not list(vault.path(RUN).glob("round-2-*"))


def test_vault_keeps_the_round_before_a_best_one_without_this_device(vault: Vault) -> None:
    for number, best in ((1, 0), (2, 1)):
        go_through(vault, number, best)
    go_through(vault, 5, 4)
    go_through(vault, 6, 4)
    go_through(vault, 7, 4)
    assert best_task(vault, RUN) is None, "it was not asked to test round 4"
    assert (vault.round_of(RUN, 4), value(vault, 4)) == (2, 2.0)


def test_end_of_a_run_names_the_last_round_as_the_best(vault: Vault) -> None:
    go_through(vault, 1, 0)
    go_through(vault, 2, 1)
    keep_best(vault, RUN, 2)
    assert best_task(vault, RUN) == vault.notes.find_newest(RUN)
    keep_best(vault, RUN, 0)
    assert best_task(vault, RUN) is None


def test_training_of_the_best_round_is_not_its_test(vault: Vault) -> None:
    vault.notes.write(task(3))
    assert find_test(vault, RUN, 3) is None
    keep_best(vault, "unknown", 3)
    assert vault.folders() == [RUN]


def test_damaged_description_is_none(vault: Vault) -> None:
    go_through(vault, 1, 0)
    go_through(vault, 2, 1)
    (vault.path(RUN) / "BEST").write_bytes(b"damaged")
    assert best_task(vault, RUN) is None
    go_through(vault, 3, 2)
    assert best_task(vault, RUN) is not None


def test_repair_returns_to_the_round_before_not_to_the_best(vault: Vault) -> None:
    for number, best in ((1, 0), (2, 1), (3, 1), (4, 1)):
        go_through(vault, number, best)
    next(round_folder(vault, 4).glob("local.*")).write_bytes(b"damaged")
    repair_run(vault, RUN)
    local = vault.local(RUN)
    assert local is not None
    assert np.array_equal(local["w"], personal(3)["w"])
