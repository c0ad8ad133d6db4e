"""Check of runs that add up their devices' results in secret."""

from coordinator.config.run import RunConfig
from coordinator.config.selection import READ_NO_ANSWERS
from coordinator.config.sums import LEAST_DEVICES, SUM_CODECS
from fedvit.errors import ConfigError
from fedvit.roles import NONE, Role
from fedvit.secure.neighbours import choose_degree
from fedvit.secure.noise import LEAST_STEPS, count_noise_steps, find_range
from fedvit.wire.messages import SumNoise, SumTerms


def check_secure(config: RunConfig, roles: set[Role], *, collects: bool, why_no_mean: str | None) -> None:
    """Raise ConfigError if a run with secure sums needs updates of single devices.

    `collects`: whether the method uploads features; `why_no_mean`: why the mean cannot stand for a cohort's updates.
    """
    if not config.secure:
        return
    method, robust, least = f"method {config.method!r}", config.robust, LEAST_DEVICES
    cohort = config.cohort if isinstance(config.cohort, int) else least
    reasons = {
        f"devices = {config.devices}: a sum needs {least} devices at least": config.devices < least,
        f"cohort = {config.cohort}: a sum needs {least} devices at least": cohort < least,
        f"mode = {config.mode!r}: a sum needs the results of one round; set mode = 'rounds'": not config.asks_cohorts(),
        f"late = {config.late!r}: a sum needs the results of one round; set late = 'refuse'": config.late != "refuse",
        f"selection = {config.selection!r} reads the loss of each device; set 'uniform' or 'fair'": (
            config.selection not in READ_NO_ANSWERS
        ),
        f"{method} sends features, which no sum hides; choose a method that averages updates, as 'fedavg'": collects,
        f"{method} needs the update of each device; choose a method that averages updates, as 'fedper'": (
            any(role.is_made_for_device for role in roles)
        ),
        f"{method} averages no tensors, so that there is nothing to add up": Role.SHARED not in roles,
        f"{method}: {why_no_mean}": why_no_mean is not None,
        "privacy.deterministic_noise: devices draw the noise of a sum themselves; leave it out": (
            config.privacy.deterministic_noise
        ),
        **_check_noise(config),
        **_check_codecs(config),
    }
    for key, allowed in (("aggregator", "mean"), ("clip_norm", None), ("reject_scale", None), ("max_weight", None)):
        value = getattr(robust, key)
        reasons[f"robust.{key} = {value!r} compares updates of single devices, which a sum hides; leave it out"] = (
            value != allowed
        )
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError("FV1024", f"secure = true: {reason}")


def _check_codecs(config: RunConfig) -> dict[str, bool]:
    """Return whether a sum cannot have the codecs of updates, by the reason."""
    up, codecs = config.updates.up, " or ".join(repr(name) for name in SUM_CODECS)
    return {
        "updates.up_groups: all numbers of a sum have one form; set updates.up": bool(config.updates.up_groups),
        f"updates.up = {up!r}: a sum has the same numbers of every device; set {codecs}": (
            up != NONE and up not in SUM_CODECS
        ),
        f"updates.up = {up!r}: the noise of [privacy] decides on the integers of a sum; leave it out": (
            up != NONE and bool(config.privacy.noise_multiplier)
        ),
    }


def _check_noise(config: RunConfig) -> dict[str, bool]:
    """Return whether the integers of a sum are fine enough for the noise of one device, by the reason."""
    privacy, sums = config.privacy, config.sums
    if not privacy.noise_multiplier or privacy.clip is None:
        return {}
    noise = SumNoise(privacy.clip, privacy.noise_multiplier)
    degree = choose_degree(config.devices, sums.leaving, sums.neighbours)
    scale = find_range(noise, config.devices, degree)
    terms = SumTerms("", config.devices, degree, sums.bits, scale, noise=noise)
    return {
        f"privacy: noise of one device is below {LEAST_STEPS:g} steps of its integers; raise sums.bits = {sums.bits}": (
            count_noise_steps(terms, config.devices) < LEAST_STEPS
        ),
        f"privacy.clip = {privacy.clip} is out of the range of a sum, 1e-6 to 1e6": not 1e-6
        <= privacy.clip
        <= scale
        <= 1e6,
    }
