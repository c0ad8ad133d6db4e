"""The settings of a device: the limits and conditions that its owner sets."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedvit.errors import ConfigError
from fedvit.monitoring import ListenAddress
from fedvit.resources import Budget
from profiles.probes.host import fast_cores


class Hours(NamedTuple):
    """A part of each day by the device's own clock; it may span midnight."""

    first: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Raises ConfigError.

        >>> Hours.parse("22:00-06:30").end
        datetime.time(6, 30)
        """
        match = re.fullmatch(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", text.strip())
        try:
            if match is None:
                raise ValueError
            numbers = [int(number) for number in match.groups()]
            hours = cls(datetime.time(numbers[0], numbers[1]), datetime.time(numbers[2], numbers[3]))
        except ValueError:
            raise ConfigError(
                "FV1416", f"quiet hours {text!r} must be written HH:MM-HH:MM, as in 22:00-06:30"
            ) from None
        if hours.first == hours.end:
            raise ConfigError("FV1416", f"quiet hours {text!r}: start and end are equal")
        return hours

    def remaining_s(self, now: datetime.datetime) -> float:
        """Return the seconds until they end; 0 outside of them."""
        time = now.time()
        inside = self.first <= time < self.end if self.first < self.end else time >= self.first or time < self.end
        if not inside:
            return 0.0
        end = datetime.datetime.combine(now.date(), self.end, now.tzinfo)
        if end <= now:
            end += datetime.timedelta(days=1)
        return (end - now).total_seconds()


@dataclass(frozen=True, kw_only=True)
class OwnerPolicy:
    """The limits and conditions that the owner of a device sets. None: no limit."""

    budget: Budget = field(default_factory=Budget)
    disk_budget_bytes: int | None = None
    temperature_limit_c: float | None = None  # a task is stopped above it
    start_limit_c: float | None = None  # a task is declined above it
    min_battery_percent: int | None = None  # a task is declined below it, while no charger is connected
    busy_file: Path | None = None  # a task is declined while it exists
    quiet_hours: Hours | None = None  # tasks are declined
    keep_runs: int | None = None  # vaults of older runs that are over are removed
    sends_logs: bool = True  # with the failure of a task
    counts_classes: bool = True  # in the result of an evaluation


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of a device, made from the flags of `edge-client`."""

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
    policy: OwnerPolicy

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Return the settings from the parameters of the command line. Raises ConfigError."""
        policy = OwnerPolicy(
            budget=Budget(
                memory_bytes=flags["memory_budget"],
                flops_per_round=flags["flops_budget"],
                round_deadline_s=flags["round_deadline"],
                upload_bytes=flags["upload_budget"],
            ),
            disk_budget_bytes=flags["disk_budget"],
            temperature_limit_c=flags["temperature_limit"],
            start_limit_c=flags["max_temperature"],
            min_battery_percent=flags["min_battery"],
            busy_file=flags["busy_file"],
            quiet_hours=Hours.parse(flags["quiet_hours"]) if flags["quiet_hours"] else None,
            keep_runs=flags["keep_runs"],
            sends_logs=flags["sends_logs"],
            counts_classes=flags["counts_classes"],
        )
        same = ("broker", "data", "device", "state", "provider", "federation", "ca_file", "test_share", "labels")
        return cls(
            **{name: flags[name] for name in (*same, "vault_key", "once", "quiet", "metrics_address")},
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
