"""A tiny run, for tests that send damage to its decoders and programs."""

from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from bench.edge import make_noise_folder
from coordinator.compute.planning.checks import checked_config
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import RunConfig
from edge_client.agent import Agent
from edge_client.health.guard import Guard
from edge_client.link.device_link import DeviceIdentity, DeviceLink
from edge_client.storage.device_storage import DeviceStorage, FixedImages
from edge_client.storage.vault import Vault
from edge_client.work.runtime import Runtime
from edge_client.work.task_executor import TaskExecutor
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.policy import Policy
from fedvit.tensors import pack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import Task
from profiles.probes.host import device_profile
from tests.support.corpus import RUN, SETTINGS


class Scene(NamedTuple):
    """A tiny run that all tests use."""

    folder: Path
    config: RunConfig
    plan: Plan
    blobs: BlobStore
    data: Path
    cache: Path

    def task(self, instance: str, epoch: int) -> Task:
        """Make a first task, as the coordinator would."""
        program = self.plan.first.program
        groups = {
            group: self.blobs.put(pack({name: self.plan.state.tensors[name] for name in program.names(group)})).digest
            for group in program.common_groups()
        }
        digests = [self.plan.first.digest, *program.list_fetched_once(), *groups.values()]
        manifests = tuple(self.blobs.manifest(digest) for digest in digests)
        return Task(instance, epoch, RUN, 1, "train", 0, self.plan.first.digest, groups, manifests, 60.0)

    def agent(self, broker: MemoryBroker, name: str) -> Agent:
        home, policy = self.folder / name, Policy()
        identity = DeviceIdentity(
            device=name, federation=self.config.federation, software="fuzz", profile=device_profile(1)
        )
        images = FixedImages(DeviceData.open(self.data))
        storage = DeviceStorage(Vault(home / "vault"), BlobStore(home / "blobs"), images)
        link = DeviceLink(identity, MemoryTransport(SimpleQueue(), broker, name), storage)
        return Agent(link, storage, TaskExecutor(link, storage, Runtime(1), Guard(), policy), policy)


def make_scene(home: Path, graph_cache: Path) -> Scene:
    config = checked_config(SETTINGS, "fuzz").run
    data = make_noise_folder(home / "data", images=16, size=8)
    blobs = BlobStore(home / "server")
    plan = make_plan(config, DeviceData.open(data).classes, blobs, cache=graph_cache)
    return Scene(home, config, plan, blobs, data, graph_cache)
