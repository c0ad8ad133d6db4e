"""The parts of one run as a coordinator connects them, before it serves: tests call them one by one."""

import heapq
import math
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import numpy as np

from coordinator.compute.engine import Engine
from coordinator.compute.messages import PlannedTask
from coordinator.config import make_config
from coordinator.record.record import open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.open_round import OpenRound, RoundPlan
from coordinator.rounds.parts import RunSetup
from coordinator.rounds.tasks import DeviceTask, Work
from fedvit.program import Batch, Evaluate, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train, encode_program
from fedvit.resources import ResourceUse
from fedvit.tensors import pack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import FromCoordinator, Manifest, Result, TaskKind
from tests.support.devices import hello
from tests.support.displays import Lines

Kind = TypeVar("Kind", bound=FromCoordinator)
HALF = (0.5, 0.5, 0.5)


class Parts(Coordinator):
    """The run `r` in round 1; what it sends is kept in `sent`, what the operator reads in `lines`."""

    def __init__(self, folder: Path, **values: Any) -> None:
        self.lines: list[str] = []
        self.sent: list[tuple[str, FromCoordinator]] = []
        config = make_config({"method": "fedavg", "classes": ["ant", "bee"], **values}, "test").run
        store = open_record(folder)
        store.runs.create("r", msgspec.to_builtins(config))
        super().__init__(
            RunSetup(
                run="r",
                config=config,
                transport=MemoryTransport(SimpleQueue(), MemoryBroker(), "coordinator"),
                store=store,
                folder=folder / "r",
                display=Lines(self.lines),
                compute=Engine(run="r", config=config, store=store, folder=folder / "r"),
            )
        )
        self.state.send = lambda device, message: self.sent.append((device, message))
        self.work = self._make_work()

    def _make_work(self) -> Work:
        blobs = self.state.blobs
        graph, weights = blobs.put(b"a graph").digest, blobs.put(pack({"w": np.zeros(2, np.float32)})).digest
        program = Program(
            method="fedavg",
            model="made",
            classes=("ant", "bee"),
            groups={"model": TensorGroup(Role.SHARED)},
            tensors={"w": TensorSpec((2,), "float32", "model")},
            graphs={"train": GraphSpec(graph, 1), "predict": GraphSpec(graph, 1)},
            train=(Train(graph="train", groups=("model",), lr=0.1),),
            evaluate=Evaluate(graph="predict"),
            batch=Batch(image_size=8, patch_size=4, batch_size=2, mean=HALF, std=HALF),
        )
        planned = PlannedTask(program=blobs.put(encode_program(program)).digest, groups={"model": weights})
        return Work(planned, program)

    def arrive(self, *devices: str) -> None:
        """Devices send their first hello."""
        for device in devices:
            self.membership.on_hello(device, hello(f"{device}1"))
        self.membership.take_arrivals()

    def open(self, *devices: str, needed: int = 9) -> OpenRound:
        """Open round 1 for these devices, which have their tasks then."""
        work = dict.fromkeys(devices, self.work)
        self.state.store.rounds.open("r", 1, list(devices), needed)
        self.ports.journal.add_tasks(1, work)
        opened = OpenRound(RoundPlan("r", 1, "train", list(devices), needed, work))
        self.ports.trainer.open(opened)
        for device in devices:
            self.scheduler.assign_open(device)
        return opened

    def task(self, device: str) -> DeviceTask:
        found = self.state.tasks.of(device)
        assert found is not None
        return found

    def check_now(self, device: str) -> None:
        """The deadline of its task is checked next, whenever that was to be."""
        task, scheduler = self.task(device), self.scheduler
        task.check_at = -math.inf
        heapq.heappush(scheduler._checks, (task.check_at, next(scheduler._number), task))

    def result(self, *numbers: float, kind: TaskKind = "train", **changed: Any) -> Result:
        """An honest result of round 1, whose upload is inside the message."""
        content = pack({"w": np.array(numbers or (1.0, 2.0), np.float32)})
        upload = Manifest(self.state.blobs.put(content).digest, len(content), 126_976)
        self.state.blobs.path(upload.digest).unlink()
        made = Result("r", 1, kind, 20, {"loss": 0.5}, ResourceUse(), upload, inline=content)
        return msgspec.structs.replace(made, **changed)

    def got(self, device: str, kind: type[Kind]) -> list[Kind]:
        """Messages of one kind that were sent to a device."""
        return [message for name, message in self.sent if name == device and isinstance(message, kind)]

    def refusals(self, device: str) -> list[str]:
        return [
            f"{entry.kind}: {entry.reason}"
            for entry in self.state.store.devices.read_refusals("r")
            if entry.device == device
        ]

    def close(self) -> None:
        self.state.store.close()
