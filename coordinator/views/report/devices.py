"""The figures of a run's devices, as a table and as CSV."""

from collections.abc import Callable, Sequence

from coordinator.views.report.document import DeviceReport
from profiles.report.tables import Column, Sheet


def _median(figure: str, side: str) -> Callable[[DeviceReport], float | None]:
    """Read the median over rounds of a figure, predicted or measured."""
    return lambda device: next((getattr(entry, side) for entry in device.comparisons() if entry.figure == figure), None)


def _count_missing(device: DeviceReport) -> int:
    return device.count_rounds("refused") + device.count_rounds("dropped out")


_COLUMNS = (
    Column("device", "device"),
    Column("train_images", "training images", lambda device: device.totals.train_samples),
    Column("test_images", "test images", lambda device: device.totals.test_samples),
    Column("rounds", "rounds", lambda device: device.count_rounds("accepted")),
    Column("missing", "missing", _count_missing),
    Column("received", "received", lambda device: device.received),
    Column("declined", "declined", lambda device: device.declined or None),
    Column("accuracy", "accuracy", lambda device: device.totals.accuracy),
    Column("bytes_down", "down", lambda device: device.totals.bytes_down),
    Column("bytes_up", "up", lambda device: device.totals.bytes_up),
    Column("step_s", "step", _median("step", "measured")),
    Column("train_predicted_s", "training predicted", _median("training of a round", "predicted")),
    Column("train_s", "training", _median("training of a round", "measured")),
    Column("memory_predicted_bytes", "memory predicted", _median("peak memory", "predicted")),
    Column("memory_bytes", "peak memory", lambda device: device.totals.peak_rss_bytes),
    Column("memory_budget_bytes", "memory budget", lambda device: device.budget and device.budget.memory_bytes),
    Column("energy_j", "energy", _median("energy of a round", "measured")),
    Column("budgets_broken", "budgets broken", lambda device: sum(device.broken.values()) or None),
    Column("changes", "given, to fit its budget", lambda device: device.changes or None),
)


def device_sheet(devices: Sequence[DeviceReport], *, omit_empty: bool = False) -> Sheet:
    """Make the table with one row for each device; a page leaves columns without any figure out."""
    return Sheet(devices, _COLUMNS, omit_empty=omit_empty)
