"""`python -m bench cap`: does a real device complete a round of EFTViT under a hard memory limit?"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bench.bytecode import with_bytecode
from bench.edge import MemoryWatch, noise_folder
from bench.memory_limit import Kind, MemoryLimit, limited
from bench.one_round import one_round

MEGA = 1e6


@dataclass(frozen=True, kw_only=True)
class CapSettings:
    """One round of EFTViT on one device."""

    limit_bytes: int
    model: str = "vit_base_patch16_224"
    model_options: dict[str, Any] = field(default_factory=dict)
    image_size: int = 224
    batch_size: int = 8
    micro_batch: int = 2  # images at a time, to save memory
    images: int = 24
    precision: str = "fp32"  # of weights that the device does not train
    options: dict[str, Any] = field(default_factory=dict)  # other options of the method
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
    evaluated: bool  # the coordinator accepted the result of the evaluation after it
    reason: str | None  # why the run failed
    limited_by: Kind
    limit_bytes: int
    peak_bytes: int | None  # as the cgroup counts, with cached files; without a cgroup as peak_rss_bytes
    peak_rss_bytes: int | None  # of the process, with mapped files
    peak_anonymous_bytes: int | None  # of the process, without files; sampled
    kills: int
    model: str
    batch_size: int
    micro_batch: int
    precision: str
    step_s: float | None
    train_s: float | None  # of the device in the round, without transfers
    seconds: float  # of everything, with the coordinator's part


def run_cap(settings: CapSettings, progress: Callable[[str], None] = lambda line: None) -> CapReport:
    """Run a broker, a coordinator and, under the limit, an edge process; all have ended when it returns.

    Raises FedvitError when the coordinator fails, for instance because settings do not fit the method or the model.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made, contextlib.ExitStack() as stack:
        home = Path(made)
        data = noise_folder(home / "parts", images=settings.images, size=settings.image_size)
        limit = stack.enter_context(limited(settings.limit_bytes))
        session = stack.enter_context(
            one_round(home, settings.run, data, command=lambda plain: limit.command(with_bytecode(plain)))
        )
        progress(f"{session.broker}; {settings.limit_bytes / MEGA:.0f} MB for the device, limited by {limit.kind}")
        watch = stack.enter_context(MemoryWatch(session.device.pid, "VmHWM", "RssAnon"))
        reason = session.wait(
            settings.patience_s,
            died=lambda code: _killed(limit),
            report=lambda line: progress(f"device's peak {watch.peaks.get('RssAnon', 0) / MEGA:.0f} MB; {line}"),
        )
        results = session.results
        use = results["train"].use if "train" in results else None
        peaks, counted = watch.peaks, limit.peak_bytes()
        return CapReport(
            completed="train" in results,
            evaluated="evaluate" in results,
            reason=reason,
            limited_by=limit.kind,
            limit_bytes=settings.limit_bytes,
            peak_bytes=peaks.get("VmHWM") if counted is None else counted,
            peak_rss_bytes=peaks.get("VmHWM"),
            peak_anonymous_bytes=peaks.get("RssAnon"),
            kills=limit.kills(),
            model=settings.model,
            batch_size=settings.batch_size,
            micro_batch=settings.micro_batch,
            precision=settings.precision,
            step_s=use.step_s if use else None,
            train_s=use.train_s if use else None,
            seconds=time.monotonic() - session.began,
        )


def _killed(limit: MemoryLimit) -> str | None:
    return "the kernel killed the device: it needs more memory than the limit" if limit.kills() else None


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
        "total": f"{report.seconds:.0f} s",
    }
    for name, text in rows.items():
        if text is not None:
            table.add_row(name, Text(text))
    return table


def _megabytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / MEGA:.0f} MB"
