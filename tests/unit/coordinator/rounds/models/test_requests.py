"""Acts on models: by operators and by rule, each in one transaction with its traces."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.record.record import Record, open_record
from coordinator.rounds.models.requests import promote, promote_canary, retire, roll_back, roll_back_by_rule
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.models import BETTER, FIRST, WORSE, compare_on, list_wanted


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with open_record(tmp_path / "runs") as made:
        yield made


def test_first_model_of_a_fleet_becomes_champion_at_once_without_a_canary_stage(store: Record) -> None:
    said = compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    assert "r-1 becomes champion on 2 devices" in said
    assert store.models.read("r-1").stage == "champion"
    assert [act.act for act in store.models.read_promotions()] == ["compared", "promoted"]
    [_, promotion] = store.models.read_promotions()
    assert (promotion.challenger, promotion.champion, promotion.images, promotion.actor) == (0.9, None, 200, "fedvit")
    assert [entry.act for entry in store.audit.read()] == ["compare model"]
    assert "is champion" in compare_on(store, "r-1", {"a": WORSE}), "a restart compares nothing twice"


def test_better_challenger_is_canary_on_labelled_devices_and_then_champion_everywhere(store: Record) -> None:
    compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    said = compare_on(store, "r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin")
    assert "canary on 1 device" in said
    assert list_wanted(store, "a") == {"r-1": "champion", "r-2": "canary"}
    assert list_wanted(store, "b") == {"r-1": "champion", "r-2": None}
    assert store.models.read("r-2").stage == "canary"
    assert "champion on 2 devices" in promote_canary(store, "r-2", "its time is over")
    assert list_wanted(store, "b") == {"r-1": "former", "r-2": "champion"}
    assert [store.models.read(name).stage for name in ("r-1", "r-2")] == ["former", "champion"]
    [*_, last] = store.models.read_promotions(["r-2"])
    assert (last.former, last.challenger, last.champion, last.images) == ("r-1", 0.9, 0.65, 200)
    assert last.low is not None
    assert 0 < last.low < 0.25


def test_worse_challenger_stays_one(store: Record) -> None:
    compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    assert "stays a challenger" in compare_on(store, "r-2", {"a": WORSE, "b": WORSE}, after=0)
    assert list_wanted(store, "a") == {"r-1": "champion", "r-2": None}
    assert "no device with site=oslo may be its canary" in compare_on(store, "r-3", {"a": BETTER}, canary="site=oslo")


def test_operator_rolls_back_and_promotes_what_the_rules_refuse(store: Record) -> None:
    compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    compare_on(store, "r-2", {"a": WORSE, "b": WORSE}, after=0)
    assert promote(store, "r-2", "site=rome") == "model r-2 becomes champion on 1 device"
    assert (list_wanted(store, "a"), list_wanted(store, "b")) == (
        {"r-1": "champion", "r-2": None}, {"r-1": "former", "r-2": "champion"},
    )  # fmt: skip
    assert roll_back(store, "r-2") == "model r-2 is rolled back on 1 device"
    assert list_wanted(store, "b") == {"r-1": "champion", "r-2": "retired"}
    assert store.models.read("r-2").stage == "retired"
    assert [entry.act for entry in store.audit.read()][-2:] == ["promote model", "roll back model"]
    for refused in (lambda: promote(store, "r-2"), lambda: roll_back(store, "r-2"), lambda: retire(store, "r-2")):
        with pytest.raises(ConfigError, check=has_code("FV1652")):
            refused()
    assert len(store.audit.read()) == 4, "what is refused leaves no trace"


def test_first_model_of_a_device_has_no_way_back(store: Record) -> None:
    """The device goes on to answer with it."""
    compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    with pytest.raises(ConfigError, check=has_code("FV1652")):
        roll_back(store, "r-1")
    compare_on(store, "r-2", {"a": BETTER, "c": FIRST}, after=0)
    assert roll_back(store, "r-2") == "model r-2 is rolled back on 1 device; 1 device had none before: no change there"
    assert (list_wanted(store, "a"), list_wanted(store, "c")) == (
        {"r-1": "champion", "r-2": "retired"},
        {"r-2": "champion"},
    )


def test_only_unused_models_are_retired(store: Record) -> None:
    compare_on(store, "r-1", {"a": FIRST}, after=0)
    compare_on(store, "r-2", {"a": WORSE}, after=0)
    with pytest.raises(ConfigError, check=has_code("FV1652")):
        retire(store, "r-1")
    assert retire(store, "r-2") == "model r-2 is retired on 1 device"
    assert list_wanted(store, "a") == {"r-1": "champion", "r-2": "retired"}


@pytest.mark.parametrize("act", [promote, roll_back, retire])
def test_unknown_model_is_named(store: Record, act: object) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1651")):
        act(store, "r-9")  # type: ignore[operator]


def test_device_whose_model_failed_alone_goes_back(store: Record) -> None:
    compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
    compare_on(store, "r-2", {"a": BETTER, "b": BETTER}, after=0)
    roll_back_by_rule(store, "r-2", "b: it ended 3 times", ["b"])
    assert (list_wanted(store, "a"), list_wanted(store, "b")) == (
        {"r-1": "former", "r-2": "champion"}, {"r-1": "champion", "r-2": "retired"},
    )  # fmt: skip
    assert store.models.read("r-2").stage == "champion"
