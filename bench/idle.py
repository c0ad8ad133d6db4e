"""`python -m bench idle`: a device that waits for a run: its memory, and the time until it is connected."""

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table

from bench.bytecode import with_bytecode
from bench.edge import edge_command, noise_folder, read_memory
from coordinator.security.broker import start_broker
from fedvit.errors import FedvitError
from fleet.processes import Fleet, last_line, log_text

CONNECTED = "connected to the broker"
"""The device logs it when it is connected."""
MEGA = 1e6
POLL_S = 0.005
PATIENCE_S = 60.0
SETTLE_S = 3.0


class IdleReport(Struct, frozen=True, kw_only=True):
    """Medians over the starts."""

    connected_s: float  # from the start of the process
    rss_bytes: int  # SETTLE_S later, with mapped files
    anonymous_bytes: int
    starts: int
    connected_s_runs: tuple[float, ...]


def run_idle(
    *, starts: int = 3, settle_s: float = SETTLE_S, progress: Callable[[str], None] = lambda line: None
) -> IdleReport:
    """Start a broker and, one after the other, edge processes that find no coordinator.

    Raises FedvitError when one does not connect.
    """
    times, resident, anonymous = [], [], []
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made, contextlib.ExitStack() as stack:
        home = Path(made)
        data = noise_folder(home / "parts", images=8, size=32)
        broker = start_broker("auto", home / "broker", port=0)
        stack.callback(broker.stop)
        address = f"mqtt://{broker.address}"
        for number in range(starts):
            log = home / f"device-{number}.log"
            with Fleet() as fleet:
                began = time.monotonic()
                device = fleet.start("device", with_bytecode(edge_command(address, data, home / "state")), log=log)
                while CONNECTED not in log_text(log):
                    if device.poll() is not None or time.monotonic() - began > PATIENCE_S:
                        raise FedvitError(f"the device did not connect: {last_line(log)}")
                    time.sleep(POLL_S)
                times.append(time.monotonic() - began)
                time.sleep(settle_s)
                memory = read_memory(device.pid)
            resident.append(memory["VmRSS"])
            anonymous.append(memory["RssAnon"])
            progress(f"start {number + 1}/{starts}: {times[-1]:.2f} s, {resident[-1] / MEGA:.0f} MB")
    return IdleReport(
        connected_s=median(times),
        rss_bytes=int(median(resident)),
        anonymous_bytes=int(median(anonymous)),
        starts=starts,
        connected_s_runs=tuple(times),
    )


def idle_table(report: IdleReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("connected s", "resident MB", "without files MB"):
        table.add_column(heading, justify="right")
    sizes = (f"{size / MEGA:.1f}" for size in (report.rss_bytes, report.anonymous_bytes))
    table.add_row(f"{report.connected_s:.2f}", *sizes)
    return table
