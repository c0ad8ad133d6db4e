"""Labels of devices that the coordinator's operator sets, in the record."""

from collections.abc import Iterable

from coordinator.record.record import Record
from fedvit.errors import ConfigError
from fedvit.labels import parse_label
from fedvit.wire.messages import MAX_LABELS
from fedvit.wire.topics import check_name


def set_labels(store: Record, devices: list[str], labels: Iterable[str], removed: Iterable[str] = ()) -> None:
    """Set labels of devices, written NAME=VALUE, and remove others by name.

    Raises ConfigError before anything is changed.
    """
    changed, gone = dict(map(parse_label, labels)), set(removed)
    for device in devices:
        _check(store, device, changed.keys(), gone)
    words = [*(f"{name}={value}" for name, value in changed.items()), *(f"-{name}" for name in sorted(gone))]
    with store.database.together():
        for device in devices:
            for name in gone:
                store.devices.set_label(device, name, None)
            for name, value in changed.items():
                store.devices.set_label(device, name, value)
            if words:
                store.audit.add("label", device, " ".join(words))


def _check(store: Record, device: str, changed: Iterable[str], gone: set[str]) -> None:
    """Raise ConfigError if the labels of a device cannot be changed like this."""
    check_name(device, "device id")
    before = store.devices.read_labels(device).get(device, {})
    if unknown := sorted(gone - before.keys()):
        raise ConfigError("FV1415", f"label {unknown[0]!r} of {device} was not set here, so that it cannot be removed")
    if both := sorted(gone.intersection(changed)):
        raise ConfigError("FV1415", f"label {both[0]!r} is both set and removed")
    if (count := len((before.keys() - gone).union(changed))) > MAX_LABELS:
        raise ConfigError("FV1415", f"{device} would have {count} labels, a device can have {MAX_LABELS}")
