"""The settings of a device, made from the flags of `edge-client` and its owner's policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedvit.errors import ConfigError
from fedvit.policy import Policy
from fedvit.small_server import ListenAddress
from fedvit.transport.address import Address
from profiles.probes.host import fast_cores


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of a device."""

    broker: str | None
    data: Path | None
    device: str | None
    state: Path | None
    threads: int
    provider: str
    federation: str | None
    ca_file: Path | None
    test_share: float
    labels: Mapping[str, str]
    vault_key: Path | None
    measures_speed: bool  # at the start, if it is not known yet
    once: bool
    quiet: bool
    metrics_address: ListenAddress | None
    home: Address | None  # the home's own broker, on which the device shows itself
    policy: Policy

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], policy: Policy) -> Self:
        """Return the settings from the parameters of the command line."""
        same = ("broker", "data", "device", "state", "provider", "federation", "ca_file", "test_share", "labels")
        return cls(
            **{name: flags[name] for name in (*same, "vault_key", "once", "quiet", "metrics_address", "home")},
            threads=flags["threads"] or fast_cores(),
            measures_speed=flags["profile"],
            policy=policy,
        )

    @property
    def data_folder(self) -> Path:
        """The folder with images. Raises ConfigError if none is named."""
        if self.data is None:
            raise ConfigError("FV1402", "--data is missing: the folder with this device's images")
        return self.data
