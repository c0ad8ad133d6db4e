"""The memory of both processes of a device, with real ones."""

import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edge_client.health.memory import SharedMemory
from profiles.probes.host import resident_bytes

MIB = 1 << 20
SIZE = 96 * MIB
SLACK = 24 * MIB
CHILD = f"""
import mmap, sys
held = None
print("ready", flush=True)
for line in sys.stdin:
    if held:
        held.close()
    held = None
    if line == "grow\\n":
        held = mmap.mmap(-1, {SIZE})
        held.write(bytes({SIZE}))
    print("done", flush=True)
"""


class Child:
    """A process that takes and frees memory when it is told to."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", CHILD]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def tell(self, what: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.fixture
def memory(child: Child) -> SharedMemory:
    memory = SharedMemory()
    memory.add(child.process.pid)
    assert memory.forget_peak()
    return memory


def take() -> mmap.mmap:
    """Take SIZE bytes of this process's memory."""
    held = mmap.mmap(-1, SIZE)
    held.write(bytes(SIZE))
    return held


def test_memory_of_both_processes_counts(child: Child, memory: SharedMemory) -> None:
    before_bytes = memory.resident_bytes()
    child.tell("grow")
    with take():
        assert memory.resident_bytes() == pytest.approx(before_bytes + 2 * SIZE, abs=SLACK)
    child.tell("shrink")
    assert memory.resident_bytes() == pytest.approx(before_bytes, abs=SLACK)


def test_the_peak_is_that_of_both_at_one_time(child: Child, memory: SharedMemory) -> None:
    """The other process has freed its memory when this one needs as much."""
    before_bytes = memory.resident_bytes()
    child.tell("grow")
    child.tell("shrink")
    assert memory.peak_bytes() == pytest.approx(before_bytes + SIZE, abs=SLACK)
    with take():
        assert memory.peak_bytes() == pytest.approx(before_bytes + SIZE, abs=SLACK)
        assert memory.forget_peak()
        assert memory.peak_bytes() == pytest.approx(before_bytes + SIZE, abs=SLACK)
        child.tell("grow")
        assert memory.peak_bytes() == pytest.approx(before_bytes + 2 * SIZE, abs=SLACK)


def test_a_forgotten_peak_does_not_count(child: Child, memory: SharedMemory) -> None:
    before_bytes = memory.resident_bytes()
    child.tell("grow")
    child.tell("shrink")
    assert memory.peak_bytes() >= before_bytes + SIZE - SLACK
    assert memory.forget_peak()
    assert memory.peak_bytes() == pytest.approx(before_bytes, abs=SLACK)


def test_a_process_that_replaces_another_counts(child: Child, memory: SharedMemory) -> None:
    child.tell("grow")
    peak_bytes = memory.peak_bytes()
    child.end()
    memory.remove()
    assert memory.peak_bytes() != peak_bytes  # of this process alone
    assert abs(memory.resident_bytes() - resident_bytes()) <= SLACK
    other = Child()
    try:
        memory.add(other.process.pid)
        other.tell("grow")
        assert memory.peak_bytes() == pytest.approx(peak_bytes, abs=SLACK)
    finally:
        other.end()
    assert memory.forget_peak() is False
