"""`python -m bench control`: a waiting coordinator, and its response times while its worker process computes."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table

from bench.bytecode import with_bytecode
from bench.edge import read_memory
from coordinator.config import make_config
from coordinator.record.record import open_record
from coordinator.rounds.status import read_status
from coordinator.security.broker import start_broker
from fedvit.errors import ConfigError, FedvitError
from fedvit.resources import DeviceProfile
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import Hello, Welcome, decode, encode
from fedvit.wire.topics import Topics
from fleet.processes import Fleet, last_line, log_text, program

WAITS = "waiting for 1 device"
MEGA = 1e6
POLL_S = 0.005
PATIENCE_S = 120.0
SETTLE_S = 3.0
ANSWER_S = 30.0
ASK_EVERY_S = 0.05
PROBE = "probe"
CLASSES = tuple(f"class number {number:03d}" for number in range(120))
"""Enough for a hello of about 2 kB."""
RUN: dict[str, Any] = {
    "method": "eftvit",
    "model": "vit_small_patch16_224",
    "accelerator": "cpu",
    "classes": list(CLASSES),
    "rounds": 1,
}
"""The worker process traces, exports and checks its graphs for a minute or more."""


class ControlReport(Struct, frozen=True, kw_only=True):
    first_line_s: float  # from the start of the process
    waits_s: float  # from the start until it waits for devices
    status_s: float  # of `coordinator status`, as a process
    rss_bytes: int  # of the coordinator while it waits
    hello_bytes: int
    answers: int  # hellos that were answered while the worker process computed
    busy_s: float
    median_s: float  # from a hello to its welcome
    p99_s: float
    slowest_s: float
    load: float  # of the machine during this: runnable processes, average over a minute
    cores: int


def run_control(*, seconds: float, progress: Callable[[str], None] = lambda line: None) -> ControlReport:
    """Start a coordinator, and send it hellos while it prepares the run.

    Raises FedvitError when the coordinator does not start or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made, contextlib.ExitStack() as stack:
        home = Path(made)
        out, log = home / "runs", home / "coordinator.log"
        broker = start_broker("auto", home / "broker", port=0)
        stack.callback(broker.stop)
        store = open_record(out)
        store.runs.create("run", msgspec.to_builtins(make_config(RUN, "bench").run))
        store.close()
        address = f"mqtt://{broker.address}"
        command = [*program("coordinator.cli"), "start", "--resume", "run", "--runs", str(out), "--broker", address]
        fleet = stack.enter_context(Fleet())
        stack.enter_context(_cache(home / "cache"))
        began = time.monotonic()
        coordinator = fleet.start("coordinator", with_bytecode(command), log=log)
        times = []
        for line in ("run run", WAITS):
            while line not in log_text(log):
                if coordinator.poll() is not None or time.monotonic() - began > PATIENCE_S:
                    raise FedvitError(f"the coordinator does not wait for devices: {last_line(log)}")
                time.sleep(POLL_S)
            times.append(time.monotonic() - began)
        time.sleep(SETTLE_S)
        memory = read_memory(coordinator.pid)
        progress(f"waits for devices after {times[1]:.2f} s, with {memory['VmRSS'] / MEGA:.0f} MB")
        began = time.monotonic()
        subprocess.run([*program("coordinator.cli"), "status", "--runs", str(out)], check=True, capture_output=True)
        status_s = time.monotonic() - began
        hello, latencies, busy_s = _send_hellos(broker.address, out / "run", seconds)
        progress(f"{len(latencies)} hellos in {busy_s:.0f} s, median {median(latencies) * 1e3:.1f} ms")
    return ControlReport(
        first_line_s=times[0],
        waits_s=times[1],
        status_s=status_s,
        rss_bytes=memory["VmRSS"],
        hello_bytes=hello,
        answers=len(latencies),
        busy_s=busy_s,
        median_s=median(latencies),
        p99_s=sorted(latencies)[int(0.99 * len(latencies))],
        slowest_s=max(latencies),
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
    )


def _send_hellos(address: Address, run: Path, seconds: float) -> tuple[int, list[float], float]:
    """(bytes of a hello, seconds until each was answered, seconds that were measured)."""
    topics, inbox = Topics("home"), SimpleQueue[object]()
    transport = MqttTransport(inbox, address, client_id=PROBE)
    transport.subscribe(topics.to_device(PROBE), 1)
    transport.open()
    profile = DeviceProfile(host="bench", machine="none", cores=1, threads=1)
    hello = encode(Hello("probe", "0", profile, CLASSES, 50, 10))
    latencies: list[float] = []
    try:
        _wait_for(inbox, lambda event: isinstance(event, Connected))
        began = time.monotonic()
        while time.monotonic() - began < seconds and not (latencies and _is_prepared(run)):
            sent = time.monotonic()
            transport.publish(topics.from_device(PROBE), hello, qos=1)
            _wait_for(inbox, lambda event: isinstance(event, Received) and isinstance(decode(event.payload), Welcome))
            latencies.append(time.monotonic() - sent)
            time.sleep(ASK_EVERY_S)
        return len(hello), latencies, time.monotonic() - began
    finally:
        transport.close()


def _wait_for(inbox: "SimpleQueue[object]", matches: Callable[[object], bool]) -> None:
    until = time.monotonic() + ANSWER_S
    while True:
        try:
            if matches(inbox.get(timeout=max(0.0, until - time.monotonic()))):
                return
        except Empty:
            raise FedvitError(f"no answer within {ANSWER_S:.0f} s") from None


def _is_prepared(run: Path) -> bool:
    with contextlib.suppress(ConfigError):
        return read_status(run).doing.startswith("round ")
    return False


@contextlib.contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Within it the graph cache is empty."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def control_table(report: ControlReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in (
        "first line s", "waits s", "status s", "waiting MB", "hellos", "busy s", "median ms", "p99 ms", "slowest ms",
        "load",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    latencies = (f"{value * 1e3:.1f}" for value in (report.median_s, report.p99_s, report.slowest_s))
    table.add_row(
        f"{report.first_line_s:.2f}", f"{report.waits_s:.2f}", f"{report.status_s:.2f}",
        f"{report.rss_bytes / MEGA:.0f}", str(report.answers), f"{report.busy_s:.0f}", *latencies,
        f"{report.load:.1f} on {report.cores} cores",
    )  # fmt: skip
    return table
