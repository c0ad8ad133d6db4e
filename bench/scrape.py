"""`python -m bench scrape`: the time of a scrape of a coordinator with many devices."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from urllib.request import urlopen

import msgspec
from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table

from coordinator.compute.process import Worker
from coordinator.config import make_config
from coordinator.record.record import open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.display import Display
from coordinator.views.prometheus import CoordinatorCollector, Observed, Served
from fedvit.monitoring import ListenAddress, Watched, serve_metrics
from fedvit.resources import DeviceProfile, ResourceUse
from fedvit.timings import LoopWatch
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import Hello, Result

RUN = "scraped"


class ScrapeReport(Struct, frozen=True, kw_only=True):
    """Over HTTP on loopback, from the request to the last byte."""

    devices: int
    scrapes: int
    median_s: float
    longest_s: float
    answer_bytes: int


def run_scrape(*, devices: int, scrapes: int, progress: Callable[[str], None] = lambda line: None) -> ScrapeReport:
    """A coordinator whose devices have all joined and brought a result in one closed round; no loop is running."""
    names = [f"device-{number:05d}" for number in range(devices)]
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
        store = open_record(Path(made))
        config = make_config({"method": "fedavg", "devices": devices}, "bench").run
        store.runs.create(RUN, msgspec.to_builtins(config))
        store.rounds.open(RUN, 1, names)
        use = ResourceUse(peak_rss_bytes=200_000_000, sent_bytes=1_000_000, received_bytes=2_000_000)
        trained = Result(RUN, 1, "train", 20, {"loss": 0.5}, use)
        tested = Result(RUN, 1, "evaluate", 20, {"correct": 10.0}, use)
        store.tasks.add_results([(name, result, None) for name in names for result in (trained, tested)])
        store.rounds.close(RUN, 1, None, {"devices_s": 1.0, "server_s": 1.0}, names)
        store.rounds.close_evaluation(RUN, 1)
        coordinator = Coordinator(
            run=RUN, config=config, transport=MemoryTransport(SimpleQueue(), MemoryBroker(), "coordinator"),
            store=store, folder=Path(made) / RUN, display=Display(), compute=Worker(),
        )  # fmt: skip
        profile = DeviceProfile(host="bench", machine="bench", cores=4, threads=4)
        for name in names:
            coordinator.state.presence.arrived(name, Hello("i", "0.1", profile, ("a", "b"), 20, 20))
        loop = LoopWatch(0.1)
        served = [Served(coordinator, loop)]
        observed = Observed(coordinator.transport, lambda: True, store, Path(made), lambda: served, {})
        collector = CoordinatorCollector(observed)
        with serve_metrics(ListenAddress("127.0.0.1", 0)) as monitor:
            monitor.show(lambda: Watched(collector, collector.loops, collector.why_not_ready))
            progress(monitor.url)
            times, answer = [], b""
            for _ in range(scrapes + 1):
                began = time.perf_counter()
                with urlopen(monitor.url) as response:
                    answer = response.read()
                times.append(time.perf_counter() - began)
        store.close()
    times = times[1:]  # the first one opens a connection to the database
    return ScrapeReport(
        devices=devices, scrapes=scrapes, median_s=median(times), longest_s=max(times), answer_bytes=len(answer)
    )


def scrape_table(report: ScrapeReport) -> RenderableType:
    table = Table(box=box.SIMPLE)
    for heading in ("devices", "scrapes", "median, ms", "longest, ms", "answer, kB"):
        table.add_column(heading, justify="right")
    table.add_row(
        str(report.devices), str(report.scrapes), f"{1e3 * report.median_s:.1f}", f"{1e3 * report.longest_s:.1f}",
        f"{report.answer_bytes / 1e3:.1f}",
    )  # fmt: skip
    return table
