"""The page of backbones lists the models that `make backbones` has verified, as they are now."""

import pytest

from tests.backbones.table import NAMES, build, choose_methods, describe, read_rows


def test_the_page_has_a_row_for_each() -> None:
    assert [*read_rows()] == [*NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_describes_the_model(name: str) -> None:
    vit = build(name, is_empty=True)
    assert read_rows()[name] == describe(vit).write(choose_methods(vit))
