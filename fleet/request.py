"""A request to run one configuration on devices of this machine, and its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedvit.roles import ProductPrecision

if TYPE_CHECKING:
    from coordinator.run_view import RunView
    from edge_client.agent import Agent

Engine = Literal["auto", "onnx", "torch", "eager"]
"""Engines of the devices' part of a simulation: onnxruntime, as on a device; torch, many devices in one batch; or
torch, one device after the other, operator by operator, as a method's code is written. "auto" is torch on a GPU."""

LONG_DEADLINE_S = 7 * 86400.0
"""Deadline of rounds on virtual devices: they wait for their turn, and a slow machine must not lose them."""
SIMULATION_DEFAULTS: dict[str, Any] = {"accelerator": "cpu", "deadline_s": LONG_DEADLINE_S}
"""Defaults of simulations that differ from those of runs on devices."""


@dataclass(frozen=True)
class RunRequest:
    """Run the configuration `settings`, as in a file, on `devices`; its folder is `out`/`run`."""

    devices: Sequence[Path] | Mapping[str, Path]  # folders of images, which have the devices' names or are named here
    settings: Mapping[str, Any]
    _: KW_ONLY
    out: Path  # folder of all runs
    run: str
    threads: int = 1  # of a device that computes
    at_once: int | None = None  # devices that compute at the same time; None: one per core
    engine: Engine = "onnx"
    checks_export: bool = False  # engines of torch: also export each method's graphs, which real devices would run
    precision: ProductPrecision = "fp32"  # of products in the torch engine
    fused: bool | None = None  # compile steps of the torch engine; None: for long runs on a GPU
    resume: bool = False  # continue an existing run of that name; without, it must not exist
    label: str | None = None  # the run's name in metrics; None: its own
    graph_cache: Path | None = None
    agent_kinds: Mapping[str, type["Agent"]] = field(default_factory=dict)  # other agents, by device

    @property
    def folders(self) -> dict[str, Path]:
        """Folder of images by the device's name."""
        if isinstance(self.devices, Mapping):
            return dict(self.devices)
        return {folder.name: folder for folder in self.devices}

    @property
    def home(self) -> Path:
        """The run's folder."""
        return self.out / self.run


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run on this machine."""

    summary: "RunView"
    seconds: float
    folder: Path
