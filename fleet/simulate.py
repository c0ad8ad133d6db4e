"""A whole federation in one process, over the memory transport: the same coordinator, the same agents.

For experiments and tests: nothing but the network is left out, and the same seed gives the same tensors.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from coordinator.cli import choose_accelerator
from coordinator.config import RunConfig, make_config
from coordinator.display import Display
from coordinator.store import Store
from coordinator.summary import summarise
from edge_client.agent import Agent
from edge_client.runtime import Evaluated, Runtime, Trained
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError
from fedvit.resources import DeviceProfile
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fleet.run import FleetOutcome
from profiles.probes.host import device_profile, usable_cores

DEFAULTS: dict[str, Any] = {"accelerator": "cpu", "deadline_s": 7 * 86400.0}
"""Where a simulation differs from a run on devices, unless it is told otherwise: a slow machine loses nobody."""


class TakingTurns(Runtime):
    """One runtime for all devices of a process: each graph is loaded once, `at_once` devices compute at a time.

    More of them than cores would only take memory, and each other's time.
    """

    def __init__(self, threads: int, at_once: int) -> None:
        super().__init__(threads)
        self._turns = threading.BoundedSemaphore(at_once)

    def keep_only(self, digests: set[str]) -> None:
        """Nothing is closed: another device may still be at work with an earlier program."""

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        with self._turns:
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Evaluated:
        with self._turns:
            return super().evaluate(*args, **kwargs)


def simulate(
    folders: list[Path],
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
) -> FleetOutcome:
    """Run one configuration with one agent per device folder, each in a thread of this process.

    `values` is a configuration as a file gives it, over DEFAULTS. At most `at_once` devices compute at the
    same time, with `threads` each; None: one per core. With `resume` a run of that name that is there already
    goes on where it was; else it must not be there. Files lie as after `fleet run`. `agent_kinds` makes some of the
    devices, by folder name, other agents than the usual.

    Raises FedvitError when the run fails, ConfigError when the run to resume had another configuration.
    """
    from coordinator.inbox import Interrupted
    from coordinator.rounds import Coordinator  # with torch: seconds that other commands need not wait

    config = make_config({**DEFAULTS, **values, "devices": len(folders)}, "simulation").run
    accelerator = choose_accelerator(config.accelerator)
    home = out / run
    broker = MemoryBroker()
    store = Store.in_folder(out)
    if not (resume and _is_there(store, run, config)):
        store.create_run(run, msgspec.to_builtins(config))
    coordinator = Coordinator(
        run=run,
        config=config,
        transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
        store=store,
        folder=home,
        display=display or Display(),
        accelerator=accelerator,
        graph_cache=graph_cache,
    )
    stop = threading.Event()
    broken: list[Exception] = []

    def take_part(agent: Agent) -> None:
        try:
            agent.serve(stop, once=True)
        except Exception as error:  # noqa: BLE001 - raised again below: without this device the run would wait forever
            broken.append(error)
            coordinator.stop()

    runtime = TakingTurns(threads, at_once or max(1, usable_cores() // threads))
    profile = device_profile(threads)
    agents = [
        _agent(
            (agent_kinds or {}).get(folder.name, Agent),
            folder,
            home / "state" / folder.name,
            broker,
            config.federation,
            runtime,
            profile,
        )
        for folder in folders
    ]
    workers = [threading.Thread(target=take_part, args=(agent,), name=agent.device, daemon=True) for agent in agents]
    began = time.monotonic()
    try:
        for worker in workers:
            worker.start()
        coordinator.serve()
        return FleetOutcome(summarise(store, run), time.monotonic() - began, home)
    except Interrupted:
        if broken:
            raise broken[0] from None
        raise
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        store.close()


def _is_there(store: Store, run: str, config: RunConfig) -> bool:
    records = [record for record in store.runs() if record.id == run]
    if records and records[0].config != msgspec.json.decode(msgspec.json.encode(config)):
        raise ConfigError(f"run {run!r} began with another configuration; it cannot go on with this one")
    return bool(records)


def _agent(
    kind: Callable[..., Agent],
    folder: Path,
    state: Path,
    broker: MemoryBroker,
    federation: str,
    runtime: Runtime,
    profile: DeviceProfile,
) -> Agent:
    return kind(
        device=folder.name,
        federation=federation,
        transport=MemoryTransport(SimpleQueue(), broker, folder.name),
        data=DeviceData.open(folder),
        vault=Vault(state / "vault"),
        blobs=BlobStore(state / "blobs"),
        runtime=runtime,
        profile=profile,
        software="simulation",
    )
