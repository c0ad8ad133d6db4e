"""The input of the checks of `edge-client doctor`, and their findings."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from edge_client.link.identity import Identity
from fedvit.policy import Policy
from fedvit.transport.address import Address
from fedvit.wire.topics import Topics
from profiles.probes.kernel import ROOT

DAY_S = 86400.0
MOST_DECODED = 100
"""Images that are decoded on trial by default: some seconds on a Raspberry Pi."""

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""The index of a level is the exit code of the program."""


class Finding(Struct, frozen=True, kw_only=True):
    """The outcome of a check, with a hint for the device's operator."""

    check: str
    level: Level
    what: str
    hint: str | None = msgspec.field(default=None, name="remedy")


@dataclass(frozen=True, kw_only=True)
class DoctorContext:
    """The device that is checked, with the options that it would be started with."""

    address: Address
    topics: Topics
    device: str
    state: Path | None
    data: Path | None
    test_share: float
    decoded_images: int | None = MOST_DECODED  # images that are decoded on trial; None: all
    policy: Policy = field(default_factory=Policy)
    vault_key: Path | None = None
    identity: Identity | None = None  # None: the device has not joined a deployment
    identity_folder: Path | None = None
    root: Path = ROOT
    interpreter: str = sys.executable
    now_s: float = field(default_factory=time.time)
    software_s: float = field(default_factory=lambda: Path(__file__).stat().st_mtime)  # time of installation
