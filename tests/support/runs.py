"""Whole runs in memory: the coordinator is real, the devices do what the test wants of them."""

import secrets
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from coordinator.compute.engine import Engine
from coordinator.config import RunConfig
from coordinator.record.record import Record, open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.leading import Owner
from coordinator.rounds.parts import RunSetup
from fedvit.blobs import BlobStore
from fedvit.comparison import as_metrics
from fedvit.methods.base import GroupRule, ServerRule
from fedvit.methods.calculus import Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.generators.base import Generator
from fedvit.methods.optimizers import Sgd
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.together import Together
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Program, Role, decode_program
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, pack, unpack
from fedvit.transport.base import Connected, Received
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    CoordinatorState,
    Failed,
    FromCoordinator,
    Models,
    Result,
    ResultAck,
    Task,
    Welcome,
    decode,
)
from tests.support.devices import SpeakingDevice, drained
from tests.support.devices import hello as make_hello
from tests.support.displays import Lines
from tests.support.models import FIRST, StatesOnly
from tests.support.waiting import WAIT_S, wait_until

Configure = Callable[..., RunConfig]
"""The fixture `configure`: a run's configuration, on the tiny model unless the test says otherwise."""
CLASSES = ("0", "1", "2")
SMALLEST = {"image_size": 8, "patch_size": 8, "width": 4, "depth": 1, "heads": 1}
"""Every run traces its graphs, which is faster for a smaller model."""


@dataclass(frozen=True)
class Biases(Generator):
    """A bias for each device: phi times its embedding z."""

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {"phi": torch.tensor(2.0)}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {"z": torch.randn(len(CLASSES), generator=draw)}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        return {"head.bias": shared["phi"] * personal["z"]}


@dataclass(frozen=True, kw_only=True)
class Generated(FedAvg):
    """FedAvg of everything but the bias of the head, which the server makes for each device."""

    source: ClassVar[str] = "made for these tests"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("bias", Role.GENERATED, ("head.bias",)), GroupRule("model", Role.SHARED, ("*",)))

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return Together((WeightedMean(), GeneratorUpdate(generator=Biases(), optimizer=Sgd(), lr=0.5)))


Kind = TypeVar("Kind", bound=FromCoordinator)
Answer = Callable[["Fake", Task], None]


def honest(device: "Fake", task: Task) -> None:
    """Answer at once: `value` in every tensor, all test images right."""
    device.bring(device.answer(task))


def silent(device: "Fake", task: Task) -> None:
    """Take the task and never speak of it."""


class Fake(SpeakingDevice):
    """A device of a run: `on_task` decides what it says to a task."""

    def __init__(self, stage: "Stage", name: str, *, samples: int = 10, value: float = 1.0, **announced: Any) -> None:
        announced = {"classes": CLASSES, "train_samples": samples, **announced}
        super().__init__(stage.broker, name, make_hello(secrets.token_hex(8), **announced))
        self.stage = stage
        self.value = value
        self.on_task: Answer = honest
        self.models = StatesOnly()
        self.compared, self.has_champion = FIRST, False  # its answer to a task that compares
        self.serves = True  # answers what the coordinator wants of its uploads
        self.heard: list[FromCoordinator] = []
        self.pending: dict[tuple[str, int, str], Result] = {}  # not acknowledged
        self.blobs = BlobStore(stage.folder / f"{name}-{self.instance}")
        self.exchange = BlobExchange(
            self.transport,
            self.blobs,
            send=lambda peer, message: self.say(message),
            topics=ChunkTopics(lambda digest: self.topics.upload(name, digest)),
            may_read=lambda peer, digest: True,
        )
        self.connect()

    def start_again(self) -> None:
        """Its process ends as by kill -9, and another one begins."""
        self.transport.vanish()
        self.hello = msgspec.structs.replace(self.hello, instance=secrets.token_hex(8))
        self.connect()

    # --- speaking -------------------------------------------------------------------------------------

    def answer(self, task: Task, tensors: Tensors | None = None) -> Result:
        """An honest answer, with other tensors if given."""
        if task.kind == "evaluate":
            right = {"correct": float(self.hello.test_samples)}
            return Result(task.run, task.round, "evaluate", self.hello.test_samples, right, ResourceUse())
        if task.kind == "compare":
            self.models.states[f"{task.run}-{task.round}"] = "challenger"
            compared, samples = as_metrics(self.compared, with_champion=self.has_champion), self.compared.images
            return Result(task.run, task.round, "compare", samples, compared, ResourceUse())
        content = pack(self.upload(task) if tensors is None else tensors)
        manifest = self.blobs.put(content)
        return Result(task.run, task.round, "train", self.hello.train_samples, {"loss": 0.5}, ResourceUse(), manifest)

    def upload(self, task: Task) -> Tensors:
        """What the program asks for: `value` everywhere, or features drawn from (device, round)."""
        expected = self.stage.program(task).upload_form()
        if "labels" not in expected:
            return {name: np.full(shape, self.value, dtype) for name, (shape, dtype) in expected.items()}
        [name] = expected.keys() - {"labels"}
        shape, dtype = expected[name]
        draw = np.random.default_rng(zlib.crc32(f"{self.name} {task.round}".encode()))
        features = draw.normal(size=(6, *shape[1:])).astype(dtype)
        return {name: features, "labels": draw.integers(0, len(CLASSES), 6)}

    def bring(self, result: Result) -> None:
        self.pending[result.run, result.round, result.kind] = result
        self.say(result)

    def fail(self, task: Task, reason: str) -> None:
        self.say(Failed(task.run, task.round, task.kind, reason))

    # --- hearing --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Deal with what has come."""
        greet = False
        for event in drained(self.transport.inbox):
            greet |= isinstance(event, Connected)
            if isinstance(event, Received) and "/all/b/" in event.topic:
                self.exchange.heard(event.topic, event.payload)
            elif isinstance(event, Received):
                self._on_received(event.payload)
                last = self.heard[-1]
                greet |= isinstance(last, CoordinatorState) and last.alive
        if greet:
            self.say(self.hello)
        self.exchange.tick()

    def _on_received(self, payload: bytes) -> None:
        message: Any = decode(payload)
        self.heard.append(message)
        match message:
            case Welcome() if message.instance == self.instance:
                for result in self.pending.values():
                    self.say(result)
            case Task() if message.instance == self.instance:
                if waiting := self.pending.get((message.run, message.round, message.kind)):
                    self.say(waiting)
                elif message.kind != "train":
                    honest(self, message)
                else:
                    self.on_task(self, message)
            case Models() if message.instance == self.instance:
                self.say(self.models.obey(message))
            case ResultAck():
                self.pending.pop((message.run, message.round, message.kind), None)
            case BlobNack() if self.serves:
                self.exchange.on_nack("coordinator", message)
            case BlobAck():
                self.exchange.on_ack("coordinator", message)

    def got(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.heard if isinstance(message, kind)]

    def tasks(self, kind: str = "train") -> list[int]:
        """Rounds that it was asked to train (or evaluate) for, in order."""
        return [task.round for task in self.got(Task) if task.kind == kind]

    def answers(self, kind: str = "train") -> list[tuple[int, bool]]:
        """(round, accepted) of every acknowledgement."""
        return [(ack.round, ack.accepted) for ack in self.got(ResultAck) if ack.kind == kind]

    def reasons(self) -> list[str]:
        return [ack.reason for ack in self.got(ResultAck) if not ack.accepted]


class Stage:
    """A broker, a folder of runs, one coordinator at a time in a thread, and any number of devices."""

    def __init__(self, folder: Path, configure: Configure, graph_cache: Path) -> None:
        self.folder = folder
        self.out = folder / "runs"
        self.broker = MemoryBroker()
        self.fakes: list[Fake] = []
        self.owner = Owner()
        self.coordinator: Coordinator | None = None
        self.store: Record
        self.outcome: str | BaseException | None = None
        self.lines: list[str] = []  # that coordinators printed
        self._configure = configure
        self._graph_cache = graph_cache
        self._thread: threading.Thread | None = None

    def fake(self, name: str, on_task: Answer = honest, *, kind: type[Fake] = Fake, **options: Any) -> Fake:
        device = kind(self, name, **options)
        device.on_task = on_task
        self.fakes.append(device)
        return device

    def start(self, *, method: str = "fedavg", resume: bool = False, run: str = "r", **values: Any) -> None:
        """Begin the run `r`, or resume it in a new coordinator; a run of another name must be in the store."""
        settings: dict[str, Any] = {"classes": CLASSES, "deadline_s": 600.0, "rejoin_grace_s": 600.0, "rounds": 1}
        if method != "eftvit":
            settings["model_options"] = SMALLEST
        config = self._configure(method, **{**settings, **values})
        self.store = open_record(self.out)
        if not resume and run == "r":
            self.store.runs.create(run, msgspec.to_builtins(config))
        self.outcome = None
        self.coordinator = Coordinator(
            RunSetup(
                run=run,
                config=config,
                transport=MemoryTransport(SimpleQueue(), self.broker, f"coordinator-{secrets.token_hex(4)}"),
                store=self.store,
                folder=self.out / run,
                display=Lines(self.lines),
                compute=Engine(
                    run=run, config=config, store=self.store, folder=self.out / run, graph_cache=self._graph_cache
                ),
            ),
            self.owner,
        )
        self._thread = threading.Thread(target=self._serve, args=(self.coordinator,), daemon=True)
        self._thread.start()

    def _serve(self, coordinator: Coordinator) -> None:
        try:
            coordinator.serve()
            self.outcome = "finished"
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error

    def program(self, task: Task) -> Program:
        return decode_program(BlobStore(self.out / "r" / "blobs").get(task.program))

    def drive(self, until: Callable[[], bool]) -> None:
        """Let all devices live until something holds."""
        wait_until(
            until,
            lambda: f"it did not happen; the coordinator: {self.outcome!r}",
            pause_s=0.002,
            meanwhile=lambda: [device.step() for device in self.fakes],
        )

    def finish(self) -> str | BaseException:
        """Let the run end by itself."""
        self.drive(lambda: self.outcome is not None)
        assert self._thread is not None
        self._thread.join(WAIT_S)
        assert self.outcome is not None
        self.drive(lambda: True)
        for device in self.fakes:
            device.step()
        return self.outcome

    def stop(self) -> None:
        """Ctrl-C."""
        if self.coordinator is not None and self.outcome is None:
            self.coordinator.stop()
            self.finish()
            assert isinstance(self.outcome, Interrupted), self.outcome
        if self.coordinator is not None:
            self.store.close()
            self.coordinator = None

    def refusals(self, device: str) -> list[str]:
        """What was refused of a device in the record, as 'kind: reason'."""
        return [
            f"{entry.kind}: {entry.reason}" for entry in self.store.devices.read_refusals("r") if entry.device == device
        ]

    def accepted(self, number: int, kind: Any = "train") -> list[str]:
        return [result.device for result in self.store.tasks.read_results("r", number, kind)]

    def sent(self, digest: str) -> Tensors:
        """What a task brings under a digest; in the store as long as the round is open."""
        return unpack(BlobStore(self.out / "r" / "blobs").get(digest))

    def model(self) -> Tensors:
        """The tensors that the finished run left."""
        return unpack((self.out / "r" / "model.safetensors").read_bytes())


def by_round(device: Fake, task: Task) -> None:
    """Honest, with an update that differs by device and round."""
    device.value = zlib.crc32(f"{device.name} {task.round}".encode()) / 2**32
    honest(device, task)


def assert_moved_by(stage: Stage, first: Tensors, step: float) -> None:
    """Every number of the model went this far since before the first round."""
    model = stage.model()
    assert model.keys() == first.keys()
    for name, value in first.items():
        np.testing.assert_allclose(model[name], value + step, atol=1e-5, err_msg=name)


def fails_once(device: Fake, task: Task) -> None:
    """Fail the first task, and be honest after it."""
    device.on_task = honest
    device.fail(task, "its disk is full")
