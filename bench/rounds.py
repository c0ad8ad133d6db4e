"""The overhead of a round with many virtual devices: broker, coordinator and hosts are real processes.

The payload is that of pFedPG's prompts (31 kB per device and direction); model and images are tiny, so that the rest is
protocol, disk and the coordinator's own work.
"""

import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil
from msgspec import Struct
from rich.console import Group
from rich.table import Table

from bench.edge import noise_folder, read_memory
from bench.machine import Machine, this_machine
from bench.viewers import Viewers, viewers
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


Storage = Literal["memory", "disk"]


class RoundsReport(Struct, frozen=True, kw_only=True):
    """Figures of `python -m bench rounds`, of all rounds but the first, in which graphs and weights are sent."""

    machine: Machine
    broker: str
    device_storage: Storage
    devices: int
    hosts: int
    rounds: int
    joined_s: float | None  # from the start of the hosts until every device has joined; None: not in the log
    dropped_devices: int  # that left during the run, or without whose result a round closed
    first_round_s: float
    round_s: float  # median
    compute_s: float  # of a round: the time of all steps / devices that compute at the same time
    server_s: float  # of a round: the method's server step, which is part of the overhead
    overhead_ms_per_device: float  # (round_s - compute_s) per device
    cpu_ms_per_device: dict[str, float]  # processor time of control, worker, hosts, broker, for a round and device
    rss_bytes: int | None  # of the control process, at most
    bytes_up_per_device: int  # of a round, payloads
    bytes_down_per_device: int
    rss_slope_bytes_per_round: float | None  # of the control process, least squares, later half
    rss_start_bytes: int  # after the first round
    rss_end_bytes: int  # after the last
    host_rss_bytes: int  # of all hosts together, at the end
    host_bytes_per_device: int
    host_threads: int  # of all hosts together
    cohorts: list["CohortReport"]
    watched: "WatchedReport | None" = None  # with --watched; all figures above are then of rounds of both kinds


class WatchedReport(Struct, frozen=True, kw_only=True):
    """Rounds with a dashboard in a browser and scrapes of metrics, in turn with rounds without, in the same run."""

    pairs: int  # of neighbouring rounds, one of each kind
    overhead_ms_per_device: float  # of watched rounds, median
    unwatched_overhead_ms_per_device: float
    growth_ratio: float  # of the overhead, watched / unwatched - 1: median over the pairs
    growth_low_ratio: float  # first quartile
    growth_high_ratio: float  # third quartile
    cpu_ms_per_device: dict[str, float]  # of a watched round
    unwatched_cpu_ms_per_device: dict[str, float]


class CohortReport(Struct, frozen=True, kw_only=True):
    """A round with a large payload: the coordinator's memory."""

    devices: int
    upload_bytes: int  # of one device
    peak_rss_bytes: int | None
    before_bytes: int | None  # after the devices have joined, before the round
    round_s: float


class Sample(Struct, frozen=True):
    """Memory and processor time at one moment of a run."""

    at: float  # time.time()
    rss_bytes: int  # of the control process
    cpu_s: dict[str, float]  # processor time so far: control process, its worker, all hosts, broker, dashboard


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


def run_rounds_bench(
    *,
    devices: int,
    rounds: int,
    hosts: int | None,
    cohorts: Sequence[int],
    broker: str,
    watched: bool = False,
    progress: Callable[[str], None],
) -> RoundsReport:
    """Measure all runs; `watched`: half of the rounds have a dashboard and metrics. Raises FedvitError when a run fails
    or `rounds` are too few."""
    hosts = hosts or usable_cores()
    if watched and not _pairs(range(2, rounds + 1)):
        raise FedvitError(f"--watched compares rounds after the first in pairs: --rounds {rounds} has none")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-rounds-")))
        parts = folder / "parts"
        noise_folder(parts, images=FOLDERS * IMAGES, size=32, test_share=1 / 3, devices=FOLDERS)
        states = stack.enter_context(_device_storage())
        values = {**PROMPTS, "rounds": rounds, "evaluate_every": rounds, "devices": devices}
        home, state = folder / "prompts", states / "prompts"
        measured = _sampled(home, state, values, parts, devices, hosts, broker, progress, watched=watched)
        large = []
        for cohort in cohorts:
            values = {**LARGE, "rounds": 1, "devices": cohort}
            home, state = folder / f"large-{cohort}", states / f"large-{cohort}"
            seen = _sampled(home, state, values, parts, cohort, min(hosts, cohort), broker, progress)
            shutil.rmtree(home)
            shutil.rmtree(state)
            large.append(_cohort(seen, cohort))
        storage: Storage = "memory" if MEMORY in states.parents else "disk"
    report = _report(measured, devices, min(hosts, devices), large, storage)
    compared = compare_watched(measured, devices, min(hosts, devices)) if watched else None
    return msgspec.structs.replace(report, watched=compared)


def _sampled(
    home: Path,
    state: Path,
    values: dict[str, Any],
    parts: Path,
    devices: int,
    hosts: int,
    choice: str,
    progress: Callable[[str], None],
    *,
    watched: bool = False,
) -> Sampled:
    """Run and sample one run; the coordinator is started before the devices."""
    home.mkdir(parents=True)
    broker = start_broker(choice, home / "broker", port=0)
    store = open_record(home / "runs")
    try:
        with Fleet() as fleet, ExitStack() as stack:
            address = f"mqtt://{broker.address}"
            file = home / "run.toml"
            settings = {"deadline_s": DEADLINE_S}
            file.write_bytes(msgspec.toml.encode({**settings, **values, "broker": {"broker": address}}))
            command = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(home / "runs")]
            command += ["--run", RUN]
            if watched:
                password = home / "prometheus.password"
                password.write_text(secrets.token_urlsafe(16))
                command += ["--prometheus", "127.0.0.1:0", "--prometheus-password-file", str(password)]
            coordinator = fleet.start("coordinator", command, log=home / "coordinator.out")
            _wait(lambda: "waiting for" in log_text(home / "coordinator.out"), coordinator, home)
            watching: Viewers | None = None
            if watched:
                page = log_text(home / "coordinator.out").partition("metrics: ")[2].split()[0]
                watching = stack.enter_context(viewers(home, RUN, page, password.read_text()))
            seen = Sampled(broker.kind, time.time(), [], [], [], [], set(), None)
            pids = []
            for number in range(hosts):
                host = [
                    *program("fleet.commands.host"),
                    "--broker",
                    address,
                    "--parts",
                    str(parts),
                    "--devices",
                    str(devices),
                ]
                host += ["--number", str(number), "--hosts", str(hosts), "--state", str(state), "--once"]
                pids.append(fleet.start(f"host-{number}", host, log=home / f"host-{number}.log").pid)
            reported, worker = 0, list[int]()
            while coordinator.poll() is None:
                time.sleep(POLL_S)
                if memory := read_memory(coordinator.pid):
                    used = {"control": [coordinator.pid], "hosts": pids, "broker": [broker.pid]}
                    used["worker"] = worker = worker or _children(coordinator.pid)
                    if watching:
                        used["dashboard"] = [watching.dashboard.pid]
                    cpu_s = {name: sum(map(_cpu_s, those)) for name, those in used.items()}
                    seen.samples.append(Sample(time.time(), memory["VmRSS"], cpu_s))
                    seen.peak_rss_bytes = memory["VmHWM"]
                _note_joins(seen, home / "coordinator.out", devices)
                if len(closed := store.rounds.list_closed(RUN)) > reported:
                    reported = len(closed)
                    if watching:
                        watching.watch(_is_watched(reported + 1))
                    progress(f"{devices} devices: round {reported} closed")
                if all(now := [read_memory(pid).get("VmRSS", 0) for pid in pids]):
                    seen.host_rss_bytes, seen.host_threads = sum(now), sum(map(_threads, pids))
                if any(code for name, code in fleet.exit_codes().items() if name != "coordinator"):
                    break
            if coordinator.poll() != 0:
                logs = [home / "coordinator.out", *(home / f"host-{number}.log" for number in range(hosts))]
                raise FedvitError("the run failed: " + "; ".join(last_line(log) for log in logs))
            fleet.wait([f"host-{number}" for number in range(hosts)], LEAVE_S + devices / LEAVE_PER_S)
            seen.rounds, seen.results = store.rounds.read_all(RUN), store.tasks.read_results(RUN)
            seen.left = _left(log_text(home / "coordinator.out"), values["rounds"])
            return seen
    finally:
        store.close()
        broker.stop()


def _note_joins(seen: Sampled, output: Path, devices: int) -> None:
    if len(seen.joined) < devices:
        joined = log_text(output).count(" joined: ")
        seen.joined += [time.time()] * (joined - len(seen.joined))


def _left(output: str, rounds: int) -> set[str]:
    """Devices that left before the last round closed, by the coordinator's output."""
    before = output.partition(f"round {rounds:>3}/{rounds}")[0]
    return {line.removesuffix(" left") for line in before.splitlines() if line.endswith(" left")}


def _wait(holds: Callable[[], bool], process: Any, home: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > until:
            raise FedvitError(f"the coordinator did not start: {last_line(home / 'coordinator.out')}")
        time.sleep(POLL_S)


def _cohort(seen: Sampled, devices: int) -> CohortReport:
    [entry] = seen.rounds
    opened = datetime.fromisoformat(entry.opened_at).timestamp()
    before = [sample.rss_bytes for sample in seen.samples if sample.at <= opened]
    return CohortReport(
        devices=devices,
        upload_bytes=max(result.use.upload_bytes or 0 for result in seen.results if result.kind == "train"),
        peak_rss_bytes=seen.peak_rss_bytes,
        before_bytes=before[-1] if before else None,
        round_s=_seconds(entry),
    )


def _report(seen: Sampled, devices: int, hosts: int, cohorts: list[CohortReport], storage: Storage) -> RoundsReport:
    later = seen.rounds[1:] or seen.rounds
    numbers = {entry.round for entry in later}
    trained = [result for result in seen.results if result.kind == "train"]
    mine = [result for result in trained if result.round in numbers]
    at_once = _at_once(hosts)
    compute_s = _compute_s(mine) / at_once / len(later)
    round_s = float(np.median([_seconds(entry) for entry in later]))
    if not seen.samples:
        raise FedvitError("the run was over before the coordinator's memory could be sampled; raise --rounds")
    after = [_at(seen.samples, _closed(entry)) for entry in seen.rounds]
    rss = [mark.rss_bytes for mark in after]
    half = rss[len(rss) // 2 :]  # in the first half, caches of database and allocator fill
    turns = (len(after) - 1) * devices
    cpu_ms = {name: 1000 * (after[-1].cpu_s[name] - after[0].cpu_s[name]) / turns for name in after[0].cpu_s if turns}
    return RoundsReport(
        machine=this_machine(),
        broker=seen.broker,
        device_storage=storage,
        devices=devices,
        hosts=hosts,
        rounds=len(seen.rounds),
        joined_s=seen.joined[devices - 1] - seen.hosts_began if len(seen.joined) >= devices else None,
        dropped_devices=len(seen.left | _without_result(seen)),
        first_round_s=_seconds(seen.rounds[0]),
        round_s=round_s,
        compute_s=compute_s,
        server_s=float(np.median([entry.figures["server_s"] for entry in later])),
        overhead_ms_per_device=1000 * (round_s - compute_s) / devices,
        cpu_ms_per_device=cpu_ms,
        rss_bytes=seen.peak_rss_bytes,
        bytes_up_per_device=sum(result.use.sent_bytes or 0 for result in mine) // max(1, len(mine)),
        bytes_down_per_device=sum(result.use.received_bytes or 0 for result in mine) // max(1, len(mine)),
        rss_slope_bytes_per_round=float(np.polyfit(range(len(half)), half, 1)[0]) if len(half) > 1 else None,
        rss_start_bytes=rss[0],
        rss_end_bytes=rss[-1],
        host_rss_bytes=seen.host_rss_bytes,
        host_bytes_per_device=seen.host_rss_bytes // devices,
        host_threads=seen.host_threads,
        cohorts=cohorts,
    )


def _at_once(hosts: int) -> int:
    """Devices that compute at the same time."""
    return hosts * max(1, usable_cores() // hosts)


def _compute_s(results: Sequence[ResultRecord]) -> float:
    """Time of all training steps."""
    return sum((result.use.step_s or 0.0) * (result.use.steps or 0) for result in results)


def _is_watched(number: int) -> bool:
    """Whether a round is watched: two are, two are not, so that a trend over the run adds to both alike.

    >>> [_is_watched(number) for number in range(2, 10)]
    [False, True, True, False, False, True, True, False]
    """
    return number % 4 in (3, 0)


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring rounds, one that is not watched and one that is, in this order.

    >>> _pairs(range(2, 8))
    [(2, 3), (5, 4), (6, 7)]
    """
    neighbours = zip(numbers[::2], numbers[1::2], strict=False)
    return [(two, one) if _is_watched(one) else (one, two) for one, two in neighbours]


def compare_watched(seen: Sampled, devices: int, hosts: int) -> WatchedReport:
    """Watched rounds beside those that were not."""
    by_round: dict[int, list[ResultRecord]] = defaultdict(list)
    for result in seen.results:
        if result.kind == "train":
            by_round[result.round].append(result)
    overhead_ms = {
        entry.round: 1000 * (_seconds(entry) - _compute_s(by_round[entry.round]) / _at_once(hosts)) / devices
        for entry in seen.rounds
    }
    pairs = _pairs([entry.round for entry in seen.rounds[1:]])
    growth = [overhead_ms[watched] / overhead_ms[not_watched] - 1 for not_watched, watched in pairs]
    marks = {entry.round: _at(seen.samples, _closed(entry)) for entry in seen.rounds}

    def cpu_ms(numbers: Sequence[int]) -> dict[str, float]:
        spans = [(marks[number - 1].cpu_s, marks[number].cpu_s) for number in numbers]
        return {
            name: 1000 * float(np.mean([after[name] - before[name] for before, after in spans])) / devices
            for name in spans[0][0]
        }

    low, middle, high = np.quantile(growth, (0.25, 0.5, 0.75))
    not_watched, watched = ([pair[place] for pair in pairs] for place in (0, 1))
    return WatchedReport(
        pairs=len(pairs),
        overhead_ms_per_device=float(np.median([overhead_ms[number] for number in watched])),
        unwatched_overhead_ms_per_device=float(np.median([overhead_ms[number] for number in not_watched])),
        growth_ratio=float(middle),
        growth_low_ratio=float(low),
        growth_high_ratio=float(high),
        cpu_ms_per_device=cpu_ms(watched),
        unwatched_cpu_ms_per_device=cpu_ms(not_watched),
    )


def _without_result(seen: Sampled) -> set[str]:
    """Devices without whose result a round closed."""
    answered = {(result.round, result.device) for result in seen.results if result.kind == "train"}
    return {device for entry in seen.rounds for device in entry.cohort if (entry.round, device) not in answered}


def _seconds(entry: RoundRecord) -> float:
    """From the opening of a round until its state was saved."""
    opened, closed = (datetime.fromisoformat(str(text)) for text in (entry.opened_at, entry.closed_at))
    return (closed - opened).total_seconds()


def _closed(entry: RoundRecord) -> float:
    """When a round's state was saved, as time.time()."""
    return datetime.fromisoformat(str(entry.closed_at)).timestamp()


def _at(samples: list[Sample], moment: float) -> Sample:
    """The sample nearest to a moment."""
    return min(samples, key=lambda sample: abs(sample.at - moment))


def _cpu_s(pid: int) -> float:
    """Processor time of a process, all threads; 0 when it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _threads(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).num_threads())
    return 0


@contextmanager
def _device_storage() -> Iterator[Path]:
    """The folder of devices' states, in memory where there is space, since each real device has its own disk."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="fleet-rounds-", dir=MEMORY if fits else None) as folder:
        yield Path(folder)


def rounds_table(report: RoundsReport) -> Group:
    """For a terminal."""
    table = Table("figure", "value", "goal", title=f"{report.devices} devices in {report.hosts} processes")
    rows: list[tuple[str, str, str]] = [
        ("all joined", _shown(report.joined_s, "{:.1f} s"), "60 s"),
        ("devices dropped", str(report.dropped_devices), "0"),
        ("first round", f"{report.first_round_s:.1f} s", ""),
        ("a later round", f"{report.round_s:.2f} s", ""),
        ("  of it compute", f"{report.compute_s:.2f} s", ""),
        ("  of it server step", f"{report.server_s:.2f} s", ""),
        ("overhead per device", f"{report.overhead_ms_per_device:.2f} ms", "4 ms"),
        *((f"processor time per device: {name}", f"{ms:.2f} ms", "") for name, ms in report.cpu_ms_per_device.items()),
        ("control process, at most", _mb(report.rss_bytes), "400 MB"),
        ("control process grows per round", _shown(report.rss_slope_bytes_per_round, "{:+.0f} bytes"), "0"),
        ("control process, first / last round", f"{_mb(report.rss_start_bytes)} / {_mb(report.rss_end_bytes)}", ""),
        ("hosts per device", f"{report.host_bytes_per_device / 1e3:.0f} kB", ""),
        ("threads of all hosts", str(report.host_threads), ""),
    ]
    if watched := report.watched:
        between = f"{watched.growth_low_ratio:+.1%} to {watched.growth_high_ratio:+.1%}"
        rows += [
            ("overhead per device, watched", f"{watched.overhead_ms_per_device:.2f} ms", ""),
            ("overhead per device, not watched", f"{watched.unwatched_overhead_ms_per_device:.2f} ms", ""),
            (f"growth, median of {watched.pairs} pairs", f"{watched.growth_ratio:+.1%} ({between})", "5 %"),
            *(
                (f"processor time per device: {name}, not watched / watched", f"{before:.2f} / {after:.2f} ms", "")
                for name, before in watched.unwatched_cpu_ms_per_device.items()
                for after in (watched.cpu_ms_per_device[name],)
            ),
        ]
    rows += [
        (
            f"coordinator, {cohort.devices} uploads of {_mb(cohort.upload_bytes)}: before / peak",
            f"{_mb(cohort.before_bytes)} / {_mb(cohort.peak_rss_bytes)}",
            "no growth",
        )
        for cohort in report.cohorts
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table)


def _shown(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)


def _mb(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:.1f} MB"
