"""The parts of a run, without the loop that serves it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts import Parts

MakeParts = Callable[..., Parts]


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[MakeParts]:
    made: list[Parts] = []

    def make(**values: Any) -> Parts:
        made.append(Parts(tmp_path, **values))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


@pytest.fixture
def parts(make_parts: MakeParts) -> Parts:
    return make_parts()


@pytest.fixture
def asked(parts: Parts) -> Parts:
    """Two devices at work in round 1, which needs both."""
    parts.arrive("pi", "nano")
    parts.open("pi", "nano")
    parts.sent.clear()
    return parts
