"""The table [promote]."""

from typing import Any

import pytest

from coordinator.config import make_config
from fedvit.errors import ConfigError


def test_run_without_the_table_promotes_nothing() -> None:
    assert make_config({}, "test").run.promote is None
    rules = make_config({"promote": {}}, "test").run.promote
    assert rules is not None
    assert (rules.min_gain, rules.min_images, rules.after_s(), rules.read_canary()) == (0.0, 50, 86400.0, {})


@pytest.mark.parametrize(("after", "seconds"), [("24h", 86400.0), (0, 0.0), ("1h30m", 5400.0), (2.5, 2.5)])
def test_time_of_the_canary_is_a_number_or_a_text_with_a_unit(after: Any, seconds: float) -> None:
    rules = make_config({"promote": {"after": after}}, "test").run.promote
    assert rules is not None
    assert rules.after_s() == seconds


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"min_gain": 2.0}, "min_gain"),
        ({"min_images": 0}, "min_images"),
        ({"canary": "berlin"}, "canary"),
        ({"canary_share": 0.0}, "canary_share"),
        ({"after": "soon"}, "after"),
        ({"after": -1.0}, "after"),
        ({"max_worse": 1.5}, "max_worse"),
        ({"gain": 0.1}, "gain"),
    ],
)
def test_wrong_value_is_named(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"promote": table}, "test")
    assert named in str(refused.value)


def test_secure_run_compares_no_models() -> None:
    with pytest.raises(ConfigError, check=lambda error: "secure" in str(error)):
        make_config({"secure": True, "promote": {}}, "test")
