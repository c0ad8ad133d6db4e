"""A whole federation in one process, for experiments and tests: the usual coordinator and agents on a transport in
memory. The same seed gives the same tensors.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import msgspec

from coordinator.config import RunConfig
from coordinator.record.store import Store
from coordinator.rounds.display import Display
from coordinator.run_view import read_run
from coordinator.views.trackers.following import following
from coordinator.views.trackers.writers import check_writers
from edge_client.agent import Agent
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import private_files
from fedvit.roles import ProductPrecision
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fleet.run import FleetOutcome
from fleet.virtual import Host
from profiles.probes.host import usable_cores

Engine = Literal["auto", "onnx", "torch"]
DEFAULTS: dict[str, Any] = {"accelerator": "cpu", "deadline_s": 7 * 86400.0}
"""Defaults of simulations that differ from those of runs on devices: a slow machine must not lose devices."""


@private_files()
def simulate(
    folders: Sequence[Path] | Mapping[str, Path],
    values: dict[str, Any],
    *,
    out: Path,
    run: str,
    threads: int = 1,
    at_once: int | None = None,
    display: Display | None = None,
    graph_cache: Path | None = None,
    resume: bool = False,
    agent_kinds: Mapping[str, Callable[..., Agent]] | None = None,
    engine: Engine = "onnx",
    precision: ProductPrecision = "fp32",
    fused: bool | None = None,
    label: str | None = None,
) -> FleetOutcome:
    """Run one configuration with one virtual device per folder, in this process; a mapping names them.

    `values` is a configuration as in a file, which overrides DEFAULTS. At most `at_once` devices compute at the same
    time, with `threads` each; None: one per core. With `resume` an existing run of that name is resumed; without, it
    must not exist. Files are those of `fleet run`. `agent_kinds` has other classes of agents by folder name.

    `engine` computes the devices' part: "onnx" is onnxruntime, as on a device; "torch" computes cohorts in batches on
    the run's `accelerator` (fleet.engines); "auto" is torch where that is a GPU. `precision` is that of torch's
    products, `fused` whether steps are compiled, by default on a GPU for long runs.

    `label` is the run's name in metrics, by default its own.

    Raises FedvitError when the run fails, ConfigError when the run to resume had another configuration. After Ctrl-C,
    which raises KeyboardInterrupt, the run can be resumed.
    """
    from coordinator.compute.accelerator import choose_accelerator, torch_devices
    from coordinator.compute.engine import Engine as Compute
    from coordinator.compute.planning.checks import checked_config  # imports torch, which takes seconds
    from coordinator.rounds.coordinator import Coordinator
    from coordinator.rounds.inbox import Interrupted
    from fleet.engines.simulation import check_engine_config

    devices = folders if isinstance(folders, Mapping) else {folder.name: folder for folder in folders}
    config = checked_config({**DEFAULTS, **values, "devices": len(devices)}, "simulation").run
    check_writers(config.trackers, "simulation")
    accelerator = choose_accelerator(config.accelerator)  # fails before the run is recorded
    on_torch = engine == "torch" or (engine == "auto" and not accelerator.startswith("cpu"))
    if on_torch:
        if len(torch_devices(accelerator)) > 1:
            raise ConfigError(f"accelerator = {accelerator!r}: engine torch computes on one; use engine = 'onnx'")
        check_engine_config(config)
    home = out / run
    broker = MemoryBroker()
    store = Store.in_folder(out)
    if not (resume and _is_there(store, run, config)):
        store.create_run(run, msgspec.to_builtins(config))
    display = display or Display()
    written = following(run, config, store, home, display.line, label=label)
    if on_torch:
        cores = (at_once or max(1, usable_cores() // threads)) * threads
        with _torch_threads(cores):
            return _on_torch(
                run, config, store, home, devices, accelerator, display, precision, fused, graph_cache, written
            )
    compute = Compute(run=run, config=config, store=store, folder=home, graph_cache=graph_cache)
    coordinator = Coordinator(
        run=run,
        config=config,
        transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
        store=store,
        folder=home,
        display=display,
        compute=compute,
    )
    host = Host(
        devices,
        federation=config.federation,
        transport=lambda name, inbox: MemoryTransport(inbox, broker, name),
        state=home / "state",
        blobs=home / "state" / "blobs",
        threads=threads,
        at_once=at_once or max(1, usable_cores() // threads),
        software="simulation",
        kinds=agent_kinds or {},
    )
    stop = threading.Event()
    broken: list[Exception] = []

    def take_part() -> None:
        try:
            host.serve(stop, once=True)
        except Exception as error:  # noqa: BLE001 - raised again below, since the run would wait forever
            broken.append(error)
            coordinator.stop()

    hosting = threading.Thread(target=take_part, name="devices", daemon=True)
    began = time.monotonic()
    try:
        hosting.start()
        with written:
            coordinator.serve()
        return FleetOutcome(read_run(store, run), time.monotonic() - began, home)
    except Interrupted:
        if broken:
            raise broken[0] from None
        raise
    except KeyboardInterrupt:
        with suppress(StorageFailed):
            store.update_run(run, status="interrupted")
        raise
    finally:
        stop.set()
        hosting.join()
        compute.close()
        store.close()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Within it torch has `count` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on_torch(
    run: str,
    config: RunConfig,
    store: Store,
    home: Path,
    devices: Mapping[str, Path],
    accelerator: str,
    display: Display,
    precision: ProductPrecision,
    fused: bool | None,
    graph_cache: Path | None,
    written: AbstractContextManager[None],
) -> FleetOutcome:
    from fleet.engines.simulation import TorchSimulation

    began = time.monotonic()
    try:
        simulation = TorchSimulation(
            run=run,
            config=config,
            store=store,
            home=home,
            folders=devices,
            accelerator=accelerator,
            display=display,
            precision=precision,
            fused=fused,
            graph_cache=graph_cache,
        )
        with written:
            simulation.run_rounds()
        return FleetOutcome(read_run(store, run), time.monotonic() - began, home)
    finally:
        store.close()


def _is_there(store: Store, run: str, config: RunConfig) -> bool:
    records = [record for record in store.runs() if record.id == run]
    if records and _of_training(records[0].config) != _of_training(msgspec.json.decode(msgspec.json.encode(config))):
        raise ConfigError(f"run {run!r} began with another configuration; resume it with that, or choose another name")
    return bool(records)


def _of_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without `trackers`, which may change."""
    return {key: value for key, value in config.items() if key != "trackers"}
