"""The file of the API's tokens."""

from pathlib import Path

import pytest

from coordinator.security.api_tokens import FILE, ApiTokens
from fedvit.errors import Damaged
from tests.support.codes import has_code


@pytest.mark.parametrize("content", [b"", b"[{}]", b'[{"name": "\xff"}]'])
def test_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(Damaged, check=has_code("FV1642", FILE)):
        ApiTokens(tmp_path).list_all()


def test_a_digest_changed_by_hand_belongs_to_nobody(tmp_path: Path) -> None:
    """Other tokens of the file stay valid."""
    tokens = ApiTokens(tmp_path)
    tokens.add("first", "viewer")
    text = tokens.add("second", "viewer")
    file = tmp_path / FILE
    first = tokens.list_all()[0].digest
    file.write_text(file.read_text().replace(first, "é" * 64), encoding="utf-8")
    found = ApiTokens(tmp_path).find(text)
    assert found
    assert found.name == "second"
