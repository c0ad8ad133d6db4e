"""A whole federation in one process, over the memory transport: the same coordinator, the same agents.

For experiments and tests: nothing but the network is left out, and the same seed gives the same tensors.
"""

import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from coordinator.config import make_config
from coordinator.display import Display
from coordinator.rounds import Coordinator
from coordinator.store import Store
from coordinator.summary import summarise
from edge_client.agent import Agent
from edge_client.runtime import Runtime
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fleet.run import FleetOutcome
from profiles.probes.host import device_profile


def simulate(
    folders: list[Path],
    values: dict[str, Any],
    *,
    out: Path,
    run: str,
    threads: int = 1,
    display: Display | None = None,
    graph_cache: Path | None = None,
) -> FleetOutcome:
    """Run one configuration with one agent per device folder, each in a thread of this process.

    Files lie as after `fleet run`. Raises FedvitError when the run fails.
    """
    config = make_config({**values, "devices": len(folders)}, "simulation").run
    home = out / run
    broker = MemoryBroker()
    store = Store.in_folder(out)
    store.create_run(run, msgspec.to_builtins(config))
    coordinator = Coordinator(
        run=run,
        config=config,
        transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
        store=store,
        folder=home,
        display=display or Display(),
        accelerator="cpu",
        graph_cache=graph_cache,
    )
    stop = threading.Event()
    agents = [_agent(folder, home / "state" / folder.name, broker, config.federation, threads) for folder in folders]
    workers = [
        threading.Thread(target=agent.serve, args=(stop,), kwargs={"once": True}, name=agent.device, daemon=True)
        for agent in agents
    ]
    began = time.monotonic()
    try:
        for worker in workers:
            worker.start()
        coordinator.serve()
        return FleetOutcome(summarise(store, run), time.monotonic() - began, home)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        store.close()


def _agent(folder: Path, state: Path, broker: MemoryBroker, federation: str, threads: int) -> Agent:
    return Agent(
        device=folder.name,
        federation=federation,
        transport=MemoryTransport(SimpleQueue(), broker, folder.name),
        data=DeviceData.open(folder),
        vault=Vault(state / "vault"),
        blobs=BlobStore(state / "blobs"),
        runtime=Runtime(threads),
        profile=device_profile(threads),
        software="simulation",
    )
