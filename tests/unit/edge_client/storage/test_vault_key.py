"""Personal tensors encrypted at rest: nobody reads them without the key, and nothing is lost with a wrong one."""

from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.repair import repair_run
from edge_client.storage.sums import Sums, read_sums, write_sums
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from fedvit.blobs import digest_of_file
from fedvit.errors import ConfigError, StorageFailed
from fedvit.tensors import Tensors
from tests.support.codes import has_code
from tests.support.damage import flip
from tests.support.devices import result

SECRET: Tensors = {"head.weight": np.frombuffer(b"the tensors of this very device!", np.float32).copy()}


def key(tmp_path: Path, name: str = "key") -> VaultKey:
    return VaultKey.load(tmp_path / name, make=True)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    Vault(tmp_path / "vault", key(tmp_path)).commit(result(1), SECRET)
    again = Vault(tmp_path / "vault", key(tmp_path))
    again.check_key()
    stored = again.local("run")
    assert stored is not None
    np.testing.assert_array_equal(stored["head.weight"], SECRET["head.weight"])
    assert [entry.round for entry in again.pending()] == [1]


def test_nothing_of_it_lies_open(tmp_path: Path) -> None:
    Vault(tmp_path / "plain").commit(result(1), SECRET)
    Vault(tmp_path / "vault", key(tmp_path)).commit(result(1), SECRET)
    assert any(b"this very device" in content for content in files(tmp_path / "plain").values())
    for path, content in files(tmp_path / "vault").items():
        assert b"this very device" not in content, path
        assert b"head.weight" not in content, path


def test_the_same_tensors_are_never_sealed_alike(tmp_path: Path) -> None:
    made = key(tmp_path)
    assert made.seal(b"same", "place") != made.seal(b"same", "place")


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    made = key(tmp_path)
    assert made.file.stat().st_mode & 0o777 == 0o600
    made.file.chmod(0o640)
    with pytest.raises(ConfigError, check=has_code("FV1417", "640")):
        key(tmp_path)


def test_another_key_changes_nothing(tmp_path: Path) -> None:
    Vault(tmp_path / "vault", key(tmp_path)).commit(result(1), SECRET)
    before = files(tmp_path / "vault")
    wrong = Vault(tmp_path / "vault", key(tmp_path, "other"))
    for attempt in (wrong.check_key, lambda: wrong.local("run")):
        with pytest.raises(ConfigError, check=has_code("FV1417", "other")):
            attempt()
    with pytest.raises(ConfigError, check=has_code("FV1417", "--vault-key")):
        Vault(tmp_path / "vault").local("run")
    assert files(tmp_path / "vault") == before
    assert Vault(tmp_path / "vault", key(tmp_path)).local("run") is not None


def test_an_altered_byte_is_found(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "vault", key(tmp_path))
    vault.commit(result(1), SECRET)
    [file] = (tmp_path / "vault").rglob("*.sealed")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageFailed, check=has_code("FV1704", "local.sealed")):
        vault.local("run")


def test_an_older_round_cannot_be_put_in_place_of_a_newer(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "vault", key(tmp_path))
    vault.commit(result(1), SECRET)
    [old] = (tmp_path / "vault").rglob("*.sealed")
    vault.commit(result(2), SECRET)
    [file] = (tmp_path / "vault").rglob("round-2-*/*.sealed")
    file.write_bytes(old.read_bytes())
    with pytest.raises(StorageFailed, check=has_code("FV1704", "local.sealed")):
        vault.local("run")
    sums = read_sums(file.parent)
    assert sums is not None
    write_sums(file.parent, Sums(2, {**sums.files, file.name: digest_of_file(file)}))  # who knows how it is kept
    with pytest.raises(ConfigError, check=has_code("FV1417")):
        vault.local("run")


def test_a_plain_vault_is_sealed_by_the_next_round(tmp_path: Path) -> None:
    Vault(tmp_path / "vault").commit(result(1), SECRET)
    vault = Vault(tmp_path / "vault", key(tmp_path))
    vault.check_key()
    assert vault.local("run") is not None
    vault.commit(result(2), SECRET)
    assert not list((tmp_path / "vault").rglob("local.safetensors"))
    assert vault.local("run") is not None


def test_a_key_that_is_not_there_is_only_made_where_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1417", "none")):
        VaultKey.load(tmp_path / "none", make=False)


def test_damage_is_distinguished_from_a_wrong_key(tmp_path: Path) -> None:
    """A start looks at what is whole, with any CURRENT; damage leads back to the round before, a wrong key changes
    nothing."""
    vault = Vault(tmp_path / "vault", key(tmp_path))
    for number in (1, 2):
        vault.commit(result(number), SECRET)
    [file] = (tmp_path / "vault").rglob("round-2-*/local.sealed")
    flip(file, 0.9)
    flip(tmp_path / "vault" / "run" / "CURRENT")
    before = files(tmp_path / "vault")
    with pytest.raises(ConfigError, check=has_code("FV1417", "other")):
        Vault(tmp_path / "vault", key(tmp_path, "other")).check_key()
    with pytest.raises(ConfigError, check=has_code("FV1417", "--vault-key")):
        Vault(tmp_path / "vault").check_key()
    again = Vault(tmp_path / "vault", key(tmp_path))
    again.check_key()
    assert files(tmp_path / "vault") == before
    [repair] = repair_run(again, "run")
    assert str(file) in repair.message
    assert again.round_of("run") == 1
    assert again.local("run") is not None
