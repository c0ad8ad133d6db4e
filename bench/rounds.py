"""The overhead of a round with many virtual devices: broker, coordinator and hosts are real processes.

The payload is that of pFedPG's prompts (31 kB per device and direction); model and images are tiny, so that the rest is
protocol, disk and the coordinator's own work.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from msgspec import Struct

from bench.edge import make_noise_folder, read_cpu_s, read_memory
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from coordinator.record.record import open_record
from coordinator.record.tables import ResultRecord, RoundRecord
from coordinator.security.broker import start_broker
from fedvit.errors import FedvitError
from fleet.processes import Fleet, last_line, log_text, program
from profiles.probes.host import usable_cores

RUN = "bench"
FOLDERS = 8
IMAGES = 6
"""In each folder, two of them for tests."""
POLL_S = 0.1
MEMORY = Path("/dev/shm")
NEEDED_BYTES = 4 << 30
PATIENCE_S = 3600.0
DEADLINE_S = 7 * 86400.0
LEAVE_S = 30.0
LEAVE_PER_S = 50.0
"""Devices of a host leave one after the other."""

PROMPTS: dict[str, Any] = {
    "method": "pfedpg",
    "options": {"tokens": 40, "steps": 1, "batch_size": 4},
    "model_options": {"image_size": 32, "patch_size": 16, "width": 192, "depth": 1, "heads": 3},
}
"""40 prompts of width 192 are 30.7 kB, as the paper's 10 of width 768 are."""
LARGE: dict[str, Any] = {
    "method": "fedavg",
    "options": {"batch_size": 4},
    "model_options": {"image_size": 32, "patch_size": 16, "width": 256, "depth": 4, "heads": 4},
}
"""Every device sends a whole model of 9.2 MB."""


class Sample(Struct, frozen=True):
    """Memory and processor time at one moment of a run."""

    at: float  # time.time()
    rss_bytes: int  # of the control process
    cpu_s: dict[str, float]  # processor time so far: control process, its worker, all hosts, broker


class Sampled(Struct):
    """A finished run with its samples."""

    broker: str
    hosts_began: float  # time.time()
    samples: list[Sample]
    rounds: list[RoundRecord]
    results: list[ResultRecord]
    joined: list[float]  # time.time() of each device
    left: set[str]  # devices that left before the run was finished
    peak_rss_bytes: int | None
    host_rss_bytes: int = 0
    host_threads: int = 0


class Fleets(Struct, frozen=True, kw_only=True):
    """Processes of one run: virtual devices in `hosts` processes, at a broker of the kind `broker`."""

    devices: int
    hosts: int
    broker: str
    parts: Path  # folders of images
    states: Path  # of the devices


def run_rounds_bench(
    *, devices: int, rounds: int, hosts: int | None, cohorts: Sequence[int], broker: str, progress: Progress
) -> Report:
    """Measure a run with many devices, then one round of each cohort with large uploads.

    Raises FedvitError when a run fails.
    """
    hosts = hosts or usable_cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-rounds-")))
        parts = folder / "parts"
        make_noise_folder(parts, images=FOLDERS * IMAGES, size=32, test_share=1 / 3, devices=FOLDERS)
        states = stack.enter_context(choose_storage())

        def sample(name: str, count: int, values: dict[str, Any]) -> Sampled:
            fleets = Fleets(devices=count, hosts=min(hosts, count), broker=broker, parts=parts, states=states / name)
            return sample_run(folder / name, fleets, {**values, "devices": count}, progress)

        run = sample("prompts", devices, {**PROMPTS, "rounds": rounds, "evaluate_every": rounds})
        large = []
        for cohort in cohorts:
            name = f"large-{cohort}"
            large.append(_report_cohort(sample(name, cohort, {**LARGE, "rounds": 1}), cohort))
            shutil.rmtree(folder / name)
            shutil.rmtree(states / name)
        storage = "memory" if MEMORY in states.parents else "disk"
    return _report(run, devices, min(hosts, devices)) | {"device_storage": storage, "cohorts": large}


def sample_run(home: Path, fleets: Fleets, values: dict[str, Any], progress: Progress) -> Sampled:
    """Run and sample one run; the coordinator is started before the devices."""
    home.mkdir(parents=True)
    devices, hosts = fleets.devices, fleets.hosts
    broker = start_broker(fleets.broker, home / "broker", port=0)
    store = open_record(home / "runs")
    try:
        with Fleet() as fleet:
            address = f"mqtt://{broker.address}"
            file = home / "run.toml"
            settings = {"deadline_s": DEADLINE_S}
            file.write_bytes(msgspec.toml.encode({**settings, **values, "broker": {"broker": address}}))
            command = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(home / "runs")]
            coordinator = fleet.start("coordinator", [*command, "--run", RUN], log=home / "coordinator.out")
            _wait(lambda: "waiting for" in log_text(home / "coordinator.out"), coordinator, home)
            seen = Sampled(broker.kind, time.time(), [], [], [], [], set(), None)
            pids = []
            for number in range(hosts):
                flags = {"--broker": address, "--parts": fleets.parts, "--devices": devices, "--number": number}
                flags |= {"--hosts": hosts, "--state": fleets.states}
                words = [str(word) for flag in flags.items() for word in flag]
                host = [*program("fleet.commands.host"), *words, "--once"]
                pids.append(fleet.start(f"host-{number}", host, log=home / f"host-{number}.log").pid)
            reported, worker = 0, list[int]()
            while coordinator.poll() is None:
                time.sleep(POLL_S)
                if memory := read_memory(coordinator.pid):
                    used = {"control": [coordinator.pid], "hosts": pids, "broker": [broker.pid]}
                    used["worker"] = worker = worker or _list_children(coordinator.pid)
                    cpu_s = {name: sum(map(read_cpu_s, members)) for name, members in used.items()}
                    seen.samples.append(Sample(time.time(), memory["VmRSS"], cpu_s))
                    seen.peak_rss_bytes = memory["VmHWM"]
                _note_joins(seen, home / "coordinator.out", devices)
                if len(closed := store.rounds.list_closed(RUN)) > reported:
                    reported = len(closed)
                    progress(f"{devices} devices: round {reported} closed")
                if all(now := [read_memory(pid).get("VmRSS", 0) for pid in pids]):
                    seen.host_rss_bytes, seen.host_threads = sum(now), sum(map(_count_threads, pids))
                if any(code for name, code in fleet.exit_codes().items() if name != "coordinator"):
                    break
            if coordinator.poll() != 0:
                logs = [home / "coordinator.out", *(home / f"host-{number}.log" for number in range(hosts))]
                raise FedvitError("FV0001", "the run failed: " + "; ".join(last_line(log) for log in logs))
            fleet.wait([f"host-{number}" for number in range(hosts)], LEAVE_S + devices / LEAVE_PER_S)
            seen.rounds, seen.results = store.rounds.read_all(RUN), store.tasks.read_results(RUN)
            seen.left = _list_left(log_text(home / "coordinator.out"), values["rounds"])
            return seen
    finally:
        store.close()
        broker.stop()


def _note_joins(seen: Sampled, output: Path, devices: int) -> None:
    if len(seen.joined) < devices:
        joined = log_text(output).count(" joined: ")
        seen.joined += [time.time()] * (joined - len(seen.joined))


def _list_left(output: str, rounds: int) -> set[str]:
    """List the devices that left before the last round closed, by the coordinator's output."""
    before = output.partition(f"round {rounds:>3}/{rounds}")[0]
    return {line.removesuffix(" left") for line in before.splitlines() if line.endswith(" left")}


def _wait(holds: Callable[[], bool], process: Any, home: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > until:
            raise FedvitError("FV0001", f"the coordinator did not start: {last_line(home / 'coordinator.out')}")
        time.sleep(POLL_S)


def _report_cohort(seen: Sampled, devices: int) -> Report:
    """Report a round with large uploads: the coordinator's memory."""
    [entry] = seen.rounds
    opened = datetime.fromisoformat(entry.opened_at).timestamp()
    before = [sample.rss_bytes for sample in seen.samples if sample.at <= opened]
    return {
        "devices": devices,
        "upload_bytes": max(result.use.upload_bytes or 0 for result in seen.results if result.kind == "train"),
        "peak_rss_bytes": seen.peak_rss_bytes,
        "before_bytes": before[-1] if before else None,  # after the devices have joined, before the round
        "round_s": measure_duration(entry),
    }


def _report(seen: Sampled, devices: int, hosts: int) -> Report:
    """Report all rounds but the first, in which graphs and weights are sent."""
    if not seen.samples:
        raise FedvitError("FV0001", "the run was over before the coordinator's memory could be sampled; raise --rounds")
    later = seen.rounds[1:] or seen.rounds
    numbers = {entry.round for entry in later}
    results = [result for result in seen.results if result.kind == "train" and result.round in numbers]
    compute_s = _sum_compute_s(results) / _count_parallel(hosts) / len(later)
    round_s = float(np.median([measure_duration(entry) for entry in later]))
    return {
        "machine": describe_machine(),
        "broker": seen.broker,
        "devices": devices,
        "hosts": hosts,
        "rounds": len(seen.rounds),
        "joined_s": seen.joined[devices - 1] - seen.hosts_began if len(seen.joined) >= devices else None,
        "dropped_devices": len(seen.left | _without_result(seen)),
        "first_round_s": measure_duration(seen.rounds[0]),
        "round_s": round_s,
        "compute_s": compute_s,
        "server_s": float(np.median([entry.figures["server_s"] for entry in later])),
        "overhead_ms_per_device": 1000 * (round_s - compute_s) / devices,
        "bytes_up_per_device": sum(result.use.sent_bytes or 0 for result in results) // max(1, len(results)),
        "bytes_down_per_device": sum(result.use.received_bytes or 0 for result in results) // max(1, len(results)),
        **_report_processes(seen, devices),
    }


def _report_processes(seen: Sampled, devices: int) -> Report:
    """Report memory and processor time of the programs."""
    after = [_find_sample(seen.samples, _find_end(entry)) for entry in seen.rounds]
    rss = [sample.rss_bytes for sample in after]
    half = rss[len(rss) // 2 :]  # in the first half, caches of database and allocator fill
    turns = (len(after) - 1) * devices
    spent_s = {name: after[-1].cpu_s[name] - after[0].cpu_s[name] for name in after[0].cpu_s if turns}
    return {
        "cpu_ms_per_device": {name: 1000 * seconds / turns for name, seconds in spent_s.items()},
        "rss_bytes": seen.peak_rss_bytes,
        "rss_slope_bytes_per_round": float(np.polyfit(range(len(half)), half, 1)[0]) if len(half) > 1 else None,
        "rss_start_bytes": rss[0],
        "rss_end_bytes": rss[-1],
        "host_rss_bytes": seen.host_rss_bytes,
        "host_bytes_per_device": seen.host_rss_bytes // devices,
        "host_threads": seen.host_threads,
    }


def _count_parallel(hosts: int) -> int:
    """Count the devices that compute at the same time."""
    return hosts * max(1, usable_cores() // hosts)


def _sum_compute_s(results: Sequence[ResultRecord]) -> float:
    """Sum the time of all training steps."""
    return sum((result.use.step_s or 0.0) * (result.use.steps or 0) for result in results)


def _without_result(seen: Sampled) -> set[str]:
    """List devices without whose result a round closed."""
    answered = {(result.round, result.device) for result in seen.results if result.kind == "train"}
    return {device for entry in seen.rounds for device in entry.cohort if (entry.round, device) not in answered}


def measure_duration(entry: RoundRecord) -> float:
    """Return the time from the opening of a round until its state was saved."""
    opened, closed = (datetime.fromisoformat(str(text)) for text in (entry.opened_at, entry.closed_at))
    return (closed - opened).total_seconds()


def _find_end(entry: RoundRecord) -> float:
    """Return when a round's state was saved, as time.time()."""
    return datetime.fromisoformat(str(entry.closed_at)).timestamp()


def _find_sample(samples: list[Sample], moment: float) -> Sample:
    """Find the sample nearest to a moment."""
    return min(samples, key=lambda sample: abs(sample.at - moment))


def _list_children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _count_threads(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).num_threads())
    return 0


@contextmanager
def choose_storage() -> Iterator[Path]:
    """Yield a folder for devices' states, in memory if it has space, since each real device has its own disk."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="fleet-rounds-", dir=MEMORY if fits else None) as folder:
        yield Path(folder)
