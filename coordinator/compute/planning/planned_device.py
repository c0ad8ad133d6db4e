"""The device profile that planning uses."""

from typing import Literal, NamedTuple

from fedvit.resources import Budget, BudgetKind, Speed


class PlannedDevice(NamedTuple):
    """The profile of a device to plan for: connected, or a board of the catalogue."""

    device: str
    speed: Speed | None  # None: no time is predicted
    source: Literal["measured", "catalogue"] | None
    mode: str | None
    budget: Budget
    images: int
    test_images: int
    base_rss_bytes: int | None = None
    power_w: tuple[float, float] | None = None
    corrections: tuple[tuple[BudgetKind, float], ...] = ()  # factors by which predictions were too low before
    feature_bytes: int | None = None  # on its disk, for features of frozen layers; None: it keeps none
    budget_is_own: bool = True  # the device knows the memory budget, and limits its cache of decoded images
