"""The repository of devices."""

from coordinator.record.record import Record
from coordinator.record.tables import RefusalRecord
from tests.support.records import reopen


def test_refusals_come_back_in_order(store: Record) -> None:
    store.devices.add_refusal("r", RefusalRecord(3, "a", "train", "NaN in [head]\n…", broke="memory"))
    store.devices.add_refusal("r", RefusalRecord(None, "b", "hello", "another version"))
    store.devices.add_refusal("other", RefusalRecord(1, "c", "train", "late"))
    first, second = reopen(store).devices.read_refusals("r")
    assert (first.round, first.device, first.kind, first.reason) == (3, "a", "train", "NaN in [head]\n…")
    assert (second.round, second.device, second.kind, second.reason) == (None, "b", "hello", "another version")
    assert (first.broke, second.broke) == ("memory", None)
    assert first.at <= second.at


def test_reason_with_any_character_is_recorded(store: Record) -> None:
    """A device may send any text as its reason, but PostgreSQL refuses a byte of 0."""
    store.devices.add_refusal("r", RefusalRecord(1, "a", "train", "ends \0 here, \u202e, \U0001f600"))
    [found] = store.devices.read_refusals("r")
    assert found.reason.replace("\ufffd", "\0") == "ends \0 here, \u202e, \U0001f600"
