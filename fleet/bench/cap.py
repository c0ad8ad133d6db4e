"""`fleet bench cap`: does a real device get through a round of EFTViT under a hard limit on its memory?"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.broker import start_broker
from coordinator.store import Store
from fedvit.errors import FedvitError
from fleet.bench.bytecode import with_bytecode
from fleet.bench.edge import MemoryWatch, edge_command, last_line, noise_folder
from fleet.bench.memory_limit import Kind, MemoryLimit, limited
from fleet.processes import Fleet, program

RUN = "cap"
MEGA = 1e6
POLL_S = 0.1
SAY_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class CapSettings:
    """One round of EFTViT on one device."""

    limit_bytes: int
    model: str = "vit_base_patch16_224"
    model_options: dict[str, Any] = field(default_factory=dict)
    image_size: int = 224
    batch_size: int = 8
    micro_batch: int = 2  # images at a time: whoever has little memory says so
    images: int = 24
    precision: str = "fp32"  # of weights that the device does not train
    options: dict[str, Any] = field(default_factory=dict)  # others of the method
    patience_s: float = 1800.0

    @property
    def run(self) -> dict[str, Any]:
        """The configuration of the run, as a file would give it."""
        options: dict[str, Any] = {"epochs": 1, "batch_size": self.batch_size, "server_epochs": 1}
        options |= {"micro_batch": self.micro_batch, **self.options}
        if self.precision != "fp32":
            options["frozen_precision"] = self.precision
        return {
            "method": "eftvit", "options": options, "model": self.model, "model_options": self.model_options,
            "rounds": 1, "devices": 1, "deadline_s": self.patience_s, "rejoin_grace_s": 5.0,
        }  # fmt: skip


class CapReport(Struct, frozen=True, kw_only=True):
    completed: bool  # the coordinator accepted the result of a whole training round
    evaluated: bool  # and that of the evaluation after it
    reason: str | None  # why not
    limited_by: Kind
    limit_bytes: int
    peak_bytes: int | None  # as the cgroup counts: with files that lie in memory; without a cgroup as peak_rss_bytes
    peak_rss_bytes: int | None  # of the process, with files that it has mapped
    peak_anonymous_bytes: int | None  # of the process, without files; sampled
    kills: int
    model: str
    batch_size: int
    micro_batch: int
    precision: str
    step_s: float | None
    train_s: float | None  # the device's work in the round, without transfers
    seconds: float  # all of it, with the coordinator's part


def run_cap(settings: CapSettings, progress: Callable[[str], None] = lambda line: None) -> CapReport:
    """Run a broker, a coordinator and, under the limit, an edge process; all are gone when it returns.

    Raises FedvitError when the coordinator fails, also when the settings do not fit the method or the model.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made, contextlib.ExitStack() as stack:
        home = Path(made)
        data = noise_folder(home / "parts", images=settings.images, size=settings.image_size)
        broker = start_broker("auto", home / "broker", port=0)
        stack.callback(broker.stop)
        store = Store.in_folder(home / "runs")
        stack.callback(store.close)
        address = f"mqtt://{broker.address.host}:{broker.address.port}"
        limit = stack.enter_context(limited(settings.limit_bytes))
        progress(f"{broker.kind}; {settings.limit_bytes / MEGA:.0f} MB for the device, limited by {limit.kind}")
        fleet = stack.enter_context(Fleet())
        coordinator = fleet.start("coordinator", _coordinator(home, settings, address), log=home / "coordinator.log")
        device = fleet.start(
            "device", limit.command(with_bytecode(edge_command(address, data, home / "state"))), log=home / "device.log"
        )
        watch = stack.enter_context(MemoryWatch(device.pid, "VmHWM", "RssAnon"))
        return _Watched(settings, home, store, coordinator, device, limit, watch, progress).report()


def _coordinator(home: Path, settings: CapSettings, address: str) -> list[str]:
    file = home / "run.toml"
    file.write_bytes(msgspec.toml.encode({**settings.run, "broker": {"broker": address}}))
    return [*program("coordinator.cli"), "start", "--config", str(file), "--out", str(home / "runs"), "--run", RUN]


@dataclass
class _Watched:
    """A round under way."""

    settings: CapSettings
    home: Path
    store: Store
    coordinator: subprocess.Popen[bytes]
    device: subprocess.Popen[bytes]
    limit: MemoryLimit
    watch: MemoryWatch
    progress: Callable[[str], None]

    def report(self) -> CapReport:
        began = time.monotonic()
        reason = self._wait(began)
        results = {result.kind: result for result in self.store.results(RUN)}
        use = results["train"].use if "train" in results else None
        peaks, counted = self.watch.peaks, self.limit.peak_bytes()
        return CapReport(
            completed="train" in results,
            evaluated="evaluate" in results,
            reason=reason,
            limited_by=self.limit.kind,
            limit_bytes=self.settings.limit_bytes,
            peak_bytes=peaks.get("VmHWM") if counted is None else counted,
            peak_rss_bytes=peaks.get("VmHWM"),
            peak_anonymous_bytes=peaks.get("RssAnon"),
            kills=self.limit.kills(),
            model=self.settings.model,
            batch_size=self.settings.batch_size,
            micro_batch=self.settings.micro_batch,
            precision=self.settings.precision,
            step_s=use.step_s if use else None,
            train_s=use.train_s if use else None,
            seconds=time.monotonic() - began,
        )

    def _wait(self, began: float) -> str | None:
        """Until the run is over, or the reason why it will never be."""
        said = began
        while self.coordinator.poll() is None:
            if (code := self.device.poll()) not in (None, 0):
                return self._death(int(code or 0))
            if reason := self._refused():
                return reason
            now = time.monotonic()
            if now - began > self.settings.patience_s:
                return f"not done within {self.settings.patience_s:.0f} s"
            if now - said >= SAY_EVERY_S:
                said = now
                self.progress(f"{now - began:.0f} s: {self._state()}")
            time.sleep(POLL_S)
        if self.coordinator.returncode != 0:
            raise FedvitError(
                f"the coordinator ended with code {self.coordinator.returncode}: "
                f"{last_line(self.home / 'coordinator.log')}"
            )
        return None

    def _death(self, code: int) -> str:
        if self.limit.kills():
            return "the kernel killed the device: it needs more memory than the limit"
        return f"the device ended with code {code}: {last_line(self.home / 'device.log')}"

    def _refused(self) -> str | None:
        refusals = self.store.refusals(RUN)
        return f"{refusals[0].kind}: {refusals[0].reason}" if refusals else None

    def _state(self) -> str:
        """What is going on, for whoever waits."""
        anonymous = self.watch.peaks.get("RssAnon", 0)
        return f"device at most {anonymous / MEGA:.0f} MB so far; {last_line(self.home / 'device.log')}"


def cap_table(report: CapReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    rows = {
        "EFTViT": f"{report.model}, batches of {report.batch_size}, {report.micro_batch} at a time, "
        f"frozen weights in {report.precision}",
        "limit": f"{report.limit_bytes / MEGA:.0f} MB, {report.limited_by}",
        "training round": "accepted" if report.completed else "failed",
        "evaluation": "accepted" if report.evaluated else "failed" if report.completed else "not reached",
        "reason": report.reason,
        "peak under the limit": _megabytes(report.peak_bytes),
        "peak resident": _megabytes(report.peak_rss_bytes),
        "peak without files": _megabytes(report.peak_anonymous_bytes),
        "step": None if report.step_s is None else f"{report.step_s:.2f} s",
        "all of it": f"{report.seconds:.0f} s",
    }
    for name, said in rows.items():
        if said is not None:
            table.add_row(name, Text(said))
    return table


def _megabytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / MEGA:.0f} MB"
