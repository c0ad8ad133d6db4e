"""A hostile coordinator: it has its certificate of a deployment, and gives a real device any Program as a task."""

import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil

from coordinator.security.folder import Deployment
from coordinator.security.registry import Certificate
from edge_client.link.identity import Membership
from edge_client.storage.vault import Vault
from edge_client.work.batches import whole_samples
from fedvit.blobs import BlobStore, digest_of
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload
from fedvit.files import folder_bytes
from fedvit.program import Batch, GraphSpec, Program, encode_program
from fedvit.public_keys import PUBLISHER_FILE
from fedvit.publisher import PublisherKey
from fedvit.tensors import Tensors, pack, unpack
from fedvit.transport.base import Received
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    CoordinatorState,
    Declined,
    Failed,
    Hello,
    Result,
    ResultAck,
    Task,
    TaskKind,
    Welcome,
    decode,
    encode,
)
from fedvit.wire.topics import Topics
from fleet.processes import Fleet, log_text, program
from tests.support.deployments import make_request, write_identity
from tests.support.waiting import WAIT_S, wait_until

LOOK_EVERY_S = 0.05
ALIKE = 0.99
"""Cosine above which numbers are a scaled copy of a patch; patches of noise are at most 0.7 alike."""


@dataclass(frozen=True)
class Order:
    """A Program with its graphs by name, and values for its tensors."""

    program: Program
    graphs: Mapping[str, bytes]
    values: Tensors

    def change_graph(self, name: str, content: bytes) -> "Order":
        spec = GraphSpec(digest_of(content), self.program.graphs[name].flops)
        graphs = {**self.program.graphs, name: spec}
        return Order(msgspec.structs.replace(self.program, graphs=graphs), {**self.graphs, name: content}, self.values)

    def change(self, **changes: Any) -> "Order":
        """Return the order with other fields of the Program."""
        return Order(msgspec.structs.replace(self.program, **changes), self.graphs, self.values)

    def change_phase(self, **changes: Any) -> "Order":
        """Return the order with other fields of its only training phase."""
        [phase] = self.program.train
        return self.change(train=(msgspec.structs.replace(phase, **changes),))

    def change_batch(self, **changes: Any) -> "Order":
        return self.change(batch=msgspec.structs.replace(self.program.batch, **changes))


def make_order(shipped: Program, graphs: Mapping[str, bytes], seed: int = 0) -> Order:
    """Make an order of a Program with small random values."""
    random = np.random.default_rng(seed)
    values = {
        name: random.normal(0, 0.1, spec.shape).astype(spec.dtype) for name, spec in sorted(shipped.tensors.items())
    }
    return Order(shipped, graphs, values)


def sign_order(order: Order, key: PublisherKey) -> dict[str, Any]:
    """Return the fields of a task whose graphs a publisher signed."""
    signatures = tuple(map(key.sign, order.program.digests_by_graph().values()))
    return {"publisher": key.public, "signatures": signatures}


class HostileDevice:
    """A real `edge-client` that has joined the deployment, with the default policy unless flags change it.

    With a `publisher` it trusts that one, otherwise none.
    """

    def __init__(
        self,
        deployment: Deployment,
        fleet: Fleet,
        folder: Path,
        name: str,
        data: Path,
        *flags: str,
        publisher: PublisherKey | None = None,
    ) -> None:
        self.name, self.data, self.state, self.publisher = name, data, folder / name, publisher
        self.log_path = folder / f"{name}.log"
        join_without_token(deployment, self.state / "identity", name)
        if publisher:
            (self.state / PUBLISHER_FILE).write_text(publisher.public)
        command = [*program("edge_client.cli"), "--data", str(data), "--state", str(self.state), "--threads", "1"]
        self.process = fleet.start(name, [*command, *flags], log=self.log_path)
        self.peak_bytes, self._looked_at = 0, 0.0
        self._children: list[psutil.Process] = []

    @property
    def log(self) -> str:
        return log_text(self.log_path)

    def look(self) -> None:
        """Take a sample of the memory of the device and of its processes, several times a second."""
        if (now := time.monotonic()) < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        with suppress(psutil.Error):
            device = psutil.Process(self.process.pid)
            tree = [device, *device.children(recursive=True)]
            self.peak_bytes = max(self.peak_bytes, sum(one.memory_full_info().pss for one in tree))

    def disk_bytes(self) -> int:
        return folder_bytes(self.state)

    def read_ledger(self) -> list[dict[str, Any]]:
        """Read the ledger as the owner does."""
        flags = ["ledger", "--state", str(self.state), "--json"]
        done = subprocess.run([*program("edge_client.cli"), *flags], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        lines: list[dict[str, Any]] = json.loads(done.stdout)
        return lines

    def read_personal(self) -> list[Any]:
        """Read the personal tensors of the newest runs; of one or two numbers a copy would prove nothing."""
        vault = Vault(self.state / "vault")
        kept = [vault.local(run) or {} for run in vault.notes.list_runs()[:5]]
        return [value for tensors in kept for value in tensors.values() if value.size > 4]

    def terminate(self) -> None:
        """Ask the device to end."""
        self._children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()

    def check_end(self) -> None:
        """Check that the device has ended in order, with all of its processes."""
        assert self.process.wait(WAIT_S) == 0, self.log
        _, alive = psutil.wait_procs(self._children, timeout=WAIT_S)
        assert not alive
        assert "Traceback" not in self.log


class HostileCoordinator:
    """Speaks the protocol as a coordinator, and keeps every payload that a device sends."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.topics = Topics(deployment.settings.federation)
        self.blobs = BlobStore(folder)
        self.payloads: list[tuple[str, bytes]] = []
        self.messages: list[tuple[str, AnyMessage]] = []  # with the device
        self.uploads: list[tuple[Result, bytes]] = []
        self.epoch = secrets.randbits(32)
        self._instances: dict[str, str] = {}
        self._rounds = 0
        name = f"coordinator-{secrets.token_hex(4)}"
        self.transport = MqttTransport(SimpleQueue(), deployment.address, client_id=name)
        self.exchange = BlobExchange(
            self.transport,
            self.blobs,
            send=self.tell,
            topics=ChunkTopics(self.topics.broadcast),
            may_read=lambda peer, digest: True,
        )
        for topic in (*self.topics.from_all_devices, self.topics.device_state("+").replace("/st", "/up/#")):
            self.transport.subscribe(topic, 1)
        self.transport.open()

    def close(self) -> None:
        self.transport.close()

    # --- protocol -------------------------------------------------------------------------------------

    def tell(self, device: str, message: AnyMessage) -> None:
        self.transport.publish(self.topics.to_device(device), encode(message))

    def announce(self) -> None:
        self.transport.publish(self.topics.coordinator_state, encode(CoordinatorState(self.epoch, True, spread_s=0.0)))

    def step(self) -> None:
        """Take what came, and let time pass."""
        with suppress(Empty):
            while True:
                event = self.transport.inbox.get_nowait()
                if isinstance(event, Received):
                    self._take(event.topic, event.payload)
        self.exchange.tick()

    def _take(self, topic: str, payload: bytes) -> None:
        self.payloads.append((topic, payload))
        device = self.topics.device_of(topic)
        if "/b/" in topic:
            self.exchange.heard(topic, payload)
            return
        if not topic.endswith("/up/ctl"):
            return
        message = decode(payload)
        self.messages.append((device, message))
        match message:
            case Hello():
                self._instances[device] = message.instance
                self.tell(device, Welcome(message.instance, self.epoch, "a task"))
            case Result(upload=upload) if upload is not None:
                self._fetch(device, message)
            case BlobNack():
                with suppress(BadPayload):  # a chunk that there is not
                    self.exchange.on_nack(device, message)
            case BlobAck():
                self.exchange.on_ack(device, message)

    def _fetch(self, device: str, result: Result) -> None:
        upload = result.upload
        assert upload
        if result.inline:
            self.uploads.append((result, result.inline))
        else:
            self.exchange.fetch(
                upload,
                device,
                self.topics.upload(device, upload.digest),
                lambda *_: self.uploads.append((result, self.blobs.get(upload.digest))),
            )

    def wait(self, condition: Callable[[], Any], what: str, *devices: HostileDevice) -> Any:
        """Wait for a condition, and look at the devices' memory meanwhile."""

        def meanwhile() -> None:
            self.step()
            for device in devices:
                device.look()

        return wait_until(condition, what, meanwhile=meanwhile)

    def await_device(self, device: HostileDevice) -> None:
        """Wait until a device has said hello to this coordinator."""
        announced_at = 0.0

        def is_here() -> bool:
            nonlocal announced_at
            if time.monotonic() - announced_at > 2.0:
                announced_at = time.monotonic()
                self.announce()
            assert device.process.poll() is None, device.log
            return device.name in self._instances

        self.wait(is_here, f"{device.name} does not say hello", device)

    # --- tasks ----------------------------------------------------------------------------------------

    def give(self, device: HostileDevice, order: Order, *, run: str, kind: TaskKind = "train", **changes: Any) -> Task:
        """Send a task, each with a round of its own."""
        self._rounds += 1
        shipped, keep = order.program, self.blobs.put
        brought, values = dict[str, str](), order.values
        once = [keep(content) for content in order.graphs.values()]
        groups = {}
        for group, spec in shipped.groups.items():
            value = keep(pack({name: values[name] for name in shipped.names(group)}))
            if spec.role.from_server_each_round:
                brought[group] = value.digest
            groups[group] = msgspec.structs.replace(
                spec, initial=None if spec.role.from_server_each_round else value.digest
            )
            once.append(value)
        whole = keep(encode_program(msgspec.structs.replace(shipped, groups=groups)))
        task = Task(
            instance=self._instances[device.name],
            epoch=self.epoch,
            run=run,
            round=self._rounds,
            kind=kind,
            seed=5,
            program=whole.digest,
            groups=brought,
            blobs=tuple({manifest.digest: manifest for manifest in (whole, *once)}.values()),
            deadline_s=60.0,
        )
        task = msgspec.structs.replace(task, **changes)
        self.tell(device.name, task)
        return task

    def expect(self, device: HostileDevice, task: Task, *, acknowledges: bool = True) -> Result | Failed | Declined:
        """Wait for the answer to a task, with its upload."""

        def find() -> Result | Failed | Declined | None:
            assert device.process.poll() is None, device.log
            for sender, message in self.messages:
                is_answer = sender == device.name and isinstance(message, Result | Failed | Declined)
                if is_answer and (message.run, message.round, message.kind) == (task.run, task.round, task.kind):
                    return message
            return None

        answer = self.wait(find, f"no answer to {task.run}", device)
        if isinstance(answer, Result) and answer.upload:
            self.wait(lambda: task.round in [result.round for result, _ in self.uploads], "no upload came", device)
        if acknowledges:
            self.tell(device.name, ResultAck(task.run, task.round, task.kind, isinstance(answer, Result)))
        return answer

    def ask(
        self, device: HostileDevice, order: Order, *, run: str, acknowledges: bool = True, **changes: Any
    ) -> Result | Failed | Declined:
        """Send a task and wait for its answer."""
        return self.expect(device, self.give(device, order, run=run, **changes), acknowledges=acknowledges)

    def time_honest(self, device: HostileDevice, order: Order) -> float:
        """Give the honest task, which must be done; returns the seconds that it took."""
        began = time.monotonic()
        signed = sign_order(order, device.publisher) if device.publisher else {}
        answer = self.ask(device, order, run="honest", **signed)
        assert isinstance(answer, Result), answer
        return time.monotonic() - began

    # --- what came ------------------------------------------------------------------------------------

    def find_leaks(self, device: HostileDevice, batch: Batch) -> Iterator[str]:
        """Yield where images, also scaled, and personal tensors of the newest runs are in what came."""
        prepared, pixels = read_images(device.data, batch)
        hidden = [row.tobytes() for image in prepared for row in image] + [row.tobytes() for row in pixels]
        hidden += [value.tobytes() for value in device.read_personal()]
        for where, content in [*self.payloads, *((result.run, content) for result, content in self.uploads)]:
            if any(one in content for one in hidden):
                yield f"a copy in {where}"
        patches = prepared.reshape(-1, prepared.shape[-1])
        for result, content in self.uploads:
            for name, value in unpack(content).items():
                if is_scaled_copy(value, patches):
                    yield f"a scaled copy in {name} of {result.run}"


def read_images(folder: Path, batch: Batch) -> tuple[Any, Any]:
    """Return all images of a device: as a graph gets them, and rows of their raw pixels."""
    data = DeviceData.open(folder)
    rows = np.arange(len(data.train))
    parts = [feeds["batch/patches"][: len(some)] for some, _, feeds in whole_samples(data.train, rows, batch)]
    pixels, _ = data.train.load(rows, batch.image_size)
    return np.concatenate(parts), pixels.reshape(-1, pixels.shape[-2] * pixels.shape[-1])


def is_scaled_copy(value: Any, patches: Any) -> bool:
    """Return True if some numbers that lie side by side are a patch times a factor."""
    flat, size = np.asarray(value, np.float64).ravel(), patches.shape[-1]
    if flat.size < size:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(flat, size)
    lengths = np.linalg.norm(windows, axis=1)[:, None] * np.linalg.norm(patches, axis=1)
    alike = np.abs(windows @ patches.T.astype(np.float64)) / np.maximum(lengths, 1e-30)
    return bool((alike > ALIKE).any())


def join_without_token(deployment: Deployment, folder: Path, name: str) -> None:
    """Write the identity of a device as `join` does."""
    key, request = make_request()
    certificate = deployment.authority.device(name, request, time.time(), 90.0)
    with deployment.change() as rows:
        end = certificate.not_valid_after_utc.timestamp()
        rows.put_device(name, Certificate(f"{certificate.serial_number:x}", time.time(), end), time.time())
    address = write_identity(deployment, folder, name, key, certificate)
    assert address.cert_file is not None
    assert address.key_file is not None
    assert address.ca_file is not None
    address.cert_file.rename(folder / "certificate.pem")
    address.key_file.rename(folder / "key.pem")
    (folder / "authority.pem").write_bytes(address.ca_file.read_bytes())
    (folder / "request.der").write_bytes(request)
    member = Membership(
        device=name, federation=deployment.settings.federation, host="127.0.0.1", port=deployment.settings.port
    )
    (folder / "membership.json").write_bytes(msgspec.json.encode(member))
