"""The options of `coordinator start`, with the configuration that they name.

This module imports neither the record nor numpy: a wrong value of a flag is reported before they are loaded.
"""

import secrets
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from coordinator.config import RunConfig, StartConfig, check_settings, make_config, merge_flags, read_toml
from fedvit.errors import ConfigError

if TYPE_CHECKING:
    from fedvit.small_server import ListenAddress


@dataclass(frozen=True)
class StartRequest:
    """A run as the operator asks for it. `values` are those of the file and the flags, `where` names the source."""

    values: dict[str, Any]
    where: str
    config: StartConfig  # of a new run
    folder: Path  # of all runs
    url: str | None  # of the record
    resume: str | None
    name: str | None
    resume_or_new: bool
    only_check: bool
    quiet: bool
    metrics_address: "ListenAddress | None"

    @classmethod
    def from_flags(cls, options: dict[str, Any]) -> Self:
        """Take the options of the command; all others are keys of the configuration. Raises ConfigError."""
        own = {field.name: options[field.name] for field in fields(cls) if field.name in options}
        file = options["file"]
        flags = {key: value for key, value in options.items() if key not in own and key != "file"}
        values = merge_flags(read_toml(file) if file else {}, flags)
        if own["resume_or_new"] and (own["name"] is None or own["resume"] is not None):
            raise ConfigError(
                "FV1614",
                "--resume-or-new needs the name of the run by --run NAME, and cannot be combined with --resume",
            )
        where = str(file) if file else "flags"
        config = make_config(values, where)
        check_settings(config.run, where)
        return cls(values=values, where=where, config=config, **own)


def usual_name(config: RunConfig) -> str:
    """Return a new name: date, time and method."""
    return f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{config.method}-{secrets.token_hex(2)}"
