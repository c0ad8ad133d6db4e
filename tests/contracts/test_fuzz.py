"""Damaged messages at a real agent and at a real coordinator: neither falls, hangs or grows."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from coordinator.compute.engine import Engine
from coordinator.record.record import Record, open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.parts import RunSetup
from fedvit.errors import FedvitError
from fedvit.program import Role, encode_program
from fedvit.tensors import pack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import (
    CoordinatorState,
    DeviceState,
    Failed,
    Hello,
    Manifest,
    Refused,
    Result,
    ResultAck,
    Task,
    Welcome,
    decode,
    encode,
)
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import CHUNK_BYTES, Chunk, decode_chunk
from tests.support.corpus import RUN, USE, list_coordinator_messages, list_device_messages, make_hello
from tests.support.fuzz_scene import Scene, make_scene
from tests.support.hostile import Peer
from tests.support.mutations import damage_chunk, damage_message, damage_structure, damage_tensors, replace_delta_chains
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.slow

BATCH, BATCH_CPU_S = 100, 5.0
"""Messages that a program gets before the test waits for it, and its most processor time for them."""
GROWTH_BYTES = 48_000_000
"""Most growth of this process after the first third of the messages: caches and fragmentation."""
TRANSFER_EVERY = 40
"""Messages for each damaged Program, tensor file or upload, which take a transfer."""
HOSTILE = ("mallory", "eve", "trudy", "..", "a b")
"""Names of hostile devices. The first has joined the run before the fuzzing; the last two are invalid names."""
MESSAGES = {"agent": 750, "coordinator": 1500}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> Scene:
    return make_scene(tmp_path_factory.mktemp("fuzz"), graph_cache)


class Serving:
    """A program in a thread, and the memory of this process."""

    def __init__(self, serve: Callable[[], object], inbox: "SimpleQueue[object]") -> None:
        self.error: BaseException | None = None
        self._serve = serve
        self._inbox = inbox
        self._spent_s = 0.0  # processor time of its thread until all earlier messages were handled
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - `check_idle` raises it
            self.error = error

    def check_idle(self) -> None:
        """Wait until it has handled all messages; fail when it has ended, hangs, or takes too much processor time."""

        def is_idle() -> bool:
            assert self.thread.is_alive(), f"it ended: {self.error!r}"
            return self._inbox.empty()

        wait_until(is_idle, "it does not handle its messages", pause_s=0.001)
        assert self.thread.ident is not None
        spent_s = time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))
        assert spent_s - self._spent_s < BATCH_CPU_S
        self._spent_s = spent_s

    def check_end(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        assert self.error is None or isinstance(self.error, Interrupted), repr(self.error)


class Counts(SimpleNamespace):
    """Messages that the decoder accepts and refuses, and the memory of this process."""

    accepted = 0
    refused = 0

    def add(self, raw: bytes, read: Callable[[bytes], object] = decode) -> object:
        """Count a message; returns it if the decoder accepts it."""
        try:
            message = read(raw)
        except FedvitError:
            self.refused += 1
            return None
        self.accepted += 1
        return message

    def numbers(self, count: int) -> Iterator[int]:
        """Count to `count`, and check the growth of memory from the end of the first third, when caches are full."""
        early = 0
        for number in range(count):
            if number == count // 3:
                early = psutil.Process().memory_info().rss
            yield number
        assert psutil.Process().memory_info().rss - early < GROWTH_BYTES

    def check(self) -> None:
        """Check that the damage is of both kinds: some fails at once, some gets to the handlers."""
        assert self.accepted > (self.accepted + self.refused) // 20
        assert self.refused > (self.accepted + self.refused) // 4


def test_agent_bears_a_hostile_coordinator(scene: Scene) -> None:
    """A valid task is done afterwards."""
    random, counts, topics, broker = Random(6), Counts(), Topics(scene.config.federation), MemoryBroker()
    base = f"fl1/{scene.config.federation}/d/+"
    transport = MemoryTransport(SimpleQueue(), broker, "false")
    peer = Peer(
        transport, scene.blobs.folder, f"{base}/up/ctl", f"{base}/st",
        topic=topics.to_device("victim"), upload_topic=topics.broadcast,
    )  # fmt: skip
    agent, stop = scene.agent(broker, "victim"), threading.Event()
    device = Serving(lambda: agent.serve(stop), agent.link.transport.inbox)
    instance = peer.wait_for(Hello).instance
    task, stored, ended = scene.task(instance, 1), "blake3:" + "0" * 64, set[type]()
    peer.send(encode(Welcome(instance, 1, "")))
    for number in counts.numbers(MESSAGES["agent"]):
        topic = random.choice((peer.topic, peer.topic, topics.coordinator_state))
        valid = [encode(message) for message in list_coordinator_messages(instance, task, stored)]
        if number % TRANSFER_EVERY == 0:
            raw = encode(damage_task(random, scene, task, number))
        elif random.random() < 0.1:
            manifest = random.choice(task.blobs)
            piece = Chunk(manifest.digest, 0, manifest.chunks, manifest.size, 1, bytes(manifest.size % CHUNK_BYTES))
            raw = damage_chunk(random, piece.encode(), valid[0])
            counts.add(raw, decode_chunk)
            peer.send(raw, topics.broadcast(manifest.digest))
            continue
        elif random.random() < 0.1:
            raw = replace_delta_chains(random, encode(task))
        else:
            raw = damage_message(random, random.choice(valid), random.choice(valid))
        message = counts.add(raw)
        if isinstance(message, Refused) and message.instance == instance:
            continue  # the device would obey
        peer.send(raw, topic)
        if number % BATCH == 0 or number % TRANSFER_EVERY == 0:
            device.check_idle()
            for answer in peer.receive():
                ended.add(type(answer))
                if isinstance(answer, Hello):
                    peer.send(encode(Welcome(instance, 1, "")))
                elif isinstance(answer, Result):
                    stored = answer.upload.digest if answer.upload else stored
                    peer.send(encode(ResultAck(answer.run, answer.round, answer.kind, accepted=True)))
    device.check_idle()
    honest = msgspec.structs.replace(scene.task(instance, 1), round=2**31 - 2, run="honest")
    for message in (CoordinatorState(1, alive=True), Welcome(instance, 1, ""), honest):
        peer.send(encode(message))
    result = peer.wait_for(Result, lambda result: result.run == "honest")
    assert result.upload is not None
    assert result.samples > 0
    stop.set()
    device.check_end()
    assert Failed in ended
    counts.check()


def damage_task(random: Random, scene: Scene, task: Task, number: int) -> Task:
    """Make a task with a damaged Program or damaged tensors that can be fetched."""
    program, [group, *_] = scene.plan.first.program, task.groups
    if is_program := random.random() < 0.6:
        raw = damage_structure(random, encode_program(program), encode_program(program))
    else:
        raw = pack({name: np.ones(program.tensors[name].shape, np.float32) for name in program.names(group)})
        raw = damage_tensors(random, raw, raw)
    replaced, manifest = task.program if is_program else task.groups[group], scene.blobs.put(raw or b"\0")
    blobs = tuple(manifest if each.digest == replaced else each for each in task.blobs)
    changes: dict[str, Any] = {"blobs": blobs, "round": number + 2, "kind": random.choice(("train", "evaluate"))}
    changes |= {"program": manifest.digest} if is_program else {"groups": {**task.groups, group: manifest.digest}}
    return msgspec.structs.replace(task, **changes)


def test_coordinator_bears_hostile_devices(scene: Scene) -> None:
    """Its rounds go on with a healthy device, while devices send damage and after they have left."""
    random, counts, topics, broker = Random(7), Counts(), Topics(scene.config.federation), MemoryBroker()
    folder = scene.folder / "runs" / RUN
    store = open_record(folder.parent)
    store.runs.create(RUN, msgspec.to_builtins(scene.config))
    coordinator = Coordinator(
        RunSetup(
            run=RUN,
            config=scene.config,
            transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
            store=store,
            folder=folder,
            display=Display(),
            compute=Engine(run=RUN, config=scene.config, store=store, folder=folder, graph_cache=scene.cache),
        )
    )
    coordinator.transport.admits = lambda topic, payload: True  # limits of senders would drop most of the damage
    name, instance, classes = HOSTILE[0], secrets.token_hex(8), scene.plan.classes
    peer = Peer(  # before the coordinator, which publishes its state once
        MemoryTransport(SimpleQueue(), broker, name), scene.folder / name,
        topics.to_device(name), topics.coordinator_state,
        topic=topics.from_device(name), upload_topic=lambda digest: topics.upload(name, digest),
    )  # fmt: skip
    server = Serving(coordinator.serve, coordinator.transport.inbox)
    agent, stop = scene.agent(broker, "healthy"), threading.Event()
    healthy = Serving(lambda: agent.serve(stop), agent.link.transport.inbox)
    peer.wait_for(CoordinatorState)
    peer.send(encode(make_hello(instance, classes)))
    task, upload = peer.wait_for(Task), peer.blobs.put(b"no tensors")
    for number in counts.numbers(MESSAGES["coordinator"]):
        valid = [encode(message) for message in list_device_messages(instance, classes, task, upload)]
        sender = random.choices(HOSTILE, (6, 2, 1, 0.2, 0.2))[0]
        topic = topics.from_device(sender)
        if number % TRANSFER_EVERY == 0:
            upload = damage_upload(random, scene, peer)
            raw = encode(Result(task.run, task.round, "train", 120, {"loss": 0.25}, USE, upload, task=task.task))
            topic = topics.from_device(name)
        elif random.random() < 0.1:
            piece = Chunk(upload.digest, 0, upload.chunks, upload.size, 1, bytes(min(upload.size, 2000)))
            raw = damage_chunk(random, piece.encode(), valid[0])
            counts.add(raw, decode_chunk)
            peer.send(raw, topics.upload(sender, upload.digest))
            continue
        else:
            original = random.choice(valid)
            raw = damage_message(random, original, random.choice(valid))
            topic = topics.device_state(sender) if isinstance(decode(original), DeviceState) else topic
        counts.add(raw)
        peer.send(raw, topic)
        if number % BATCH == 0 or number % TRANSFER_EVERY == 0:
            server.check_idle()
            for message in peer.receive():
                if isinstance(message, Task):
                    task = message
                elif isinstance(message, CoordinatorState):
                    peer.send(encode(make_hello(instance, classes)))
    server.check_idle()
    check_rounds(coordinator, store, peer, topics)
    stop.set()
    healthy.check_end()
    coordinator.stop()
    server.check_end()
    assert {"train", "message", "hello"} <= {entry.kind for entry in store.devices.read_refusals(RUN)}
    store.close()
    counts.check()


def damage_upload(random: Random, scene: Scene, peer: Peer) -> Manifest:
    program = scene.plan.first.program
    specs = (program.tensors[name] for group in program.with_role(Role.SHARED) for name in program.names(group))
    zeros = (np.zeros(spec.shape, spec.dtype) for spec in specs)
    raw = pack(dict(zip(program.upload_form(), zeros, strict=True)))
    return peer.blobs.put(damage_tensors(random, raw, raw) or b"\0")


def check_rounds(coordinator: Coordinator, store: Record, peer: Peer, topics: Topics) -> None:
    """Check that two more rounds close with the healthy device's result after the hostile devices leave."""
    closed = [record.round for record in store.rounds.read_all(RUN) if record.closed_at]
    wanted = (closed[-1] if closed else 0) + 2

    def dismiss() -> None:
        for name in HOSTILE:
            if coordinator.state.presence.is_online(name):
                leaving = DeviceState(coordinator.state.presence[name].hello.instance, online=False)
                peer.send(encode(leaving), topics.device_state(name))
        peer.receive()

    wait_until(
        lambda: "healthy" in {result.device for result in store.tasks.read_results(RUN, wanted, "train")},
        f"the healthy device did not finish round {wanted}", pause_s=0.05, meanwhile=dismiss,
    )  # fmt: skip
