"""A whole federation in one process, for experiments and tests: the usual coordinator and agents on a transport in
memory. The same seed gives the same tensors.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import torch

from coordinator.compute.accelerator import choose_accelerator, torch_devices
from coordinator.compute.engine import Engine as Compute
from coordinator.compute.planning.checks import checked_config
from coordinator.config import RunConfig
from coordinator.record.record import Record, open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.parts import RunSetup
from coordinator.run_view import read_run
from coordinator.views.trackers.following import check_writers, following
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import private_files
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fleet.engines.settings import TorchSettings
from fleet.engines.simulation import TorchSimulation, check_engine_config
from fleet.request import SIMULATION_DEFAULTS, RunOutcome, RunRequest
from fleet.virtual import Host, HostSettings
from profiles.probes.host import usable_cores


class _Simulation(NamedTuple):
    """A run that is recorded, and about to start."""

    request: RunRequest
    config: RunConfig
    store: Record
    display: Display
    metrics: AbstractContextManager[None]  # writes them inside of its block

    @property
    def at_once(self) -> int:
        return self.request.at_once or max(1, usable_cores() // self.request.threads)


@private_files()
def simulate(request: RunRequest, display: Display | None = None) -> RunOutcome:
    """Run one configuration with one virtual device per folder, in this process.

    The settings override SIMULATION_DEFAULTS. The engine "auto" is torch if the run's `accelerator` is a GPU. Files are
    those of `fleet run`.

    Raises FedvitError when the run fails, ConfigError when the run to resume had another configuration. After Ctrl-C,
    which raises KeyboardInterrupt, the run can be resumed.
    """
    settings = {**SIMULATION_DEFAULTS, **request.settings, "devices": len(request.devices)}
    config = checked_config(settings, "simulation").run
    check_writers(config.trackers, "simulation")
    accelerator = choose_accelerator(config.accelerator)  # fails before the run is recorded
    chosen = "onnx" if accelerator.startswith("cpu") else "torch"
    is_on_torch = (chosen if request.engine == "auto" else request.engine) != "onnx"
    if is_on_torch:
        if len(torch_devices(accelerator)) > 1:
            raise ConfigError(
                "FV2110", f"accelerator = {accelerator!r}: engine {request.engine} computes on one; use engine = 'onnx'"
            )
        check_engine_config(config)
    store = open_record(request.out)
    if not (request.resume and _has_run(store, request.run, config)):
        store.runs.create(request.run, msgspec.to_builtins(config))
    display = display or Display()
    metrics = following(request.run, config, store, request.home, display.line, label=request.label)
    simulation = _Simulation(request, config, store, display, metrics)
    return _run_on_torch(simulation, accelerator) if is_on_torch else _run_on_agents(simulation)


def _run_on_agents(simulation: _Simulation) -> RunOutcome:
    """Run the coordinator in this thread, and all devices in another one."""
    request, config, store, home = simulation.request, simulation.config, simulation.store, simulation.request.home
    broker = MemoryBroker()
    compute = Compute(run=request.run, config=config, store=store, folder=home, graph_cache=request.graph_cache)
    coordinator = Coordinator(
        RunSetup(
            run=request.run,
            config=config,
            transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
            store=store,
            folder=home,
            display=simulation.display,
            compute=compute,
        )
    )
    settings = HostSettings(
        federation=config.federation,
        state=home / "state",
        blobs=home / "state" / "blobs",
        threads=request.threads,
        at_once=simulation.at_once,
        software="simulation",
    )
    host = Host(
        request.folders, lambda name, inbox: MemoryTransport(inbox, broker, name), settings, request.agent_kinds
    )
    stop = threading.Event()
    errors: list[Exception] = []

    def take_part() -> None:
        try:
            host.serve(stop, once=True)
        except Exception as error:  # noqa: BLE001 - raised again below, since the run would wait forever
            errors.append(error)
            coordinator.stop()

    devices = threading.Thread(target=take_part, name="devices", daemon=True)
    began = time.monotonic()
    try:
        devices.start()
        with simulation.metrics:
            coordinator.serve()
        return RunOutcome(read_run(store, request.run), time.monotonic() - began, home)
    except Interrupted:
        if errors:
            raise errors[0] from None
        raise
    except KeyboardInterrupt:
        with suppress(StorageFailed):
            store.runs.update(request.run, status="interrupted")
        raise
    finally:
        stop.set()
        devices.join()
        compute.close()
        store.close()


def _run_on_torch(simulation: _Simulation, accelerator: str) -> RunOutcome:
    """Run cohorts in batches on the accelerator."""
    request, store = simulation.request, simulation.store
    began = time.monotonic()
    with _torch_threads(simulation.at_once * request.threads):
        try:
            rounds = TorchSimulation(
                run=request.run,
                config=simulation.config,
                store=store,
                home=request.home,
                folders=request.folders,
                settings=TorchSettings(
                    accelerator,
                    request.precision,
                    request.fused,
                    is_eager=request.engine == "eager",
                    checks_export=request.checks_export,
                ),
                display=simulation.display,
                graph_cache=request.graph_cache,
            )
            with simulation.metrics:
                rounds.run_rounds()
            return RunOutcome(read_run(store, request.run), time.monotonic() - began, request.home)
        finally:
            store.close()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads inside of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _has_run(store: Record, run: str, config: RunConfig) -> bool:
    """Return True if the run is in the record. Raises ConfigError if it began with another configuration."""
    records = [record for record in store.runs.read_all() if record.id == run]
    settings = msgspec.json.decode(msgspec.json.encode(config))
    if records and _without_metrics(records[0].config) != _without_metrics(settings):
        raise ConfigError(
            "FV1616", f"run {run!r} began with another configuration; resume it with that, or choose another name"
        )
    return bool(records)


def _without_metrics(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out `metrics`, which may change."""
    return {key: value for key, value in config.items() if key != "trackers"}
