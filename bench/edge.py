"""The real `edge-client` as an observed process: its images, its command line and its memory."""

import re
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from fleet.datasets.samples import ArrayImages, Samples
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.processes import program

SAMPLE_EVERY_S = 0.02


def make_noise_folder(
    out: Path, *, images: int, size: int, classes: int = 2, test_share: float = 0.25, devices: int = 1
) -> Path:
    """Deal images of noise out to device folders, and return the first. Raises StorageFailed."""
    rng = np.random.default_rng(0)
    samples = Samples(
        dataset="noise",
        size=size,
        images=ArrayImages(rng.integers(256, size=(images, size, size, 3), dtype=np.uint8), size),
        labels=np.arange(images) % classes,
        classes=tuple(f"class-{number}" for number in range(classes)),
    )
    shares = partition("iid", samples.labels, devices, seed=0)
    write_device_folders(samples, shares, out, test_share=test_share, seed=0)
    return out / "device-0"


def make_edge_command(broker: str, data: Path, state: Path) -> list[str]:
    """Make the command line of an `edge-client` on all cores that ends with the run."""
    flags = {"--broker": broker, "--data": data, "--state": state, "--id": "device-0"}
    return [*program("edge_client.cli"), *(str(part) for pair in flags.items() for part in pair), "--once"]


def parse_memory(status: str) -> dict[str, int]:
    """Read the sizes in a /proc/PID/status text, in bytes.

    >>> parse_memory("Name:\\tedge\\nVmRSS:\\t  12 kB\\nRssAnon:\\t   4 kB\\nThreads:\\t3\\n")
    {'VmRSS': 12288, 'RssAnon': 4096}
    """
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}


def read_memory(pid: int) -> dict[str, int]:
    """Read the sizes of a process, in bytes; empty when it has ended, and without /proc."""
    try:
        return parse_memory(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return {}


def read_cpu_s(pid: int) -> float:
    """Read the processor time of a process, all threads; 0 when it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


class MemoryWatch:
    """Peaks of some fields of a process's status, sampled from a thread; use as a context manager."""

    def __init__(self, pid: int, *fields: str) -> None:
        self.peaks: dict[str, int] = {}
        self._pid = pid
        self._fields = fields
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            now = read_memory(self._pid)
            for field in self._fields:
                if field in now:
                    self.peaks[field] = max(self.peaks.get(field, 0), now[field])
