"""`python -m bench secure`: the cost of secure sums beside a plain run, and whether drawn sums are right.

Both runs have real processes: mosquitto, a coordinator, and hosts of virtual devices. Schedules are played in memory.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.child import time_work
from bench.edge import make_noise_folder
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from bench.rounds import IMAGES, Fleets, Sampled, choose_storage, measure_duration, sample_run
from coordinator.record.tables import SUM
from coordinator.rounds.sums import ATTEMPTS
from fedvit.secure.device import DeviceSum
from fedvit.secure.neighbours import choose_degree
from fedvit.secure.vectors import Vector
from profiles.probes.host import usable_cores
from tests.support.sums import Group, has_hollow_sum, make_terms, play, play_drawn
from tests.support.sums import make_devices as make_memory_devices

MODEL: dict[str, Any] = {
    "method": "fedavg",
    "options": {"batch_size": 4},
    "model_options": {"image_size": 32, "patch_size": 16, "width": 96, "depth": 3, "heads": 3},
}
"""An update of 1.4 MB."""
LARGE_WORDS = 87_000_000 // 4
NEIGHBOURS = 20
GROUPS = [
    Group(1000, choose_degree(1000, expected, NEIGHBOURS), leaving, leave_again)
    for expected, leaving in ((0.0, 0.02), (0.0, 0.05), (0.05, 0.05))
    for leave_again in (False, True)
]
"""Sums of which a share of devices leaves in each step, without and with more neighbours for it."""


def run_secure_bench(*, devices: int, rounds: int, schedules: int, progress: Progress) -> Report:
    """Measure a plain run and a secure one, the masks of a large update, and drawn sums. Raises FedvitError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-secure-")))
        # each device has its own images: devices with the same ones make equal updates, which are sent once
        make_noise_folder(folder / "parts", images=devices * IMAGES, size=32, test_share=1 / 3, devices=devices)
        states, hosts = stack.enter_context(choose_storage()), min(devices, usable_cores())

        def sample(name: str, *, secure: bool) -> Sampled:
            parts = folder / "parts"
            fleets = Fleets(devices=devices, hosts=hosts, broker="mosquitto", parts=parts, states=states / name)
            values = {**MODEL, "rounds": rounds, "evaluate_every": rounds, "devices": devices, "secure": secure}
            return sample_run(folder / name, fleets, values, progress)

        plain, secure = sample("plain", secure=False), sample("secure", secure=True)
    wrong, revealed, failed = 0, 0, 0
    for seed in range(schedules):
        outcome = play_drawn(seed)
        wrong, revealed = wrong + outcome.is_wrong, revealed + outcome.revealed
        failed += not outcome.has_sum
    groups = [_play_group(group, max(1, schedules // 5)) for group in GROUPS]
    device_s = time_work(_make_large_mask())
    plain_bytes, secure_bytes = _count_bytes(plain), _count_bytes(secure)
    plain_s, secure_s = _measure_round(plain), _measure_round(secure)
    return {
        "machine": describe_machine(),
        "devices": devices,
        "update_bytes": max(result.use.upload_bytes or 0 for result in plain.results),
        "plain_bytes": plain_bytes,
        "secure_bytes": secure_bytes,
        "bytes_ratio": secure_bytes / plain_bytes,
        "plain_s": plain_s,
        "secure_s": secure_s,
        "round_ratio": secure_s / plain_s,
        "device_s_87mb": device_s,
        "schedules": schedules,
        "failed_sums": failed,
        "wrong_sums": wrong,
        "singles_revealed": revealed,
        "groups": groups,
    }


def _count_bytes(seen: Sampled) -> float:
    """Count the bytes of the median device in a round, in both directions.

    A result's bytes are those since the result before: rounds 1 and 2 have those of the first round, with its graphs.
    """
    numbers = {entry.round for entry in seen.rounds[2:]}
    results = [result for result in seen.results if result.kind == "train" and result.round in numbers]
    uses = [result.use for result in results if result.device != SUM]
    sizes = [(use.sent_bytes or 0) + (use.received_bytes or 0) for use in uses]
    return float(np.median(sizes))


def _play_group(group: Group, plays: int) -> Report:
    """Return the shares of drawn sums of a group that succeed in one attempt, and in up to `ATTEMPTS`."""
    shares = {
        f"attempts_{most}": np.mean([has_hollow_sum(group, seed, most) for seed in range(plays)])
        for most in (1, ATTEMPTS)
    }
    return {**group._asdict(), "plays": plays, **{name: float(share) for name, share in shares.items()}}


def _measure_round(seen: Sampled) -> float:
    return float(np.median([measure_duration(entry) for entry in seen.rounds[1:]]))


def _make_large_mask() -> Callable[[], object]:
    """Return a function that adds a device's masks to an update of 87 MB."""
    devices = make_memory_devices(NEIGHBOURS + 1, words=8)
    play(devices, make_terms(len(devices), NEIGHBOURS), drops=lambda device, step: step == "reveal")
    name, device = next(iter(devices.items()))
    assert device.kept is not None  # it has taken part
    part = DeviceSum(name, device.kept, lambda attempt: None)
    payload = Vector.zeros(LARGE_WORDS, 3)
    return lambda: part.mask(payload)
