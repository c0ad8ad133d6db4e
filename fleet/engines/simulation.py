"""A federation without devices: torch computes each cohort in batches, on a processor or a GPU.

There are no messages, no broker and no uploaded files. The round engine, the Programs' phases, the methods' steps and
server rules, the random draws and the record are those of a run on devices.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.compute.checkpoint import load_state, start_state, write_models
from coordinator.compute.planning.planner import make_plan
from coordinator.config import RunConfig
from coordinator.record.record import Record
from coordinator.record.scores import BEST
from coordinator.rounds.display import Display, View
from coordinator.rounds.engine import RoundEngine
from coordinator.rounds.ports import Ports
from coordinator.rounds.preparation import check_class_count
from coordinator.rounds.quarantine import Quarantine
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, FedvitError
from fedvit.tensors import Tensors, map_tensors
from fleet.engines.devices import SimulatedDevices
from fleet.engines.journal import CheckpointHistory, CheckpointJournal
from fleet.engines.server import TorchServer
from fleet.engines.settings import TorchSettings
from fleet.engines.trainer import TorchTrainer


def check_engine_config(config: RunConfig) -> None:
    """Raises ConfigError for settings of late, lost or limited devices, which this engine does not simulate."""
    for options in (config.options, *config.variants.values()):
        if (bits := options.get("optimizer_bits", 32)) != 32:
            raise ConfigError(
                "FV2109", f"optimizer_bits = {bits!r} is a matter of devices' own memory: use engine = 'onnx'"
            )
    network = {
        "mode": not config.asks_cohorts(),
        "rounds": config.rounds == 0,
        "over_select": config.over_select > 0,
        "late": config.late != "refuse",
        "budget": any(value is not None for value in msgspec.to_builtins(config.budget).values()),
    }
    for key, used in network.items():
        if used:
            value = msgspec.to_builtins(getattr(config, key))
            raise ConfigError(
                "FV2109", f"{key} = {value!r} needs devices that answer at different times: use engine = 'onnx'"
            )


@dataclass(frozen=True, kw_only=True)
class TorchSimulation:
    """One run.

    `folders` gives the devices' names and folders of images; `config` is one that `check_engine_config` takes.
    """

    run: str
    config: RunConfig
    store: Record
    home: Path
    folders: Mapping[str, Path]
    settings: TorchSettings
    display: Display
    graph_cache: Path | None = None

    def run_rounds(self) -> None:
        """Run all rounds that are not finished. Raises DataError for folders that cannot be used, and FedvitError when
        the run fails."""
        run, config, store = self.run, self.config, self.store
        engine = "eager" if self.settings.is_eager else "torch"
        if (began := store.runs.read(run).program) not in (None, engine):
            raise ConfigError(
                "FV1509", f"run {run} began with program {began}, not with engine {engine}: resume it with that engine"
            )
        blobs = BlobStore(self.home / "blobs")
        opened = {folder: DeviceData.open(folder) for folder in dict.fromkeys(self.folders.values())}
        earlier, start = config.start_from, None
        if earlier is not None:
            start = start_state(earlier, store, self.home.parent, config.start_round)
        plan = make_plan(config, self._classes(opened), blobs, start=start, cache=self.graph_cache, progress=self._show)
        data = {name: opened[folder] for name, folder in self.folders.items()}
        if self.settings.checks_export:
            for method in {plan.method_for(name, 1) for name in data}:
                plan.export(method)
        devices = SimulatedDevices(config, plan, blobs, data, self.settings, log=self.display.line)
        quarantine = Quarantine(run, store, config.robust)
        trainer = TorchTrainer(config, devices, quarantine, self.display)
        server = TorchServer(run, store, plan, blobs, trainer)
        journal = CheckpointJournal(run, store, self.home, blobs, trainer, server)
        ports = Ports(trainer, trainer, journal, CheckpointHistory(run, store))
        rounds = RoundEngine(run, config, ports, step=server.step, report=self.display.line)
        known = {"classes": list(plan.classes), "program": engine, "protocol": plan.protocol}
        store.runs.update(run, status="running", **known)
        try:
            journal.resume()
            rounds.run()
            write_models(self.home, server.state, plan.rule, journal.devices_seen(), config.seed)
            if (best := journal.read_best()) is not None:
                state = load_state(best, blobs, plan.values)
                write_models(self.home / BEST, state, plan.rule, journal.devices_seen(), config.seed)
            reason = rounds.scores.reason
            store.runs.update(run, status="finished", reason=reason and f"stopped: {reason}")
        except KeyboardInterrupt:
            store.runs.update(run, status="interrupted")
            raise
        except (FedvitError, OSError) as error:
            with suppress(FedvitError):
                store.runs.update(run, status="failed", reason=str(error))
            raise

    def _classes(self, opened: Mapping[Path, DeviceData]) -> tuple[str, ...]:
        classes = self.config.classes or tuple(sorted({name for data in opened.values() for name in data.classes}))
        check_class_count(self.config, classes)
        if left_out := sorted({name for data in opened.values() for name in data.empty} - set(classes)):
            self.display.line(f"class folders without an image on any device, not of this run: {', '.join(left_out)}")
        return classes

    def _show(self, text: str) -> None:
        if self.display.due():
            self.display.show(View(text))


def read_kept_tensors(home: Path, device: str, number: int | None = None) -> Tensors:
    """The tensors that a device kept for itself in the run in the folder `home`, as its vault would hold them: after a
    round that is kept, or the last."""
    files = {int(file.stem.partition("-")[2]): file for file in (home / "state").glob("devices-*.safetensors")}
    kept: Tensors = {}
    for name, value in map_tensors(files[max(files) if number is None else number]).items() if files else ():
        kind, of, *tensor = name.split("/", 2)
        if (kind, of) == ("kept", device):
            kept[tensor[0]] = value
    return kept
