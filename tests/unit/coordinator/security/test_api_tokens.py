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
