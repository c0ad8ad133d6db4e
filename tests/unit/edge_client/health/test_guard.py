"""A task under watch: real memory, real files of a board, and budgets that are kept or not."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edge_client.health.guard import LEAST_STEPS, Guard, Guarded, Tally
from fedvit.resources import Budget, BudgetKind
from fedvit.wire.messages import TaskKind
from profiles.probes.host import resident_bytes
from profiles.probes.meter import Sensors
from tests.support.boards import orin_nano, pi_4, write_tree
from tests.support.waiting import wait_until

MIB = 2**20


def watching(kind: TaskKind = "train", **budget: float) -> Guarded:
    return Guard(Budget(**budget)).watching(kind)  # type: ignore[arg-type]


# --- the tally ----------------------------------------------------------------------------------------


def test_sustained_is_the_last_tenth_by_the_first() -> None:
    # sustained is the last tenth by the first: 30 steps: medians of the first and last three are 2 and 3 s
    tally = Tally(phases=[[1.0, 2.0, 9.0, *[5.0] * 24, 9.0, 3.0, 1.0]])
    assert tally.sustained == 1.5
    assert tally.steps == 30
    assert tally.step_s == 5.0
    # sustained is that of the longest phase: Steps of different phases are different work: 40 s of ones, then 10 s
    # of steps that double
    tally = Tally(phases=[[1.0] * 40, [0.25] * 20 + [0.5] * 10])
    assert tally.sustained == 1.0
    assert Tally(phases=[[1.0] * (LEAST_STEPS - 1)]).sustained is None
    assert Tally(phases=[[1.0] * LEAST_STEPS]).sustained == 1.0
    assert (Tally().sustained, Tally().step_s, Tally().steps) == (None, None, 0)


# --- budgets ------------------------------------------------------------------------------------------


def test_without_budgets_nothing_is_exceeded() -> None:
    with watching() as guarded:
        guarded.tally.flops = 10**18
        guarded.upload_bytes = 10**12
        assert not guarded.over()
    assert guarded.broke == ()
    use = guarded.use()
    assert (use.flops, use.energy_j, use.temperature_c, use.throttled, use.broke) == (10**18, None, None, None, ())
    assert use.peak_rss_bytes is not None


def test_memory_that_a_step_takes_is_seen_while_it_runs() -> None:
    """Filled and freed by another thread than the guard's, without anybody asking meanwhile.

    A busy system may take memory of this process meanwhile: what is filled is much more than what is asserted.
    """
    limit = resident_bytes() + 50 * MIB
    with watching(memory_bytes=limit) as guarded:
        assert not guarded.over()
        filled = np.ones(300 * MIB, np.uint8)
        wait_until(lambda: guarded.broke == ("memory",))
        del filled
    use = guarded.use()
    assert use.broke == ("memory",)
    assert use.peak_rss_bytes is not None
    assert use.peak_rss_bytes >= limit + 40 * MIB
    assert f"the memory budget is {limit / 1e6:.1f} MB" in guarded.reason()
    assert f"resident memory reached {use.peak_rss_bytes / 1e6:.1f} MB" in guarded.reason()
    assert f"alone take {(guarded._guard.base_bytes or 0) / 1e6:.1f} MB" in guarded.reason()


def test_a_budget_below_the_program_itself_is_said_so() -> None:
    with watching(memory_bytes=MIB) as guarded:
        assert guarded.over()
    assert "the program and its engine alone take" in guarded.reason()
    assert "the memory budget is 1.0 MB: no task can keep it" in guarded.reason()


def test_the_base_is_that_before_the_first_task() -> None:
    """What later tasks find is not blamed on the program."""
    guard = Guard(Budget(memory_bytes=10**12))
    guard.watching("train")
    base = guard.base_bytes
    filled = np.ones(50 * MIB, np.uint8)
    guard.watching("train")
    assert guard.base_bytes == base
    del filled


@pytest.mark.parametrize(
    ("budget", "broke", "words"),
    [
        ({"round_deadline_s": 0.01}, "time", "the deadline of a round on this device is 10 ms"),
        ({"flops_per_round": 999}, "flops", "training took 1000 FLOPs with 0 steps, the budget of a round is 999"),
        ({"upload_bytes": 4}, "upload", "the result has 5 bytes, the upload budget is 4 (4 B)"),
    ],
)
def test_what_training_may_take(budget: dict[str, float], broke: BudgetKind, words: str) -> None:
    with watching(**budget) as guarded:
        guarded.tally.flops, guarded.upload_bytes = 1000, 5
        wait_until(guarded.over)
    assert guarded.broke == (broke,)
    assert words in guarded.reason()
    assert guarded.use().broke == (broke,)


def test_an_evaluation_has_no_deadline_and_no_budget_of_work() -> None:
    with watching("evaluate", round_deadline_s=1e-9, flops_per_round=1) as guarded:
        guarded.tally.flops = 1000
        assert not guarded.over()
    assert watching("evaluate", memory_bytes=1).over()


def test_several_budgets_are_all_named() -> None:
    with watching(flops_per_round=1, upload_bytes=1) as guarded:
        guarded.tally.flops = 2
        assert guarded.over()
        guarded.upload_bytes = 2
        assert guarded.over()
    assert guarded.broke == ("flops", "upload")
    assert guarded.reason().count("; ") == 1


def test_a_processor_that_becomes_too_hot(tmp_path: Path) -> None:
    root = pi_4(tmp_path)
    guard = Guard(temperature_limit_c=80.0, sensors=Sensors.find(root))
    with guard.watching("evaluate") as guarded:
        assert not guarded.over()
        write_tree(root, {"sys/class/thermal/thermal_zone0/temp": "81500\n"})
        wait_until(guarded.over)
    assert guarded.broke == ("temperature",)
    assert guarded.reason() == "the processor was at 81.5 C, the limit of this device is 80.0 C"
    use = guarded.use()
    assert (use.temperature_c, use.throttled, use.energy_j, use.energy_source) == (81.5, False, None, None)


def test_energy_is_that_of_the_task(tmp_path: Path) -> None:
    """5.02 W of an Orin for at least 0.05 s."""
    with Guard(sensors=Sensors.find(orin_nano(tmp_path))).watching("train") as guarded:
        time.sleep(0.05)
    use = guarded.use()
    assert use.energy_source == "ina3221 VDD_IN"
    assert use.energy_j is not None
    assert use.energy_j >= 0.25


# --- whose peak it is ---------------------------------------------------------------------------------

PEAKS = """
import sys
from edge_client.health.guard import Guard
from fedvit.resources import Budget

def task(guard, mib, kind="train"):
    with guard.watching(kind) as guarded:
        filled = bytearray(b"x" * (mib * 2**20))
        guarded.over()
        del filled
    return guarded.use().peak_rss_bytes

guard = Guard(owns_process=sys.argv[1] == "own")
print(*(task(guard, mib) for mib in (200, 20, 300)))
"""


@pytest.mark.parametrize("process", ["own", "shared"])
def test_the_peak_is_that_of_the_task(process: str) -> None:
    """200, 20 and 300 MiB, one after the other: the second task is not charged with the first one's peak.

    In a process of its own the mark of the process begins anew; in a shared one it must stay, and the highest that
    was seen counts.
    """
    done = subprocess.run([sys.executable, "-c", PEAKS, process], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = map(int, done.stdout.split())
    assert first > 200 * MIB
    assert 20 * MIB < second < first - 150 * MIB
    assert third > first + 90 * MIB


def test_use_has_the_charge_of_a_battery(tmp_path: Path) -> None:
    supply = "sys/class/power_supply/BAT0"
    tree = {f"{supply}/type": "Battery", f"{supply}/capacity": "81", f"{supply}/status": "Discharging"}
    with Guard(sensors=Sensors.find(write_tree(tmp_path / "with", tree))).watching("train") as guarded:
        use = guarded.use()
    assert (use.battery_percent, use.charging) == (81, False)
    with Guard(sensors=Sensors.find(pi_4(tmp_path / "without"))).watching("train") as guarded:
        use = guarded.use()
    assert (use.battery_percent, use.charging) == (None, None)
