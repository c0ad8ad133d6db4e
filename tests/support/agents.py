"""A real agent in memory, and a test that is its coordinator and says every word itself."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from edge_client.agent import Agent
from edge_client.health.guard import Guard
from edge_client.health.recent_log import PrivatePaths
from edge_client.health.status import StatusFile
from edge_client.link.answers import FailureText
from edge_client.link.device_link import DeviceIdentity, DeviceLink
from edge_client.storage.device_storage import DeviceStorage, FixedImages
from edge_client.storage.vault import Vault
from edge_client.work.runtime import Runtime, Seeds, Watch
from edge_client.work.task_executor import TaskExecutor
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.data.growing import GrowingFolder
from fedvit.policy import Policy
from fedvit.program import Program, Role, TensorGroup, encode_program
from fedvit.resources import DeviceProfile
from fedvit.tensors import Tensors, delta, pack, unpack
from fedvit.transport.base import Received
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.updates import decode as decoded
from fedvit.updates import make_codec
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    CoordinatorState,
    Declined,
    DeltaStep,
    Failed,
    FromCoordinator,
    FromDevice,
    Hello,
    Manifest,
    Result,
    ResultAck,
    Task,
    TaskKind,
    Welcome,
    decode,
    encode,
)
from fedvit.wire.topics import Topics
from tests.support.settings import Setting
from tests.support.waiting import WAIT_S, wait_until

PROFILE = DeviceProfile(host="pi.local", machine="aarch64", cores=4, threads=1, ram_bytes=2**30)
FAR_OFF = "blake3:" + "0" * 64
SILENT = Watch(lambda *step: None, lambda: False)

Kind = TypeVar("Kind", bound=FromDevice)


def make_agent(
    name: str,
    transport: MemoryTransport,
    images: GrowingFolder | FixedImages,
    home: Path,
    *,
    federation: str = "home",
    guard: Guard | None = None,
    policy: Policy | None = None,
    blobs: BlobStore | None = None,
    recent_log: Callable[[], str] = lambda: "",
) -> Agent:
    """Connect the parts of a real agent, whose state is in `home`."""
    policy = policy or Policy()
    identity = DeviceIdentity(device=name, federation=federation, software="9.9", profile=PROFILE)
    storage = DeviceStorage(Vault(home / "vault"), blobs or BlobStore(home / "blobs"), images)
    link = DeviceLink(identity, transport, storage, failure_text=FailureText(recent_log, PrivatePaths([home]).hide))
    executor = TaskExecutor(link, storage, Runtime(1), guard or Guard(), policy)
    status = StatusFile(home / "status.json", identity, broker="memory")
    return Agent(link, storage, executor, policy, status=status)


class Device:
    """A real agent in a thread."""

    def __init__(
        self,
        broker: MemoryBroker,
        digits: Path,
        state: Path,
        *,
        once: bool = False,
        growing: bool = False,
        **changed: Any,
    ) -> None:
        self.transport = MemoryTransport(SimpleQueue(), broker, "pi")
        split_file = state / "split.json"
        images = GrowingFolder(digits, split_file=split_file) if growing else FixedImages(DeviceData.open(digits))
        self.agent = make_agent("pi", self.transport, images, state, **changed)
        self.vault, self.blobs = self.agent.storage.vault, self.agent.storage.blobs
        self.outcome: str | BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(once,), daemon=True)
        self._thread.start()

    def _serve(self, once: bool) -> None:
        try:
            self.outcome = self.agent.serve(self._stop, once=once)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error

    def ended(self) -> str | BaseException:
        """How `serve` ended by itself."""
        self._thread.join(WAIT_S)
        assert self.outcome is not None, "the agent did not end"
        return self.outcome

    def stop(self) -> str | BaseException:
        self._stop.set()
        return self.ended()


class Server:
    """The coordinator's end of the wire: blobs are served and fetched, everything else the test does."""

    def __init__(self, broker: MemoryBroker, folder: Path) -> None:
        self.topics = Topics("home")
        self.blobs = BlobStore(folder)
        self.transport = MemoryTransport(SimpleQueue(), broker, "coordinator")
        self.heard: list[FromDevice] = []
        self.chunks: list[str] = []  # topics of uploads that were sent
        self.epoch = 1
        self.instance = ""
        self._read = 0  # how much of `heard` the test has looked at
        self._marks = 0
        self._marks_back: set[int] = set()
        self.exchange = BlobExchange(
            self.transport,
            self.blobs,
            send=lambda peer, message: self.tell(message),
            topics=ChunkTopics(self.topics.broadcast),
            may_read=lambda peer, digest: True,
        )
        for topic in (*self.topics.from_all_devices, "fl1/home/d/+/up/b/+"):
            self.transport.subscribe(topic, 1)
        self.transport.open()

    # --- saying ---------------------------------------------------------------------------------------

    def tell(self, message: FromCoordinator) -> None:
        self.transport.publish(self.topics.to_device("pi"), encode(message))

    def is_here(self, epoch: int, *, alive: bool = True, spread_s: float = 0.0) -> None:
        self.epoch = epoch
        state = encode(CoordinatorState(epoch, alive, spread_s=spread_s))
        self.transport.publish(self.topics.coordinator_state, state)

    def welcome(self) -> None:
        """Take in the device: answer its newest hello."""
        self.instance = self.expect(Hello).instance
        self.tell(Welcome(self.instance, self.epoch, "tests"))

    def keep(self, content: bytes) -> Manifest:
        return self.blobs.put(content)

    def acknowledge(self, result: Result, *, accepted: bool = True) -> None:
        self.tell(ResultAck(result.run, result.round, result.kind, accepted, "" if accepted else "too late"))

    # --- hearing --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        try:
            event = self.transport.inbox.get(timeout=0.02)
        except Empty:
            self.exchange.tick()
            return
        if not isinstance(event, Received):
            return
        if "/up/b/" in event.topic:
            self.chunks.append(event.topic)
            self.exchange.heard(event.topic, event.payload)
            return
        message: Any = decode(event.payload)
        if isinstance(message, Failed) and message.run == "mark":
            self._marks_back.add(message.round)
            return
        self.heard.append(message)
        match message:
            case BlobNack():
                self.exchange.on_nack("pi", message)
            case BlobAck():
                self.exchange.on_ack("pi", message)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: f"it did not happen; heard {self.heard[-5:]}", pause_s=0.0, meanwhile=self._pump)

    def expect(self, kind: type[Kind]) -> Kind:
        """The next message of a kind; others are passed over."""
        found: list[Kind] = []

        def look() -> bool:
            while self._read < len(self.heard) and not found:
                message = self.heard[self._read]
                self._read += 1
                if isinstance(message, kind):
                    found.append(message)
            return bool(found)

        self.wait(look)
        return found[0]

    def count(self, kind: type[FromDevice]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def since(self, number: int) -> list[str]:
        """Kinds of the messages heard after the first `number`."""
        return [type(message).__name__ for message in self.heard[number:]]

    def mark(self) -> None:
        """Request something impossible and wait for the refusal: all earlier messages are handled then."""
        self._marks += 1
        number = self._marks
        self.tell(Task(self.instance, self.epoch, "mark", number, "evaluate", 0, FAR_OFF, {}, (), 600.0))
        self.wait(lambda: number in self._marks_back)

    def roll_call(self) -> None:
        """A new epoch, and the hello that follows."""
        self.is_here(self.epoch + 1)
        self.welcome()
        self.mark()

    def fetch(self, manifest: Manifest | None) -> Tensors:
        return unpack(self.fetch_bytes(manifest))

    def fetch_bytes(self, manifest: Manifest | None) -> bytes:
        assert manifest is not None
        ended: list[Exception | None] = []
        topic = self.topics.upload("pi", manifest.digest)
        self.exchange.fetch(manifest, "pi", topic, lambda _, error: ended.append(error))
        self.wait(lambda: bool(ended))
        assert ended == [None]
        return self.blobs.get(manifest.digest)


class World:
    """A server, a device, and the tasks that one may give to the other."""

    def __init__(self, digits: Path, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.server = Server(self.broker, folder / "server")
        self.devices: list[Device] = []
        self._digits = digits
        self.state = folder / "state"

    def device(self, *, joined: bool = True, once: bool = False, digits: Path | None = None, **changed: Any) -> Device:
        device = Device(self.broker, digits or self._digits, self.state, once=once, **changed)
        self.devices.append(device)
        if joined:
            self.server.is_here(self.server.epoch)
            self.server.welcome()
            self.server.mark()
        return device

    def stop(self) -> None:
        for device in self.devices:
            device.stop()

    def task(
        self,
        setting: Setting,
        *,
        round: int = 1,
        kind: TaskKind = "train",
        program: Program | None = None,
        group_values: dict[str, Tensors] | None = None,
        **changed: Any,
    ) -> Task:
        """A task as the coordinator would send it, unless the test says otherwise."""
        program, server = program or setting.program, self.server
        values = setting.start()
        brought = {
            group: {name: values[name] for name in program.names(group)}
            for group, spec in program.groups.items()
            if spec.role.from_server_each_round
        } | (group_values or {})
        groups = {group: server.keep(pack(tensors)) for group, tensors in brought.items()}
        once = [graph.digest for graph in program.graphs.values()]
        once += [spec.initial for spec in program.groups.values() if spec.initial]
        for digest in once:
            if setting.blobs.has(digest):
                server.keep(setting.blobs.get(digest))
        shipped = server.keep(encode_program(program))
        task = Task(
            instance=server.instance,
            epoch=server.epoch,
            run="run",
            round=round,
            kind=kind,
            seed=5,
            program=shipped.digest,
            groups={group: manifest.digest for group, manifest in groups.items()},
            blobs=(shipped, *groups.values(), *(server.blobs.manifest(digest) for digest in once)),
            deadline_s=600.0,
        )
        return msgspec.structs.replace(task, **changed)

    def give(self, setting: Setting, **changed: Any) -> None:
        self.server.tell(self.task(setting, **changed))

    def result(self, setting: Setting, **changed: Any) -> Result:
        self.give(setting, **changed)
        return self.server.expect(Result)

    def failure(self, setting: Setting, **changed: Any) -> str:
        self.give(setting, **changed)
        return self.server.expect(Failed).reason

    def refusal(self, setting: Setting, **changed: Any) -> str:
        """Reason why the device does not allow a task."""
        self.give(setting, **changed)
        return self.server.expect(Declined).reason


def train_here(setting: Setting, program: Program, start: Tensors, digits: Path, round: int = 1) -> Tensors:
    """What the same round gives without an agent: new values of what moves, and what is collected."""
    trained = setting.runtime().train(
        program, start, DeviceData.open(digits).relabel(program.classes).train, Seeds(5, round, "pi"), 1.0, SILENT
    )
    return trained.tensors | trained.collected


def with_local_head(setting: Setting) -> Program:
    """FedAvg's graphs with the head as a local group (FedPer)."""
    program = setting.program
    [phase] = program.train
    head = {name: setting.start()[name] for name in ("head.weight", "head.bias")}
    initial = setting.blobs.put(pack(head)).digest
    return msgspec.structs.replace(
        program,
        groups={**program.groups, "head": TensorGroup(Role.LOCAL, initial)},
        tensors={
            name: msgspec.structs.replace(spec, group="head") if name in head else spec
            for name, spec in program.tensors.items()
        },
        train=(msgspec.structs.replace(phase, groups=("model", "head")),),
    )


def with_kept(setting: Setting, *, of_this_round: bool = False) -> Program:
    """FedAvg's graphs, tested with the model as the device itself trained it."""
    evaluate = msgspec.structs.replace(setting.program.evaluate, kept=("model",), kept_of_this_round=of_this_round)
    return msgspec.structs.replace(setting.program, evaluate=evaluate)


def with_a_patch(world: World, setting: Setting, *, honest: bool) -> tuple[Tensors, Tensors, DeltaStep]:
    """What the device has, what it shall have, and how it may get there."""
    old = setting.start()
    draw = np.random.default_rng(0)
    updated = {name: value + draw.normal(0, 0.01, value.shape).astype(np.float32) for name, value in old.items()}
    patch = make_codec("int8").encode(delta(updated, old))
    got = decoded(patch, {})
    new = {name: value + got[name] for name, value in old.items()}
    if not honest:
        patch["head.bias"] = patch["head.bias"] + np.float32(1)
    keep = world.server.keep
    return old, new, DeltaStep(keep(pack(new)).digest, keep(pack(old)).digest, keep(pack(patch)))


class Log(Watch):
    """Remembers the steps, and says stop after some."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[tuple[int, int, float | None]] = []
        super().__init__(lambda *step: self.steps.append(step), lambda: len(self.steps) == stop_after)


def with_generated_model(setting: Setting) -> Program:
    """FedAvg's graphs with a model that the server makes for each device."""
    return msgspec.structs.replace(setting.program, groups={"model": TensorGroup(Role.GENERATED)})


def always(setting: Setting, answer: int) -> Tensors:
    """The model with a head that gives one answer to everything."""
    head = {"head.weight": np.zeros((3, 32), np.float32), "head.bias": np.eye(3, dtype=np.float32)[answer]}
    return setting.start() | head


def with_epochs(program: Program, epochs: int) -> Program:
    [phase] = program.train
    return msgspec.structs.replace(program, train=(msgspec.structs.replace(phase, epochs=epochs),))


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


class Run(NamedTuple):
    """Three rounds of a device."""

    uploads: list[bytes]
    local: bytes
    told: list[str]


def run_rounds(world: World, setting: Setting, program: Program, spoil: Callable[[Device], object]) -> Run:
    """Three rounds. After the second the device is stopped, `spoil` is done to its disk, and it starts again."""
    device = world.device()
    uploads, told = list[bytes](), list[str]()
    for number in range(1, 4):
        result = world.result(setting, program=program, round=number)
        told += result.damaged
        uploads.append(pack(world.server.fetch(result.upload)))
        world.server.acknowledge(result)
        world.server.wait(lambda: device.vault.pending() == [])  # noqa: B023 - called now
        if number == 2:
            device.stop()
            spoil(device)
            device = start_again(world)
    local = device.vault.local("run")
    assert local is not None
    return Run(uploads, pack(local), told)


def start_again(world: World) -> Device:
    """Without a word to it that would make it tidy up."""
    world.server.heard.clear()
    world.server._read = 0
    device = world.device(joined=False)
    world.server.welcome()
    return device
