"""`python -m bench cap`: a round of EFTViT on a real device under a hard memory limit."""

import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.child import with_bytecode
from bench.edge import MemoryWatch, make_noise_folder
from bench.memory_limit import MemoryLimit, limit_memory
from bench.one_round import start_round
from bench.reporting import MEGA, Progress, Report


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
    optimizer_bits: int = 32  # of each number that the optimizer remembers
    options: dict[str, Any] = field(default_factory=dict)  # other options of the method
    patience_s: float = 1800.0

    @property
    def run(self) -> dict[str, Any]:
        """Configuration of the run, as a file would give it."""
        options: dict[str, Any] = {"epochs": 1, "batch_size": self.batch_size, "server_epochs": 1}
        options |= {"micro_batch": self.micro_batch, "optimizer_bits": self.optimizer_bits, **self.options}
        if self.precision != "fp32":
            options["frozen_precision"] = self.precision
        return {
            "method": "eftvit", "options": options, "model": self.model, "model_options": self.model_options,
            "rounds": 1, "devices": 1, "deadline_s": self.patience_s, "rejoin_grace_s": 5.0,
        }  # fmt: skip


def run_cap(settings: CapSettings, progress: Progress = lambda line: None) -> Report:
    """Run a broker, a coordinator and, under the limit, an edge process; all have ended when it returns.

    Raises FedvitError when the coordinator fails, for instance because settings do not fit the method or the model.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        data = make_noise_folder(home / "parts", images=settings.images, size=settings.image_size)
        limit = stack.enter_context(limit_memory(settings.limit_bytes))
        session = stack.enter_context(
            start_round(home, settings.run, data, command=lambda plain: limit.command(with_bytecode(plain)))
        )
        progress(f"{session.broker}; {settings.limit_bytes / MEGA:.0f} MB for the device, limited by {limit.kind}")
        watch = stack.enter_context(MemoryWatch(session.device.pid, "VmHWM", "RssAnon"))
        reason = session.wait(
            settings.patience_s,
            died=lambda code: _explain_death(limit),
            report=lambda line: progress(f"device's peak {watch.peaks.get('RssAnon', 0) / MEGA:.0f} MB; {line}"),
        )
        results = session.results
        use = results["train"].use if "train" in results else None
        peaks, counted = watch.peaks, limit.peak_bytes()
        return {
            "completed": "train" in results,  # the coordinator accepted the result of the whole training round
            "evaluated": "evaluate" in results,
            "reason": reason,
            "limited_by": limit.kind,
            "limit_bytes": settings.limit_bytes,
            "peak_bytes": peaks.get("VmHWM") if counted is None else counted,
            "peak_rss_bytes": peaks.get("VmHWM"),  # of the process, with mapped files
            "peak_anonymous_bytes": peaks.get("RssAnon"),  # of the process, without files; sampled
            "kills": limit.kills(),
            "model": settings.model,
            "batch_size": settings.batch_size,
            "micro_batch": settings.micro_batch,
            "precision": settings.precision,
            "step_s": use.step_s if use else None,
            "train_s": use.train_s if use else None,  # of the device in the round, without transfers
            "seconds": time.monotonic() - session.began,  # of everything, with the coordinator's part
        }


def _explain_death(limit: MemoryLimit) -> str | None:
    return "the kernel killed the device: it needs more memory than the limit" if limit.kills() else None
