"""Fuzzing in one process: the decoders, then a real Agent, then a real Coordinator while it runs rounds."""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import numpy as np

from bench.edge import noise_folder
from bench.fuzz.mutations import Mutator
from bench.fuzz.peer import HANG_S, SLOW_S, Peer
from bench.fuzz.report import FuzzReport, Part, describe
from bench.fuzz.seeds import RUN, SETTINGS, from_coordinator, from_device, hello
from coordinator.compute.engine import Engine
from coordinator.compute.planning.checks import checked_config
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import RunConfig
from coordinator.record.record import Record, open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.display import Display
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.validation import check_upload
from edge_client.agent import Agent
from edge_client.guard import Guard
from edge_client.runtime import Runtime
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, FedvitError
from fedvit.onnx_file import check_self_contained
from fedvit.program import Role, decode_program, encode_program
from fedvit.tensors import map_tensors, pack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import (
    CoordinatorState,
    DeviceState,
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
from profiles.probes.host import device_profile

Log = Callable[[str], None]

BATCH = 100
PROGRAM_EVERY = 40
"""Messages for each damaged Program, tensor file or upload, which take a transfer."""
HOSTILE = ("mallory", "eve", "trudy", "..", "a b")
"""Names of hostile devices. The first has joined the run before the fuzzing; the last two are invalid names."""


class Scene(NamedTuple):
    """A tiny run that all parts use."""

    folder: Path
    config: RunConfig
    plan: Plan
    blobs: BlobStore
    data: Path
    cache: Path | None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.plan.classes

    def task(self, instance: str, epoch: int) -> Task:
        """A first task, as the coordinator would make it."""
        program = self.plan.first.program
        groups = {
            group: self.blobs.put(pack({name: self.plan.state.tensors[name] for name in program.names(group)})).digest
            for group in program.common_groups()
        }
        digests = [self.plan.first.digest, *program.list_fetched_once(), *groups.values()]
        manifests = tuple(self.blobs.manifest(digest) for digest in digests)
        return Task(instance, epoch, RUN, 1, "train", 0, self.plan.first.digest, groups, manifests, 60.0)


def fuzz_in_memory(messages: int, seed: int, log: Log, *, cache: Path | None = None) -> FuzzReport:
    """A quarter of the messages to the decoders, a quarter to an agent, half to a coordinator; see `Part.findings`."""
    with tempfile.TemporaryDirectory(prefix="fedvit-fuzz-") as folder:
        home = Path(folder)
        config = checked_config(SETTINGS, "fuzz").run
        data = noise_folder(home / "data", images=16, size=8)
        classes = DeviceData.open(data).classes
        blobs = BlobStore(home / "server")
        scene = Scene(home, config, make_plan(config, classes, blobs, cache=cache), blobs, data, cache)
        parts = [
            _timed(log, _decoders, scene, messages // 4, seed),
            _timed(log, _agent, scene, messages // 4, seed + 1),
            _timed(log, _coordinator, scene, messages - 2 * (messages // 4), seed + 2),
        ]
    return FuzzReport(seed, parts)


def _timed(log: Log, part: Callable[[Scene, int, int], Part], scene: Scene, messages: int, seed: int) -> Part:
    began = time.monotonic()
    made = part(scene, messages, seed)
    made.seconds = time.monotonic() - began
    made.check_memory()
    log(f"{made.name}: {made.sent} messages, {len(made.findings)} findings, {made.seconds:.0f} s")
    return made


# --- decoders -----------------------------------------------------------------------------------------


def _decoders(scene: Scene, messages: int, seed: int) -> Part:
    """Pure functions of bytes: for any input they return, or raise FedvitError."""
    part, mutator = Part("decoders"), Mutator(seed)
    program = scene.plan.first.program
    task = scene.task("instance", 1)
    upload = pack({name: np.zeros(spec.shape, spec.dtype) for name, spec in program.tensors.items()})
    manifest = Manifest("blake3:" + "ab" * 32, 5 * CHUNK_BYTES, CHUNK_BYTES)
    control = [
        encode(message)
        for message in (
            *from_device("instance", scene.classes, task, manifest),
            *from_coordinator("instance", task, manifest.digest),
        )
    ]
    chunks = [Chunk(manifest.digest, index, 5, manifest.size, index + 1, bytes(99)).encode() for index in range(5)]
    programs = [encode_program(program)]
    graphs = [scene.blobs.get(graph.digest) for graph in program.graphs.values()]
    file = scene.folder / "file"

    def read_mapped(raw: bytes) -> None:
        file.write_bytes(raw)
        map_tensors(file)

    def read_upload(raw: bytes) -> None:
        file.write_bytes(raw)
        check_upload(file, program, "upload")

    def read_graph(raw: bytes) -> None:
        file.write_bytes(raw)
        check_self_contained(file)

    targets: list[tuple[str, list[bytes], Callable[[bytes, bytes], tuple[str, bytes]], Callable[[bytes], object]]] = [
        ("message", control, mutator.message, decode),
        ("chunk", chunks, mutator.chunk, decode_chunk),
        ("program", programs, mutator.document, decode_program),
        ("program's bytes", programs, mutator.damaged, decode_program),
        ("tensors", [upload], mutator.tensors, read_upload),
        ("tensors in a file", [upload], mutator.tensors, read_mapped),
        ("graph", graphs, mutator.damaged, read_graph),
    ]
    weights = (6, 2, 3, 1, 2, 2, 1)
    for _ in part.numbers(messages):
        [(name, valid, damage, read)] = mutator.random.choices(targets, weights)
        kind, raw = damage(mutator.random.choice(valid), mutator.random.choice(valid))
        began = time.thread_time()
        try:
            read(raw)
            accepted = True
        except FedvitError:
            accepted = False
        except Exception as error:  # noqa: BLE001 - any other exception is a finding
            accepted = False
            part.finding(f"{name} ({kind}): {describe(error)}")
        if (took_s := time.thread_time() - began) > SLOW_S:
            part.finding(f"{name} ({kind}): took {took_s:.0f} s of processor time")
        part.add(name, accepted=accepted)
    return part


# --- peers --------------------------------------------------------------------------------------------


class _Serving:
    """A program in a thread."""

    def __init__(self, name: str, serve: Callable[[], object], inbox: "SimpleQueue[object]") -> None:
        self.name = name
        self.inbox = inbox
        self.outcome: object = None
        self._serve = serve
        self._busy_s = 0.0  # processor time of its thread until all earlier messages were handled
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._serve()
        except BaseException as error:  # noqa: BLE001 - any exception that ends a program is a finding
            self.outcome = error

    def is_idle(self, part: Part) -> bool:
        """Wait until it has handled all messages; False, and a finding, when it has ended, hangs or takes too long."""
        until = time.monotonic() + HANG_S
        while self.thread.is_alive():
            took_s = self._processor_s() - self._busy_s
            if took_s > SLOW_S:
                part.finding(f"{self.name} took {took_s:.0f} s of processor time for {BATCH} messages at most")
                return False
            if self.inbox.empty():
                self._busy_s += took_s
                return True
            if time.monotonic() > until:
                part.finding(f"{self.name} did not handle {BATCH} messages within {HANG_S:.0f} s")
                return False
            time.sleep(0.001)
        part.finding(f"{self.name} ended: {describe(self.outcome)}")
        return False

    def _processor_s(self) -> float:
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))


def _make_agent(scene: Scene, broker: MemoryBroker, name: str, home: Path) -> Agent:
    return Agent(
        device=name,
        federation=scene.config.federation,
        transport=MemoryTransport(SimpleQueue(), broker, name),
        data=DeviceData.open(scene.data),
        vault=Vault(home / "vault"),
        blobs=BlobStore(home / "blobs"),
        runtime=Runtime(1),
        profile=device_profile(1),
        software="fuzz",
        guard=Guard(device_profile(1).budget),
    )


def _decoded(raw: bytes) -> object:
    """The message, or None where the decoder refuses it."""
    try:
        return decode(raw)
    except FedvitError:
        return None


# --- a device -----------------------------------------------------------------------------------------


def _agent(scene: Scene, messages: int, seed: int) -> Part:
    """A hostile coordinator against a real agent, which must do a valid task afterwards."""
    part, mutator = Part("device"), Mutator(seed)
    broker, topics = MemoryBroker(), Topics(scene.config.federation)
    base = f"fl1/{scene.config.federation}/d/+"
    peer = Peer(
        MemoryTransport(SimpleQueue(), broker, "false"),
        scene.blobs.folder,
        f"{base}/up/ctl",
        f"{base}/st",
        topic=topics.to_device("victim"),
        upload_topic=topics.broadcast,
    )
    agent = _make_agent(scene, broker, "victim", scene.folder / "victim")
    stop = threading.Event()
    device = _Serving("the agent", lambda: agent.serve(stop), agent.transport.inbox)
    instance = peer.wait_for(Hello, "the agent's hello").instance
    task = scene.task(instance, 1)
    kept = "blake3:" + "0" * 64
    peer.send(encode(Welcome(instance, 1, "")))
    for number in part.numbers(messages):
        if number % PROGRAM_EVERY == 0:
            kind, raw = "task with a damaged blob", encode(_damaged_task(scene, mutator, task, number))
        else:
            valid = [encode(message) for message in from_coordinator(instance, task, kept)]
            if mutator.random.random() < 0.1:
                kind = "chunk"
                manifest = mutator.random.choice(task.blobs)
                piece = Chunk(manifest.digest, 0, manifest.chunks, manifest.size, 1, bytes(manifest.size % CHUNK_BYTES))
                _, raw = mutator.chunk(piece.encode(), valid[0])
                peer.send(raw, topics.broadcast(manifest.digest))
                part.add(kind, accepted=_is_chunk(raw))
                continue
            original = mutator.random.choice(valid)
            kind = str(msgspec.msgpack.decode(original[1:])[0])
            if mutator.random.random() < 0.1:
                kind, raw = mutator.delta_steps(encode(task))
            else:
                _, raw = mutator.message(original, mutator.random.choice(valid))
        message = _decoded(raw)
        if isinstance(message, Refused) and message.instance == instance:
            continue  # the device would obey
        peer.send(raw, mutator.random.choice((peer.topic, peer.topic, topics.coordinator_state)))
        part.add(kind, accepted=message is not None)
        if number % BATCH == 0 or number % PROGRAM_EVERY == 0:
            if not device.is_idle(part):
                break
            if number % PROGRAM_EVERY == 0:
                time.sleep(0.005)  # for the transfer
            kept = _answer(peer, part, instance) or kept
    if device.thread.is_alive():
        _check_agent(peer, part, scene, instance)
    stop.set()
    device.thread.join(HANG_S)
    if isinstance(device.outcome, BaseException):
        part.finding(f"the agent ended: {describe(device.outcome)}")
    return part


def _answer(peer: Peer, part: Part, instance: str) -> str | None:
    """Answer as a correct coordinator, so that the device continues; the digest of the newest upload."""
    digest = None
    for message in peer.receive():
        match message:
            case Hello():
                peer.send(encode(Welcome(instance, 1, "")))
            case Result():
                digest = message.upload.digest if message.upload else None
                part.refusals["task done"] = part.refusals.get("task done", 0) + 1
                peer.send(encode(ResultAck(message.run, message.round, message.kind, accepted=True)))
            case _:
                if type(message).__name__ == "Failed":
                    part.refusals["task failed"] = part.refusals.get("task failed", 0) + 1
    return digest


def _damaged_task(scene: Scene, mutator: Mutator, task: Task, number: int) -> Task:
    """A task with a damaged Program or damaged tensors that can be fetched."""
    program = scene.plan.first.program
    [group, *_] = task.groups
    if mutator.random.random() < 0.6:
        _, raw = mutator.document(encode_program(program), encode_program(program))
        replaced = task.program
    else:
        raw = pack({name: np.ones(program.tensors[name].shape, np.float32) for name in program.names(group)})
        _, raw = mutator.tensors(raw, raw)
        replaced = task.groups[group]
    made = scene.blobs.put(raw or b"\0")
    blobs = tuple(made if manifest.digest == replaced else manifest for manifest in task.blobs)
    kind = mutator.random.choice(("train", "evaluate"))
    changed = msgspec.structs.replace(task, blobs=blobs, round=number + 2, kind=kind)
    if replaced == task.program:
        return msgspec.structs.replace(changed, program=made.digest)
    return msgspec.structs.replace(changed, groups={**task.groups, group: made.digest})


def _check_agent(peer: Peer, part: Part, scene: Scene, instance: str) -> None:
    """Add a finding unless the agent does a valid task."""
    number = 2**31 - 2
    task = msgspec.structs.replace(scene.task(instance, 1), round=number, run="honest")
    try:
        peer.send(encode(CoordinatorState(1, alive=True)))
        peer.send(encode(Welcome(instance, 1, "")))
        peer.send(encode(task))
        result = peer.wait_for(Result, "a valid task's result", lambda made: made.run == "honest")
        if result.upload is None or result.samples < 1:
            part.finding(f"the agent answered a valid task with {result}")
    except FedvitError as error:
        part.finding(f"the agent does no valid task any more: {error}")


def _is_chunk(raw: bytes) -> bool:
    try:
        decode_chunk(raw)
    except BadPayload:
        return False
    return True


# --- a coordinator ------------------------------------------------------------------------------------


def _coordinator(scene: Scene, messages: int, seed: int) -> Part:
    """Hostile devices against a real coordinator, which must continue its rounds with a healthy device."""
    part, mutator = Part("coordinator"), Mutator(seed)
    broker, topics = MemoryBroker(), Topics(scene.config.federation)
    store = open_record(scene.folder / "runs")
    store.runs.create(RUN, msgspec.to_builtins(scene.config))
    coordinator = Coordinator(
        run=RUN,
        config=scene.config,
        transport=MemoryTransport(SimpleQueue(), broker, "coordinator"),
        store=store,
        folder=scene.folder / "runs" / RUN,
        display=Display(),
        compute=Engine(
            run=RUN, config=scene.config, store=store, folder=scene.folder / "runs" / RUN, graph_cache=scene.cache
        ),
    )
    coordinator.transport.admits = lambda topic, payload: True  # limits of senders would drop most of the damage
    me, instance = HOSTILE[0], secrets.token_hex(8)
    peer = Peer(  # before the coordinator, which publishes its state once
        MemoryTransport(SimpleQueue(), broker, me),
        scene.folder / me,
        topics.to_device(me),
        topics.coordinator_state,
        topic=topics.from_device(me),
        upload_topic=lambda digest: topics.upload(me, digest),
    )
    server = _Serving("the coordinator", coordinator.serve, coordinator.transport.inbox)
    agent = _make_agent(scene, broker, "healthy", scene.folder / "healthy")
    stop = threading.Event()
    healthy = _Serving("the healthy device", lambda: agent.serve(stop), agent.transport.inbox)
    try:
        peer.wait_for(CoordinatorState, "the coordinator")
        peer.send(encode(hello(instance, scene.classes)))
        task = peer.wait_for(Task, "the first task")
        _bombard(scene, part, mutator, messages, peer, server, topics, task, instance)
        if server.thread.is_alive():
            _check_rounds(part, coordinator, store, peer, topics)
    except FedvitError as error:
        part.finding(f"{error}; the coordinator: {server.outcome!r}"[:500])
    stop.set()
    healthy.thread.join(HANG_S)
    coordinator.stop()
    server.thread.join(HANG_S)
    for serving in (server, healthy):
        if isinstance(serving.outcome, BaseException) and not isinstance(serving.outcome, Interrupted):
            part.finding(f"{serving.name} ended: {describe(serving.outcome)}")
    for entry in store.devices.read_refusals(RUN):
        part.refusals[entry.kind] = part.refusals.get(entry.kind, 0) + 1
    store.close()
    return part


def _bombard(
    scene: Scene,
    part: Part,
    mutator: Mutator,
    messages: int,
    peer: Peer,
    server: _Serving,
    topics: Topics,
    task: Task,
    instance: str,
) -> None:
    upload = peer.blobs.put(b"no tensors")
    for number in part.numbers(messages):
        valid = [encode(message) for message in from_device(instance, scene.classes, task, upload)]
        sender = mutator.random.choices(HOSTILE, (6, 2, 1, 0.2, 0.2))[0]
        if number % PROGRAM_EVERY == 0:
            kind, upload = "result with a damaged upload", _damaged_upload(scene, mutator, peer)
            raw = encode(from_device(instance, scene.classes, task, upload)[4])
            sender = HOSTILE[0]
        elif mutator.random.random() < 0.1:
            kind = "chunk"
            piece = Chunk(upload.digest, 0, upload.chunks, upload.size, 1, bytes(min(upload.size, 2000)))
            _, raw = mutator.chunk(piece.encode(), valid[0])
            peer.send(raw, topics.upload(sender, upload.digest))
            part.add(kind, accepted=_is_chunk(raw))
            continue
        else:
            original = mutator.random.choice(valid)
            kind = str(msgspec.msgpack.decode(original[1:])[0])
            _, raw = mutator.message(original, mutator.random.choice(valid))
        topic = topics.device_state(sender) if kind == "device" else topics.from_device(sender)
        peer.send(raw, topic)
        part.add(kind, accepted=_decoded(raw) is not None)
        if number % BATCH == 0 or number % PROGRAM_EVERY == 0:
            if not server.is_idle(part):
                return
            if number % PROGRAM_EVERY == 0:
                time.sleep(0.005)  # for the transfer
            for message in peer.receive():
                if isinstance(message, Task):
                    task = message
                elif isinstance(message, CoordinatorState):
                    peer.send(encode(hello(instance, scene.classes)))


def _damaged_upload(scene: Scene, mutator: Mutator, peer: Peer) -> Manifest:
    program = scene.plan.first.program
    sent_back = (program.tensors[name] for group in program.with_role(Role.SHARED) for name in program.names(group))
    raw = pack(dict(zip(program.upload_form(), (np.zeros(spec.shape, spec.dtype) for spec in sent_back), strict=True)))
    return peer.blobs.put(mutator.tensors(raw, raw)[1] or b"\0")


def _check_rounds(part: Part, coordinator: Coordinator, store: Record, peer: Peer, topics: Topics) -> None:
    """Add a finding unless two more rounds close with the healthy device's result after the hostile devices leave."""
    closed = [record.round for record in store.rounds.read_all(RUN) if record.closed_at]
    part.refusals["rounds closed meanwhile"] = len(closed)
    wanted = (closed[-1] if closed else 0) + 2
    until = time.monotonic() + 2 * HANG_S
    while time.monotonic() < until:
        for name in HOSTILE:
            if coordinator.state.presence.is_online(name):
                leaving = DeviceState(coordinator.state.presence[name].hello.instance, online=False)
                peer.send(encode(leaving), topics.device_state(name))
        peer.receive()
        if "healthy" in {result.device for result in store.tasks.read_results(RUN, wanted, "train")}:
            return
        time.sleep(0.05)
    part.finding(f"the healthy device did not finish round {wanted} within {2 * HANG_S:.0f} s")
