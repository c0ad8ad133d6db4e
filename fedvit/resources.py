"""The words in which both sides speak of what training costs; units are in the names.

A missing measurement is None, never 0.
"""

from msgspec import Struct


class ResourceUse(Struct, frozen=True, kw_only=True):
    """What one task really cost a device, as measured on that device."""

    train_s: float | None = None  # wall time of the task's work, without transfers
    step_s: float | None = None  # median wall time of one training step
    steps: int = 0
    flops: int | None = None  # forward and backward, counted from the graphs that ran
    peak_rss_bytes: int | None = None  # the process's high-water mark since it started
    received_bytes: int | None = None  # payload bytes since the process started
    sent_bytes: int | None = None


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """What a device says about itself when it joins."""

    host: str
    machine: str  # x86_64, aarch64, ...
    cores: int
    threads: int  # how many of them training may use
    ram_bytes: int | None = None
