"""What this process and machine can say of themselves, on any system. Absent is None, never 0."""

import os
import platform
import sys
from pathlib import Path

import psutil

from fedvit.resources import DeviceProfile


def peak_rss_bytes() -> int | None:
    """The process's resident high-water mark.

    Linux's VmHWM, not getrusage: ru_maxrss survives exec, so a small program started by a large one would
    report its parent's peak.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _peak_rss_by_rusage()
    return parse_vm_hwm(status)


def parse_vm_hwm(status: str) -> int | None:
    """VmHWM of a /proc/PID/status text in bytes.

    >>> parse_vm_hwm("Name:\\tedge\\nVmHWM:\\t  1024 kB\\n")
    1048576
    """
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _peak_rss_by_rusage() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fast_cores(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Of the usable cores those that are about as fast as the fastest: a step waits for the slowest of its threads.

    Boards like the Rock 5 have cores of two kinds. Where the system says nothing of them, all count.
    """
    if not hasattr(os, "sched_getaffinity"):
        return usable_cores()
    cores = sorted(os.sched_getaffinity(0))
    speeds = [_relative_speed(folder / f"cpu{core}") for core in cores]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds):
        return len(cores)
    return sum(speed >= SAME_KIND * max(known) for speed in known)


SAME_KIND = 0.7
"""Share of the fastest core's speed above which a core is of its kind; little cores have a half or less."""


def _relative_speed(core: Path) -> float | None:
    """The kernel's measure of a core's capacity, else its highest clock; None where it has neither."""
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        try:
            return float((core / file).read_text())
        except (OSError, ValueError):
            continue
    return None


def device_profile(threads: int) -> DeviceProfile:
    return DeviceProfile(
        host=platform.node(),
        machine=platform.machine(),
        cores=usable_cores(),
        threads=threads,
        ram_bytes=psutil.virtual_memory().total,
    )
