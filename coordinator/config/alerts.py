"""The table [alerts]."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from fedvit.errors import ConfigError


class AlertsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts of a run are sent: the table [alerts]. It has no influence on training."""

    webhook: Annotated[
        str | None,
        Meta(
            description="Address that receives alerts as JSON: a device is gone or refused, the run is paused or has "
            "stopped. By default FEDVIT_ALERTS_WEBHOOK of the environment, which is not recorded."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.webhook is None:
            return
        parts = urlsplit(self.webhook)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"webhook = {self.webhook!r} must be an address that begins with http:// or https://")
        if "@" in parts.netloc:
            raise ConfigError(
                "webhook contains a user or password, and would be recorded with the run: set FEDVIT_ALERTS_WEBHOOK in "
                "the environment"
            )
