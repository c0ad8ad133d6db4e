import os
import platform
from pathlib import Path

import psutil
import pytest

from fedvit.resources import Budget
from profiles.probes.host import board, device_profile, host, parse_vm_hwm, peak_rss_bytes, usable_cores
from tests.support.boards import jetson_nano, pi_4, write_tree, x86
from tests.support.children import in_child

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
    assert in_child(code).strip() == "1"


def test_the_profile_of_this_machine() -> None:
    profile = device_profile(3)
    assert (profile.host, profile.machine, profile.threads) == (platform.node(), platform.machine(), 3)
    assert profile.cores == usable_cores()
    first, total_kib, _ = Path("/proc/meminfo").read_text().splitlines()[0].split()
    assert first == "MemTotal:"
    assert profile.ram_bytes == int(total_kib) * 1024
    assert profile.base_rss_bytes is not None
    assert 10 * MIB < profile.base_rss_bytes < profile.ram_bytes
    assert (profile.speed, profile.budget, profile.free_disk_bytes) == (None, Budget(), None)


def test_free_disk_is_that_of_the_state_even_before_it_is_made(tmp_path: Path) -> None:
    profile = device_profile(1, tmp_path / "not" / "yet", budget=Budget(upload_bytes=5))
    assert profile.free_disk_bytes is not None
    assert profile.free_disk_bytes > MIB
    assert profile.budget == Budget(upload_bytes=5)


def test_the_peak_can_begin_anew() -> None:
    """200 MiB are filled and freed; where the system lets the mark be reset, it is what is resident now."""
    code = """
from profiles.probes.host import forget_peak, peak_rss_bytes
filled = bytearray(b"x" * (200 * 2**20))
del filled
before = peak_rss_bytes()
print(before, peak_rss_bytes() if forget_peak() else before - 200 * 2**20)
"""
    before, after = map(int, in_child(code).split())
    assert before > 200 * MIB
    assert after < before - 150 * MIB


# --- boards -------------------------------------------------------------------------------------------


def test_a_pi_says_what_it_is(tmp_path: Path) -> None:
    """3884396 KiB are 3 977 621 504 bytes."""
    found = host(pi_4(tmp_path))
    assert (found.board, found.os) == ("Raspberry Pi 4 Model B Rev 1.4", "Debian GNU/Linux 12 (bookworm)")
    assert (found.ram_bytes, found.available_bytes, found.swap_bytes) == (3977621504, 3494092800, 104853504)
    assert found.kernel == "6.6.31+rpt-rpi-v8"
    assert found.processor == "Cortex-A72"
    assert (found.name, found.python) == (platform.node(), platform.python_version())
    assert found.engine == "onnxruntime"
    assert found.engine_version is not None


def test_a_jetson_says_what_it_is(tmp_path: Path) -> None:
    assert board(jetson_nano(tmp_path)) == "NVIDIA Jetson Nano Developer Kit"


def test_a_board_has_several_kinds_of_processors(tmp_path: Path) -> None:
    """Those that are not known go without a name."""
    cores = [("0x41", "0xd05"), ("0x41", "0xd05"), ("0x41", "0xd0b"), ("0x99", "0xd08")]
    lines = [f"CPU implementer\t: {maker}\nCPU part\t: {part}\n\n" for maker, part in cores]
    write_tree(tmp_path, {"proc/cpuinfo": "".join(lines)})
    assert host(tmp_path).processor == "Cortex-A55, Cortex-A76"


def test_a_pc_is_named_by_its_firmware(tmp_path: Path) -> None:
    found = host(x86(tmp_path))
    assert (found.board, found.processor) == ("LENOVO 20XW0055GE", "11th Gen Intel(R) Core(TM) i7")
    assert (found.os, found.ram_bytes, found.swap_bytes) == ("Ubuntu 24.04.2 LTS", None, None)


def test_what_a_maker_left_empty_is_no_name(tmp_path: Path) -> None:
    dmi = "sys/class/dmi/id"
    write_tree(tmp_path, {f"{dmi}/sys_vendor": "To Be Filled By O.E.M.\n", f"{dmi}/product_name": "Default string\n"})
    assert board(tmp_path) is None
    write_tree(tmp_path, {f"{dmi}/board_vendor": "ASRock\n", f"{dmi}/board_name": "N100M\n"})
    assert board(tmp_path) == "ASRock N100M"
