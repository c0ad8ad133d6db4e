"""Facts about this process and machine, on any system. Unknown is None, never 0."""

import os
import platform
import shutil
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from msgspec import Struct

from fedvit.resources import Budget, DeviceProfile, Speed
from profiles.probes.kernel import ROOT, read_text


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
    """The number of usable cores that are about as fast as the fastest: a step waits for its slowest thread.

    Boards like the Rock 5 have cores of two kinds. If the system has no data on them, all count.
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


# --- what the machine is ------------------------------------------------------------------------------


class HostState(Struct, frozen=True, kw_only=True):
    """A machine and its software. Unknown values are None."""

    name: str
    board: str | None  # as the device tree names it, else the maker's words of the firmware
    machine: str  # x86_64, aarch64, ...
    processor: str | None
    cores: int  # that may be used
    os: str | None
    kernel: str
    libc: str | None
    python: str
    engine: str | None  # onnxruntime's package: those for GPUs have other names
    engine_version: str | None
    ram_bytes: int | None
    available_bytes: int | None  # of the RAM, without swapping
    swap_bytes: int | None  # 0: there is none


def host(root: Path = ROOT) -> HostState:
    """Facts that need no measurement; files are read below `root`."""
    engine, engine_version = find_engine()
    memory = _memory(root)
    libc = " ".join(platform.libc_ver()).strip()
    return HostState(
        name=platform.node(),
        board=board(root),
        machine=platform.machine(),
        processor=_processor(root),
        cores=usable_cores(),
        os=_system(root),
        kernel=read_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        libc=libc or None,
        python=platform.python_version(),
        engine=engine,
        engine_version=engine_version,
        ram_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        swap_bytes=memory.get("SwapTotal"),
    )


def board(root: Path = ROOT) -> str | None:
    """The board's model: "Raspberry Pi 5 Model B Rev 1.0"; on a PC its maker and product."""
    for place in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        if model := read_text(root / place):
            return model
    folder = root / "sys/class/dmi/id"
    for names in (("sys_vendor", "product_name"), ("board_vendor", "board_name")):
        texts = [text for name in names if (text := read_text(folder / name)) and text.lower() not in _FILLERS]
        if len(texts) == len(names):
            return " ".join(texts)
    return None


_FILLERS = {"to be filled by o.e.m.", "default string", "system manufacturer", "system product name", "none", "o.e.m."}
"""Placeholders of makers in the firmware."""


_KINDS = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x4e", "0x003"): "Denver",
    ("0x4e", "0x004"): "Carmel",
}
"""Processors of boards in the catalogue, by the numbers of maker and part that they have in /proc/cpuinfo."""


def _processor(root: Path) -> str | None:
    """Return the processor's name from /proc/cpuinfo. ARM kernels give numbers for each core; cores may differ."""
    kinds: dict[str, None] = {}  # in their order, each once
    maker = ""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, value = (part.strip() for part in line.partition(":")[::2])
        if name == "model name" and value:
            return value
        if name == "CPU implementer":
            maker = value
        if name == "CPU part" and (kind := _KINDS.get((maker, value))):
            kinds[kind] = None
    return ", ".join(kinds) or None


def _system(root: Path) -> str | None:
    for place in ("etc/os-release", "usr/lib/os-release"):
        for line in (read_text(root / place) or "").splitlines():
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip().strip("\"'") or None
    return None


def _memory(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes; where there is none, what psutil finds."""
    if (text := read_text(root / "proc/meminfo")) is not None:
        rows = (line.replace(":", " ").split() for line in text.splitlines())
        return {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
    if root != ROOT:
        return {}
    memory = psutil.virtual_memory()
    return {"MemTotal": memory.total, "MemAvailable": memory.available, "SwapTotal": psutil.swap_memory().total}


ENGINES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-qnn")


def list_engines() -> dict[str, str]:
    """Return the versions of the installed packages of onnxruntime by their names, without an import."""
    found = {}
    for name in ENGINES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def find_engine() -> tuple[str | None, str | None]:
    """Return the name and version of the installed package of onnxruntime."""
    return next(iter(list_engines().items()), (None, None))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Cached, as creating it is slow; by its pid, because a fork is another process."""
    return psutil.Process(pid)


def forget_peak() -> bool:
    """Reset the high-water mark of this process to its current resident memory; False if the system refuses.

    Linux: 5 written to /proc/self/clear_refs. The mark belongs to the whole process: only its owner may reset it.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def free_disk_bytes(folder: Path) -> int | None:
    """Free for this user on the disk that holds `folder`, or will hold it when it is made."""
    place = next((one for one in (folder, *folder.resolve().parents) if one.exists()), None)
    try:
        return None if place is None else shutil.disk_usage(place).free
    except OSError:
        return None


def device_profile(
    threads: int,
    state: Path | None = None,
    *,
    speed: Speed | None = None,
    budget: Budget | None = None,
    base_rss_bytes: int | None = None,
    feature_bytes: int | None = None,
) -> DeviceProfile:
    """The profile for the device's hello; to be called when the process is ready, before any task."""
    return DeviceProfile(
        host=platform.node(),
        machine=platform.machine(),
        cores=usable_cores(),
        threads=threads,
        ram_bytes=_memory(ROOT).get("MemTotal"),
        board=board(),
        base_rss_bytes=base_rss_bytes or resident_bytes(),
        free_disk_bytes=free_disk_bytes(state) if state else None,
        speed=speed,
        budget=budget or Budget(),
        feature_bytes=feature_bytes,
    )
