"""A record with one run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from tests.support.records import CONFIG


@pytest.fixture
def store(runs: Path) -> Iterator[Record]:
    """With one run, `r`."""
    opened = open_record(runs)
    opened.runs.create("r", CONFIG)
    yield opened
    opened.close()
