"""A record with one run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from tests.support.records import CONFIG


@pytest.fixture
def store(runs: Path) -> Iterator[Record]:
    """With one run, `r`."""
    with open_record(runs) as opened:
        opened.runs.create("r", CONFIG)
        yield opened
