"""The table [robust]."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedvit.errors import ConfigError
from fedvit.roles import Role

AGGREGATORS = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
"""fedvit's own; packages have others."""


class RobustConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Robust aggregation, against malicious devices: the table [robust] (docs/security.md).

    Raises ConfigError on construction if keys do not fit together.
    """

    aggregator: Annotated[
        str,
        Meta(
            description="How shared tensors' updates are combined; all but mean weigh devices equally.",
            extra={"metavar": "|".join((*sorted(AGGREGATORS), "NAME"))},
        ),
    ] = "mean"
    malicious_share: Annotated[
        float,
        Meta(ge=0, lt=0.5, description="Share of a cohort that may be malicious: trimmed_mean, krum, multi_krum."),
    ] = 0.3
    clip_norm: Annotated[
        float | Literal["median"] | None,
        Meta(description="Updates are scaled down to this norm; median: to the cohort's median norm."),
    ] = None
    reject_scale: Annotated[
        float | None,
        Meta(description="Updates longer than this multiple of their median are left out, and features as far off."),
    ] = None
    max_weight: Annotated[
        float | None, Meta(description="A device's samples count up to this multiple of the cohort's median.")
    ] = None
    strikes: Annotated[
        int,
        Meta(ge=0, description="Refused or out-of-scale results that put a device into quarantine; 0: no quarantine."),
    ] = 3
    quarantine_rounds: Annotated[
        int | None, Meta(description="Rounds that a quarantine lasts; by default until the operator ends it.")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.clip_norm, float) and not 0 < self.clip_norm < math.inf:
            raise ConfigError("FV1013", f"clip_norm = {self.clip_norm} must be above 0, or median")
        for key, least in (("reject_scale", 1.0), ("max_weight", 1.0), ("quarantine_rounds", 1)):
            value = getattr(self, key)
            if value is not None and not least <= value < math.inf:
                raise ConfigError("FV1013", f"{key} = {value} must be at least {least:g}")

    def check(self, method: str, roles: set[Role], why_not_measured: str | None = None) -> None:
        """Raise ConfigError, naming the method, if there is nothing to aggregate, or no length to compare."""
        if why_not_measured and (self.clip_norm is not None or self.reject_scale is not None):
            raise ConfigError(
                "FV1013",
                f"clip_norm = {self.clip_norm!r}, reject_scale = {self.reject_scale!r}: method {method!r} cannot be "
                f"used with them: {why_not_measured}; leave both out",
            )
        if self.aggregator != "mean" and Role.SHARED not in roles:
            raise ConfigError(
                "FV1013",
                f"aggregator = {self.aggregator!r}: method {method!r} averages no tensors, or its server reads "
                "single updates, too; reject_scale, max_weight and strikes can be used with it",
            )
