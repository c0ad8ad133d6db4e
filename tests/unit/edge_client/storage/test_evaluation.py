"""The personal tensors that a task may use."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_client.storage.evaluation import check_takes_part, newest_counted
from edge_client.storage.vault import Vault
from fedvit.errors import BadPayload
from fedvit.program import Role
from tests.support.codes import has_code
from tests.support.tiny_programs import make_program
from tests.support.vaults import RUN, personal, result, task


def test_test_of_an_earlier_run_needs_its_personal_tensors(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "vault")
    own, shared = (make_program(method, tmp_path / method)[0] for method in ("fedper", "fedavg"))
    asked = replace(task(7, "scores"), kind="evaluate", personal_of=RUN)
    assert own.with_role(Role.LOCAL)
    with pytest.raises(BadPayload, check=has_code("FV1424", repr(RUN))):
        check_takes_part(vault, asked, own)
    check_takes_part(vault, asked, shared)
    vault.commit(result(6), personal(6))
    check_takes_part(vault, asked, own)
    assert (asked.vault_run, newest_counted(asked), newest_counted(task(7))) == (RUN, 7, None)
    with pytest.raises(BadPayload, check=has_code("FV0006")):
        check_takes_part(vault, replace(asked, kind="train"), own)
    with pytest.raises(BadPayload):
        check_takes_part(vault, replace(asked, personal_of="../elsewhere"), own)
