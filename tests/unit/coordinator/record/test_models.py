"""Models in a record, and records that have none yet."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from coordinator.record.record import open_record
from coordinator.record.tables import DeviceModelRecord, Promotion
from fedvit.comparison import Comparison
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.models import FIRST, compare_on
from tests.support.records import reopen


def test_models_outlive_the_process(tmp_path: Path) -> None:
    store = open_record(tmp_path)
    compare_on(store, "r-1", {"a": FIRST, "b": Comparison(0, 80, 0, 20)}, after=0)
    before = store.models.read_all(), store.models.read_devices(), store.models.read_promotions()
    again = reopen(store)
    assert (again.models.read_all(), again.models.read_devices(), again.models.read_promotions()) == before
    assert again.models.find_newest_act() == 2
    assert again.models.count_stages() == {"champion": 1}
    again.runs.remove("r")
    assert again.models.count_stages() == {"champion": 1}, "devices still use it"
    row = DeviceModelRecord(model="r-1", device="a", answered=40, confidence=31.5)
    again.models.write_devices([row])
    assert again.models.read_devices("r-1", "a") == [row]
    assert row.mean_confidence == pytest.approx(0.7875)
    with pytest.raises(ConfigError, check=has_code("FV1651")):
        again.models.read("r-2")
    again.close()


def test_promotion_keeps_every_field(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        made = Promotion(
            model="r-1", at="2026-11-28T10:00", act="promoted", actor="ada", reason="by hand", devices=3, former="r-0",
            challenger=0.9, champion=0.8, images=120, low=0.02, high=0.18,
        )  # fmt: skip
        store.models.add_promotion(made)
        store.models.add_promotion(msgspec.structs.replace(made, model="r-2", low=None))
        assert store.models.read_promotions(["r-1"]) == [made]
        assert store.models.read_promotions()[1].low is None


def test_reason_of_a_device_can_have_a_zero_byte(runs: Path) -> None:
    with open_record(runs) as store:
        store.runs.create("r", {})
        compare_on(store, "r-1", {"a": FIRST}, after=0)
        store.models.change("r-1", stage="former", reason="a: its disk\0is full")
        assert store.models.read("r-1").stage == "former"
        store.runs.update("r", status="failed", reason="a: its disk\0is full")
        assert store.runs.read("r").status == "failed"


def test_record_from_before_models_is_brought_up_to_date(tmp_path: Path) -> None:
    open_record(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "fedvit.db")) as database, database:
        for table in ("models", "device_models", "promotions"):
            database.execute(f"DROP TABLE {table}")
        database.execute("UPDATE alembic_version SET version_num = '0002'")
    with open_record(tmp_path) as store:
        assert store.models.read_all() == []
        compare_on(store, "r-1", {"a": FIRST}, after=0)
        assert store.models.read("r-1").stage == "champion"
