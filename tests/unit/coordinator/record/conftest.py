"""The record is the same in a file of SQLite and in PostgreSQL."""

from pathlib import Path

import pytest

from coordinator.record.database import use_database
from tests.support.postgresql import Postgresql


@pytest.fixture(params=["sqlite", "postgresql"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of runs without any, whose record is kept here or there."""
    if request.param == "postgresql":
        server: Postgresql = request.getfixturevalue("postgresql")
        use_database(tmp_path / "runs", server.schema())
    return tmp_path / "runs"
