"""The machine, by its file tree and by engines that die."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edge_client.health.doctor_context import DoctorContext
from edge_client.health.machine_checks import (
    check_battery,
    check_clock,
    check_disk,
    check_engine,
    check_heat,
    check_kernels,
    check_memory,
    check_sandbox,
    check_training,
)
from fedvit.policy import Policy, TrainPolicy
from fedvit.transport.address import Address
from tests.support.boards import pi_5, write_tree
from tests.support.doctors import levels
from tests.support.kernels import compiled, kernels_in


def dying(tmp_path: Path, script: str) -> str:
    """An interpreter that does this whatever it is asked."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


ILLEGAL = "kill -ILL $$"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "onnxruntime 1."),
        (ILLEGAL, "illegal instruction"),
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("echo 'ImportError: GLIBC_2.28 not found' >&2; exit 1", "ImportError: GLIBC_2.28 not found"),
    ],
)
def test_the_engine(context: DoctorContext, tmp_path: Path, script: str | None, words: str) -> None:
    """It runs on this machine, or its process dies."""
    [found] = check_engine(replace(context, interpreter=dying(tmp_path, script)) if script else context)
    assert found.level == ("error" if script else "ok")
    assert words in found.what
    assert ("ARMv8.0" in str(found.hint)) == (script == ILLEGAL)


def test_two_engines_in_one_place(context: DoctorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages for a processor and for a GPU have the same files; the newer one has written over the other's."""
    metadata = tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = check_engine(context)
    assert found.level == "error"
    assert "onnxruntime-gpu 1.31.1 are installed" in found.what
    assert "pip uninstall onnxruntime onnxruntime-gpu" in str(found.hint)


@pytest.mark.parametrize(
    ("script", "level", "words"),
    [
        (None, "ok", "without network, keys and files to write"),
        ("echo Landlock", "warning", "no Landlock for this processor: graphs can read files"),
        ("echo seccomp", "warning", "not kept from the network"),
        ("exit 1", "error", "cannot be tried"),
    ],
)
def test_the_sandbox(context: DoctorContext, tmp_path: Path, script: str | None, level: str, words: str) -> None:
    """This machine's kernel can confine a process; one that cannot says what is missing."""
    [found] = check_sandbox(replace(context, interpreter=dying(tmp_path, script)) if script else context)
    assert (found.level, words in found.what) == (level, True)


def test_a_training_step(context: DoctorContext, tmp_path: Path) -> None:
    """A real step; its process then dies, or finds other numbers."""
    [found] = check_training(context)
    assert found.level == "ok"
    wrong = "echo 'DeviceTrouble: a training step gives wrong numbers' >&2; exit 1"
    for script, words in ((ILLEGAL, "SIGILL"), (wrong, "wrong numbers")):
        [found] = check_training(replace(context, interpreter=dying(tmp_path, script)))
        assert (found.level, words in found.what) == ("error", True)


def test_kernels_that_are_not_installed(context: DoctorContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: None)
    [found] = check_kernels(context)
    assert found.level == "ok"
    assert found.what == "fedvit[kernels] is not installed: steps take longer, and are the same otherwise"


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install this package, also for processes that the device starts."""
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path(__file__).parents[4]}")
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: kernels_in(folder))


def test_kernels_that_load_or_do_not(
    context: DoctorContext, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(compiled(shared), monkeypatch)
    assert [(found.level, found.what) for found in check_kernels(context)] == [("ok", "fedvit[kernels] loads")]
    folder = Path(shutil.copytree(compiled(shared), tmp_path / "kernels"))
    kernels_in(folder).write_text("of another processor")
    use_kernels(folder, monkeypatch)
    [found] = check_kernels(context)
    assert found.level == "warning"
    assert "fedvit[kernels] cannot be loaded, training goes on without it" in found.what
    assert found.hint is not None
    assert "pip wheel ./kernels" in found.hint


@pytest.mark.parametrize(
    ("available_kb", "budget_bytes", "level"),
    [
        (3_412_200, None, "ok"),
        (3_412_200, 512_000_000, "ok"),
        (400_000, 512_000_000, "warning"),  # less is free now than may be taken
        (3_412_200, 8_000_000_000, "error"),  # of 3.98 GB
        (200_000, None, "warning"),
        (90_000, None, "error"),
    ],
)
def test_memory(context: DoctorContext, available_kb: int, budget_bytes: int | None, level: str) -> None:
    text = f"MemTotal: 3884396 kB\nMemAvailable: {available_kb} kB\n"
    write_tree(context.root, {"proc/meminfo": text})
    [found] = check_memory(replace(context, policy=Policy(train=TrainPolicy(memory=budget_bytes))))
    assert found.level == level
    assert "of 3.98 GB are available" in found.what
    assert (found.hint is None) == (level == "ok")
    [unknown] = check_memory(replace(context, root=context.root / "nothing"))
    assert (unknown.level, unknown.what) == ("ok", "not measured")


def test_disk(context: DoctorContext) -> None:
    assert context.state is not None
    context.state.mkdir()
    (context.state / "blob").write_bytes(bytes(12_000))
    [found] = check_disk(context)
    assert f"({context.state}), which takes 12 kB" in found.what
    free = shutil.disk_usage(context.root).free
    assert found.level == ("ok" if free >= 10**9 else "warning" if free >= 10**8 else "error")
    [unknown] = check_disk(replace(context, state=None))
    assert (unknown.level, unknown.what) == ("ok", "not measured")


def test_the_clock(context: DoctorContext) -> None:
    """A board without a battery wakes in 1970: a warning, and an error where certificates are to be checked."""
    secure = replace(context, address=Address("h", 8883, tls=True))
    assert levels([*check_clock(context)]) == [("clock", "ok")]
    for now_s in (0.0, time.time() + 40 * 365 * 86400):
        assert levels([*check_clock(replace(context, now_s=now_s))]) == [("clock", "warning")]
        [found] = check_clock(replace(secure, now_s=now_s))
        assert found.level == "error"
        assert "timedatectl" in str(found.hint)
        assert "certificates" in str(found.hint)
    assert "1970-01-01 00:00 UTC" in next(check_clock(replace(context, now_s=0.0))).what


def test_a_cool_board(context: DoctorContext) -> None:
    temperature, throttling = check_heat(context)
    assert (temperature.level, temperature.what) == ("ok", "55.0 C")
    assert (throttling.level, throttling.what) == ("ok", "the processor is not slowed down")


@pytest.mark.parametrize(
    ("millidegrees", "limit_c", "level"),
    [(79_900, None, "ok"), (80_000, None, "warning"), (70_000, 65.0, "error"), (60_000, 65.0, "ok")],
)
def test_temperature(context: DoctorContext, millidegrees: int, limit_c: float | None, level: str) -> None:
    write_tree(context.root, {"sys/class/thermal/thermal_zone0/temp": f"{millidegrees}\n"})
    found, _ = check_heat(replace(context, policy=Policy(train=TrainPolicy(temperature_limit=limit_c))))
    assert found.level == level
    assert (found.hint is None) == (level == "ok")


@pytest.mark.parametrize(
    ("word", "what", "hint"),
    [
        ("0x50005", "the processor is slowed down, now: throttled, under-voltage", "power supply"),
        ("0x50000", "the processor is slowed down, since the device was started: throttled, under-voltage", "power"),
        ("0xe0008", "the processor is slowed down, now: soft temperature limit", "fan"),
    ],
)
def test_throttling(context: DoctorContext, tmp_path: Path, word: str, what: str, hint: str) -> None:
    _, found = check_heat(replace(context, root=pi_5(tmp_path / "pi5", throttled=word)))
    assert (found.level, found.what) == ("warning", what)
    assert hint in str(found.hint)


def test_a_limit_without_a_sensor(context: DoctorContext, tmp_path: Path) -> None:
    blind = replace(context, root=tmp_path / "nothing")
    assert levels([*check_heat(blind)]) == [("temperature", "ok"), ("throttling", "ok")]
    assert next(check_heat(replace(blind, policy=Policy(train=TrainPolicy(temperature_limit=80.0))))).level == "warning"


WARY = TrainPolicy(max_temperature=65.0, min_battery=30)


def test_readiness_options_without_a_sensor(context: DoctorContext, tmp_path: Path) -> None:
    blind = replace(context, root=tmp_path / "nothing", policy=Policy(train=WARY))
    temperature = next(check_heat(blind))
    assert (temperature.level, temperature.what) == ("warning", "not measured")
    assert temperature.hint == "--max-temperature cannot work without a sensor"
    both = next(check_heat(replace(blind, policy=Policy(train=msgspec.structs.replace(WARY, temperature_limit=80.0)))))
    assert both.hint == "--temperature-limit and --max-temperature cannot work without a sensor"
    [charge] = check_battery(blind)
    assert (charge.level, charge.what) == ("warning", "none was found")
    assert "--min-battery" in str(charge.hint)
    [charge] = check_battery(replace(blind, policy=Policy()))
    assert charge.level == "ok"


def test_a_board_that_is_too_hot_to_begin(context: DoctorContext) -> None:
    """55 C; it would go on with what it has begun."""
    found, _ = check_heat(replace(context, policy=Policy(train=TrainPolicy(max_temperature=50.0))))
    assert (found.level, found.what) == ("warning", "55.0 C, tasks are declined above 50 C")
    found, _ = check_heat(replace(context, policy=Policy(train=TrainPolicy(max_temperature=60.0))))
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("status", "least", "level"),
    [("Discharging", 30, "warning"), ("Charging", 30, "ok"), ("Discharging", 20, "ok"), ("Discharging", None, "ok")],
)
def test_a_battery(context: DoctorContext, status: str, least: int | None, level: str) -> None:
    supply = "sys/class/power_supply/BAT0"
    write_tree(
        context.root, {f"{supply}/type": "Battery\n", f"{supply}/capacity": "21\n", f"{supply}/status": f"{status}\n"}
    )
    [found] = check_battery(replace(context, policy=Policy(train=TrainPolicy(min_battery=least))))
    assert found.level == level
    assert found.what.startswith("21 %, ")
    assert ("tasks are declined below 30 %" in found.what) == (level == "warning")
