"""A tiny run, for tests that send damage to its decoders and programs."""

from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from bench.edge import make_noise_folder
from coordinator.compute.planning.checks import checked_config
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import RunConfig
from edge_client.agent import Agent
from edge_client.storage.device_storage import FixedImages
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.tensors import pack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import Task
from tests.support.agents import make_agent
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
        transport, images = MemoryTransport(SimpleQueue(), broker, name), FixedImages(DeviceData.open(self.data))
        return make_agent(name, transport, images, self.folder / name, federation=self.config.federation)


def make_scene(home: Path, graph_cache: Path) -> Scene:
    config = checked_config(SETTINGS, "fuzz").run
    data = make_noise_folder(home / "data", images=16, size=8)
    blobs = BlobStore(home / "server")
    plan = make_plan(config, DeviceData.open(data).classes, blobs, cache=graph_cache)
    return Scene(home, config, plan, blobs, data, graph_cache)
