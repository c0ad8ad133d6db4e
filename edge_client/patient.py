"""Whom `edge-client doctor` looks at, and what it says of it."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec import Struct

from edge_client.identity import Identity
from fedvit.resources import Budget
from fedvit.transport.mqtt import Address
from fedvit.wire.topics import Topics
from profiles.probes.kernel import ROOT

DAY_S = 86400.0

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""In this order they are the program's exit codes: 0, 1, 2."""


class Finding(Struct, frozen=True, kw_only=True):
    """What a check found, and what whoever runs the device can do about it."""

    check: str
    level: Level
    what: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Patient:
    """A device as it would be started."""

    address: Address
    topics: Topics
    device: str
    state: Path | None
    data: Path | None
    test_share: float
    budget: Budget = field(default_factory=Budget)
    temperature_limit_c: float | None = None
    most_celsius: float | None = None  # tasks are declined above it
    least_battery: int | None = None  # percent; tasks are declined below it
    vault_key: Path | None = None
    identity: Identity | None = None  # None: it goes to a broker without having joined
    identity_folder: Path | None = None
    root: Path = ROOT
    interpreter: str = sys.executable
    now_s: float = field(default_factory=time.time)
    software_s: float = field(default_factory=lambda: Path(__file__).stat().st_mtime)  # when this was installed
