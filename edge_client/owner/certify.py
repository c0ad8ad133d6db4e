"""`edge-client certify`: tries everything on a board that a run needs of it, and says what it found.

Nothing in a certificate tells who the owner is: no host name, no folders, no addresses, no images.
"""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_client.health.doctor import run_checks
from edge_client.health.doctor_context import DoctorContext, Finding
from edge_client.owner.killed_rounds import ROUNDS, RUN
from edge_client.owner.profile import ProfileTarget, SelfReport, measure_self
from edge_client.owner.trials import STEPS, Compute, TrialTrainer, is_right, load_trial, write_images
from edge_client.storage.vault import Vault
from fedvit.errors import FedvitError
from fedvit.kernels import find_library
from fedvit.resources import ResourceUse
from profiles.probes.host import resident_bytes
from profiles.probes.meter import Sensors
from profiles.probes.speed import measure_speed

Report = Callable[[str], None]

CHECKS = {
    "engine", "kernels", "sandbox", "training", "memory", "disk", "clock", "temperature", "throttling", "battery",
}  # fmt: skip
"""Checks of `edge-client doctor` that are about the board; others are about a broker, images or keys."""
MEMORY_BYTES = 256_000_000
"""Limit of memory where the owner gives none: enough for the smallest models."""
TOO_LITTLE_BYTES = 1_000_000
"""Memory beyond the idle process that no step fits into."""
KILLS = 3
SAMPLE_EVERY_S = 5.0
MOST_STEPS = 1_000_000
PROGRAMS: tuple[tuple[str, Compute, bool], ...] = (
    ("float", "float", False),
    ("int8", "int8", False),
    ("int8 with kernels", "int8", True),
)
"""Name, precision of products, and use of the optional kernels."""


class ProgramFigures(Struct, frozen=True, kw_only=True):
    """STEPS training steps of one program."""

    name: str
    loss: float
    right: bool  # the loss is that of other processors, but for rounding
    use: ResourceUse


class MemoryFigures(Struct, frozen=True, kw_only=True):
    """Training under a hard limit of memory."""

    limit_bytes: int
    peak_bytes: int | None
    fits: bool
    refused: bool  # with too small a limit the task ended, and the device did not


class HeatFigures(Struct, frozen=True, kw_only=True):
    """Training without a pause."""

    seconds: float
    celsius: tuple[tuple[float, float], ...]  # (seconds since the start, degrees); () without a sensor
    use: ResourceUse


class SurvivalFigures(Struct, frozen=True, kw_only=True):
    """Rounds whose process was killed at drawn moments."""

    kills: int
    rounds: int
    resumed: bool  # all rounds were done in the end
    same: bool  # the tensors are those of rounds that nobody killed, bit for bit


class BoardCertificate(Struct, frozen=True, kw_only=True):
    """The figures of one board, and what is wrong with it."""

    format: int = 1
    made: str  # time of the board's clock
    faults: tuple[str, ...]
    doctor: tuple[Finding, ...]
    profile: SelfReport
    programs: tuple[ProgramFigures, ...]
    memory: MemoryFigures
    heat: HeatFigures
    survival: SurvivalFigures


def certify(context: DoctorContext, target: ProfileTarget, seconds: float, report: Report) -> BoardCertificate:
    """Try a board, and train without a pause for some seconds; `report` gets the name of each part.

    Raises FedvitError if a program cannot run at all. Takes about two minutes more than `seconds` on a small board.
    """
    with contextlib.ExitStack() as stack:
        if target.state:
            target.state.mkdir(parents=True, exist_ok=True)
        # on the disk of the state, which is the one that has to survive
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="certify-", dir=target.state)))
        images = home / "images"
        write_images(images)
        trainer = TrialTrainer(images, target.threads)  # before measurements start threads
        stack.callback(trainer.close)
        report("doctor")
        doctor = tuple(_hide(finding, context) for finding in run_checks(context) if finding.check in CHECKS)
        profile = measure_self(target, measure_speed, lambda part: report(f"profile: {part}"), root=context.root)
        sensors = Sensors.find(context.root)
        programs = tuple(run_programs(trainer, sensors, report))
        memory = limit_memory(trainer, target.policy.budget.memory_bytes or MEMORY_BYTES, report)
        survival = kill_rounds(images, home, target.threads, report)
        heat = heat_up(trainer, sensors, seconds, report)
    return BoardCertificate(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        faults=tuple(list_faults(doctor, programs, memory, survival)),
        doctor=doctor,
        profile=anonymise(profile),
        programs=programs,
        memory=memory,
        heat=heat,
        survival=survival,
    )


def run_programs(trainer: TrialTrainer, sensors: Sensors, report: Report) -> Iterator[ProgramFigures]:
    """Train STEPS steps of each program; the one with kernels only where they are installed."""
    for name, compute, own_kernels in PROGRAMS:
        if own_kernels and find_library() is None:
            continue
        report(f"{STEPS} steps: {name}")
        trained, use = trainer.train(load_trial(compute), own_kernels=own_kernels, sensors=sensors)
        assert trained  # nothing stops it
        yield ProgramFigures(name=name, loss=trained.loss, right=is_right(compute, trained.loss), use=use)


def limit_memory(trainer: TrialTrainer, limit_bytes: int, report: Report) -> MemoryFigures:
    """Train under a limit, and under one that is too small."""
    report(f"memory: a limit of {limit_bytes // 1_000_000} MB, and one that is too small")
    trial = load_trial("float")
    trained, use = trainer.train(trial, memory_bytes=limit_bytes)
    without, _ = trainer.train(trial, memory_bytes=resident_bytes() + TOO_LITTLE_BYTES)
    return MemoryFigures(
        limit_bytes=limit_bytes,
        peak_bytes=use.peak_rss_bytes,
        fits=trained is not None,
        refused=without is None,
    )


def heat_up(trainer: TrialTrainer, sensors: Sensors, seconds: float, report: Report) -> HeatFigures:
    """Train without a pause, and watch the temperature."""
    began = time.monotonic()
    celsius: list[tuple[float, float]] = []
    reported_s = 0.0

    def is_over() -> bool:
        nonlocal reported_s
        elapsed_s = time.monotonic() - began
        degrees = sensors.thermometer.celsius() if not celsius or elapsed_s - celsius[-1][0] >= SAMPLE_EVERY_S else None
        if degrees is not None:
            celsius.append((round(elapsed_s, 1), degrees))
        if elapsed_s - reported_s >= 60:
            reported_s = elapsed_s
            shown = f", {celsius[-1][1]:.1f} C" if celsius else ""
            report(f"training without a pause: {elapsed_s / 60:.0f} of {seconds / 60:.0f} minutes{shown}")
        return elapsed_s >= seconds

    report(f"training without a pause for {seconds / 60:g} minutes")
    _, use = trainer.train(load_trial("float", MOST_STEPS), sensors=sensors, stopped=is_over)
    return HeatFigures(seconds=time.monotonic() - began, celsius=tuple(celsius), use=use)


def kill_rounds(images: Path, home: Path, threads: int, report: Report) -> SurvivalFigures:
    """Kill a process with SIGKILL while it trains and stores rounds, and start it again each time."""
    report(f"kill -9: {ROUNDS} rounds, {KILLS} kills")
    whole, killed = home / "whole", home / "killed"
    began = time.monotonic()
    if _start(images, whole, threads).wait():
        return SurvivalFigures(kills=0, rounds=Vault(whole).round_of(RUN), resumed=False, same=False)
    round_s = (time.monotonic() - began) / ROUNDS
    drawn, kills = random.Random(), 0
    for _ in range(KILLS):
        process = _start(images, killed, threads)
        assert process.stdout
        if process.stdout.readline():  # it is in a round
            time.sleep(drawn.uniform(0, round_s))
        process.kill()
        process.communicate()
        kills += 1
    code = _start(images, killed, threads).wait()
    vault = Vault(killed)
    resumed = code == 0 and vault.round_of(RUN) == ROUNDS
    return SurvivalFigures(
        kills=kills, rounds=vault.round_of(RUN), resumed=resumed, same=resumed and _are_same(Vault(whole), vault)
    )


def _start(images: Path, vault: Path, threads: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "edge_client.owner.killed_rounds", str(images), str(vault), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def _are_same(one: Vault, other: Vault) -> bool:
    try:
        some, others = one.local(RUN), other.local(RUN)
    except FedvitError:
        return False
    if some is None or others is None or some.keys() != others.keys():
        return False
    return all(np.array_equal(value, others[name]) for name, value in some.items())


def list_faults(
    doctor: tuple[Finding, ...],
    programs: tuple[ProgramFigures, ...],
    memory: MemoryFigures,
    survival: SurvivalFigures,
) -> Iterator[str]:
    """Yield what a run would suffer from."""
    yield from (f"{finding.check}: {finding.what}" for finding in doctor if finding.level == "error")
    yield from (f"{one.name}: the loss is {one.loss:.4f}, which is wrong" for one in programs if not one.right)
    if not memory.fits:
        yield f"memory: a step does not fit into {memory.limit_bytes // 1_000_000} MB"
    if not memory.refused:
        yield "memory: a task exceeded its limit"
    if not survival.resumed:
        yield f"kill -9: the rounds were not resumed, {survival.rounds} of {ROUNDS} are done"
    elif not survival.same:
        yield "kill -9: the tensors are not those of undisturbed rounds"


def anonymise(profile: SelfReport) -> SelfReport:
    """Remove the device's name, its folders and its broker."""
    origin = profile.speed_origin if profile.speed is None else "measured"
    why = {name: text for name, text in profile.not_measured.items() if name != "broker"}
    return replace(
        profile,
        host=replace(profile.host, name=""),
        broker="",
        round_trip_s=None,
        speed_origin=origin,
        not_measured=why,
    )


def _hide(finding: Finding, context: DoctorContext) -> Finding:
    return replace(finding, what=finding.what.replace(str(context.state), "STATE"))
