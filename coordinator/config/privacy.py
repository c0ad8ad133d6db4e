"""The table [privacy]."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from coordinator.config.robust import RobustConfig
from fedvit.errors import ConfigError
from fedvit.roles import Role


class PrivacyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Differential privacy: the table [privacy] (docs/security.md). Raises ConfigError on construction."""

    noise_multiplier: Annotated[
        float, Meta(ge=0, description="Noise in the mean of shared tensors' updates, times clip; 0: no privacy.")
    ] = 0.0
    clip: Annotated[float | None, Meta(description="Norm that a device's update is scaled down to.")] = None
    clip_quantile: (
        Annotated[
            float,
            Meta(
                gt=0, lt=1, description="With `secure`, clip moves until this share of updates is within; else fixed."
            ),
        ]
        | None
    ) = None
    clip_rate: Annotated[float, Meta(gt=0, le=1, description="How fast the clip moves.")] = 0.2
    delta: Annotated[float, Meta(gt=0, lt=1, description="Of (epsilon, delta); below 1 / devices.")] = 1e-5
    accounting: Annotated[
        Literal["every_round", "sampled"],
        Meta(description="What epsilon assumes: any device may be in every round, or cohorts are drawn in secret."),
    ] = "every_round"
    feature_noise: Annotated[
        float, Meta(ge=0, description="Noise that devices add to features, times feature_clip; 0: none.")
    ] = 0.0
    feature_clip: Annotated[
        float | None, Meta(description="Norm that each image's features are scaled down to on the device.")
    ] = None
    deterministic_noise: Annotated[
        bool, Meta(description="Derive the noise from the run's seed: repeatable, protects nobody.")
    ] = False

    def __post_init__(self) -> None:
        for noise, clip in (("noise_multiplier", "clip"), ("feature_noise", "feature_clip")):
            limit = getattr(self, clip)
            if getattr(self, noise) and limit is None:
                raise ConfigError("FV1014", f"{noise} = {getattr(self, noise)} needs {clip}")
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError("FV1014", f"{clip} = {limit} must be above 0")

    def check(self, method: str, roles: set[Role], collects: bool, robust: RobustConfig) -> None:
        """Raise ConfigError if the noise would not cover what the method sends, or not with the stated epsilon."""
        if self.feature_noise and not collects:
            raise ConfigError("FV1014", f"feature_noise = {self.feature_noise}: method {method!r} uploads no features")
        if not self.noise_multiplier:
            return
        what = f"noise_multiplier = {self.noise_multiplier}"
        if Role.SHARED not in roles:
            raise ConfigError(
                "FV1014", f"{what}: method {method!r} averages no tensors, or its server reads single updates, too"
            )
        if collects or any(role.is_made_for_device for role in roles):
            other = "features" if collects else "updates from which tensors of single devices are made"
            raise ConfigError("FV1014", f"{what}: method {method!r} also uploads {other}, which no noise would cover")
        for key, allowed in (("aggregator", "mean"), ("clip_norm", None), ("reject_scale", None), ("max_weight", None)):
            if getattr(robust, key) != allowed:
                raise ConfigError(
                    "FV1014",
                    f"{what}: robust.{key} reads updates before the noise, which differential privacy does not allow",
                )
