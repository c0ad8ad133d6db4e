"""A run's configuration as a TOML file that `coordinator start --config` takes."""

from typing import Any

import msgspec
import tomli_w

from coordinator.config.run import RunConfig

FILE = "run.toml"
"""In a run's folder."""


def as_toml(run: str, config: RunConfig) -> str:
    """All keys of the configuration, except unset keys without a default."""
    head = f"# The configuration of run {run}. Another run like it: coordinator start --config {FILE}\n\n"
    return head + tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
