"""The files of a round: whole, or named."""

from pathlib import Path

import pytest

from edge_client.storage.vault import Vault
from fedvit.errors import StorageFailed
from tests.support.codes import has_code
from tests.support.vaults import RUN, personal, residual, result, round_folder, work


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault")


def test_a_missing_round_folder_is_named(vault: Vault) -> None:
    vault.commit(result(1), personal(1))
    folder = round_folder(vault, 1)
    folder.rename(vault.folder.parent / "moved")
    for ask in (lambda: vault.local(RUN), lambda: vault.pending(), lambda: vault.round_of(RUN)):
        with pytest.raises(StorageFailed, check=has_code("FV1704", folder.name)):
            ask()


@pytest.mark.parametrize("file", ["local.safetensors", "result.msgpack"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(vault: Vault, file: str, damage: str) -> None:
    vault.commit(result(1), personal(1))
    path = round_folder(vault, 1) / file
    path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"nonsense")
    with pytest.raises(StorageFailed, check=has_code("FV1704", file)):
        vault.local(RUN) if file.startswith("local") else vault.pending()


def test_where_files_cannot_be_linked_they_are_copied(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr("os.link", no_links)
    work(vault, 1, 0.5)
    vault.settle(RUN, 1, accepted=True)
    work(vault, 2, 0.25)
    vault.settle(RUN, 2, accepted=False)
    assert residual(vault) == {"w": 0.5}
