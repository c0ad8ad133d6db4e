"""The table [alerts]."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from fedvit.errors import ConfigError


class AlertsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of a run's alerts: the table [alerts]. It has no influence on training."""

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
        check_webhook(self.webhook, "webhook")
        if "@" in urlsplit(self.webhook).netloc:
            raise ConfigError(
                "FV1020",
                "webhook contains a user or password, and would be recorded with the run: set FEDVIT_ALERTS_WEBHOOK in "
                "the environment",
            )


def check_webhook(address: str, name: str) -> None:
    """Raise ConfigError unless alerts can be posted to an address. The error does not quote it: it may be a secret."""
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not fit, a port that is not a number
        valid = False
    if not valid or not address.isascii() or not address.isprintable() or " " in address:
        raise ConfigError(
            "FV1020",
            f"{name} must be an address that begins with http:// or https:// and a host; its value may be secret "
            "and is not shown",
        )
