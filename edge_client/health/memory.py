"""Memory that the work of a device takes, as its budget counts it."""

from contextlib import suppress
from pathlib import Path

import psutil

from profiles.predict import LOADED_BYTES
from profiles.probes.host import forget_peak, parse_vm_hwm, peak_rss_bytes, resident_bytes


class OwnMemory:
    """Resident memory of this process."""

    def resident_bytes(self) -> int:
        return resident_bytes()

    def peak_bytes(self) -> int | None:
        """Return the high-water mark; None if the system has none."""
        return peak_rss_bytes()

    def forget_peak(self) -> bool:
        """Reset the high-water mark to the memory of now; False if the system refuses."""
        return forget_peak()


class SharedMemory(OwnMemory):
    """Resident memory of this process and of one that was forked from it; pages of both count once."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._counted_twice_bytes = 0
        self._mark_bytes = self._peak_bytes = 0

    def add(self, pid: int) -> None:
        """Count a process that has loaded its engine, and waits for its first work."""
        with suppress(psutil.Error):
            self._process, self._mark_bytes = psutil.Process(pid), 0
            full = self._process.memory_full_info()
            self._counted_twice_bytes = max(0, full.rss - full.uss - LOADED_BYTES)

    def remove(self) -> None:
        """Count this process alone."""
        self._process, self._counted_twice_bytes = None, 0
        self._mark_bytes = self._peak_bytes = 0

    def resident_bytes(self) -> int:
        total = resident_bytes()
        with suppress(psutil.Error):
            if self._process:
                total += max(0, int(self._process.memory_info().rss) - self._counted_twice_bytes)
        return total

    def peak_bytes(self) -> int | None:
        if (process := self._process) is None:
            return super().peak_bytes()
        with suppress(OSError):
            if mark := parse_vm_hwm(Path(f"/proc/{process.pid}/status").read_text()):
                if mark > self._mark_bytes:  # this process needs most when the other one has ended its work
                    both_bytes = resident_bytes() + max(0, mark - self._counted_twice_bytes)
                    self._mark_bytes, self._peak_bytes = mark, max(self._peak_bytes, both_bytes)
                return self._peak_bytes
        return None

    def forget_peak(self) -> bool:
        if (process := self._process) is None:
            return super().forget_peak()
        with suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            self._mark_bytes = self._peak_bytes = 0
            return True
        return False
