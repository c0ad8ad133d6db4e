"""The table [promote]: when devices may use a run's model."""

from typing import Annotated

from msgspec import Meta, Struct

from coordinator.config.labels import parse_labels
from fedvit.errors import ConfigError
from fedvit.quantities import parse_seconds


class PromoteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of promotion: the table [promote]. With it a run ends with a comparison on its devices."""

    min_gain: Annotated[
        float,
        Meta(
            ge=-1,
            le=1,
            description="The new model is used if the 95 % interval of its gain in accuracy lies above this.",
        ),
    ] = 0.0
    min_images: Annotated[int, Meta(ge=1, description="Fewest test images, of all devices together.")] = 50
    canary: Annotated[
        str, Meta(description="Labels of the devices that use it first: site=berlin; by default any device.")
    ] = ""
    canary_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of these devices that use it first, at least one.")
    ] = 1.0
    after: Annotated[
        float | str,
        Meta(description="Time after which all devices use it, e.g. 24h; 0: at once.", extra={"metavar": "TIME"}),
    ] = "24h"
    max_worse: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="A device keeps its model if the new one is surely worse there by more; the canary ends if its "
            "mean confidence falls by more.",
        ),
    ] = 0.05

    def __post_init__(self) -> None:
        self.read_canary()
        self.after_s()

    def read_canary(self) -> dict[str, str]:
        """Return the labels of the devices that use a model first. Raises ConfigError."""
        return parse_labels(self.canary, "canary")

    def after_s(self) -> float:
        """Return the time of the canary stage; 0: there is none. Raises ConfigError."""
        try:
            seconds = parse_seconds(self.after) if isinstance(self.after, str) else float(self.after)
        except ConfigError as error:
            raise ConfigError(error.code, f"after: {error}") from None
        if not 0 <= seconds <= 366 * 86400:
            raise ConfigError("FV1005", f"after = {self.after!r} must be between 0 and a year")
        return seconds
