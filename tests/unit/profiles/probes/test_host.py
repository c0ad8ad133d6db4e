import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from profiles.probes.host import device_profile, parse_vm_hwm, peak_rss_bytes, usable_cores

MIB = 2**20

STATUS = """\
Name:\tedge-client
Umask:\t0022
State:\tS (sleeping)
Tgid:\t16417
VmPeak:\t  586920 kB
VmSize:\t  586916 kB
VmLck:\t       0 kB
VmPin:\t       0 kB
VmHWM:\t   76404 kB
VmRSS:\t   76132 kB
RssAnon:\t   40040 kB
Threads:\t11
"""
"""Lines of /proc/PID/status of an edge client on x86-64, Linux 6.1; the format is the same on every architecture."""


def in_child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_high_water_mark_is_read() -> None:
    """76 404 kB (the kernel means KiB) are 78 237 696 bytes; neither VmPeak (address space) nor VmRSS (now)."""
    assert parse_vm_hwm(STATUS) == 78_237_696


@pytest.mark.parametrize("status", ["", "Name:\tkthreadd\nThreads:\t1\n", "NotVmHWM:\t5 kB\n"])
def test_a_status_without_it_says_nothing(status: str) -> None:
    """A kernel thread has none; None, not 0."""
    assert parse_vm_hwm(status) is None


def test_the_peak_is_this_process_own() -> None:
    """A parent fills 300 MiB and starts a child that only imports the probe: the parent's peak is at least 300 MiB,
    the child's is not. getrusage would report the parent's, for it survives exec."""
    child = "from profiles.probes.host import peak_rss_bytes; print(peak_rss_bytes())"
    parent = f"""
import subprocess, sys
from profiles.probes.host import peak_rss_bytes
filled = bytearray(b"x" * (300 * 2**20))
child = subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True)
print(peak_rss_bytes(), child.stdout.strip())
"""
    own, childs = map(int, in_child(parent).split())
    assert own >= 300 * MIB
    assert 5 * MIB < childs < 150 * MIB


def test_the_peak_stays_when_memory_is_given_back() -> None:
    """200 MiB are filled and freed: the peak remembers, the resident size does not."""
    code = """
import psutil
from profiles.probes.host import peak_rss_bytes
before = peak_rss_bytes()
filled = bytearray(b"x" * (200 * 2**20))
del filled
print(before, peak_rss_bytes(), psutil.Process().memory_info().rss)
"""
    before, peak, now = map(int, in_child(code).split())
    assert peak >= before + 190 * MIB
    assert now < peak - 150 * MIB


def test_the_peak_of_the_tests_themselves() -> None:
    """At least what is resident now."""
    now = psutil.Process().memory_info().rss
    peak = peak_rss_bytes()
    assert peak is not None
    assert peak >= now


def test_cores_are_those_that_may_be_used() -> None:
    """A process that is bound to one core has one, however many the machine has."""
    assert usable_cores() == len(os.sched_getaffinity(0))
    core = min(os.sched_getaffinity(0))
    code = f"""
import os
from profiles.probes.host import usable_cores
os.sched_setaffinity(0, {{{core}}})
print(usable_cores())
"""
    assert in_child(code) == "1"


def test_the_profile_of_this_machine() -> None:
    profile = device_profile(3)
    assert (profile.host, profile.machine, profile.threads) == (platform.node(), platform.machine(), 3)
    assert profile.cores == usable_cores()
    first, total_kib, _ = Path("/proc/meminfo").read_text().splitlines()[0].split()
    assert first == "MemTotal:"
    assert profile.ram_bytes == int(total_kib) * 1024
