"""Fuzzing over a real broker, with a coordinator and two devices as processes.

One hostile client publishes to every topic of a hostile device, and to the control topic of one device, as at a broker
without access rules. Another device, to which it publishes nothing, must finish the run.
"""

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import psutil

from bench.edge import noise_folder
from bench.fuzz.mutations import Mutator
from bench.fuzz.report import FuzzReport, Part
from bench.fuzz.seeds import RUN, SETTINGS, from_coordinator, from_device, hello
from coordinator.record.record import open_record
from coordinator.security.broker import start_broker
from fedvit.errors import BadPayload, FedvitError
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import DeviceState, Hello, Manifest, Refused, Task, Welcome, decode, encode
from fedvit.wire.topics import Topics
from fleet.processes import Fleet, last_line, program

ROUNDS = 40
DEADLINE_S = 10.0
"""A device needs seconds for its first task while both programs are fuzzed, on a busy machine more."""
WAIT_S = 400.0
CLASSES = ("class-0", "class-1")
IN_FLIGHT_BYTES = 1 << 20
"""Most bytes that wait in the client: the broker drops messages that it cannot deliver, which would test nothing."""


class _Eavesdropper:
    """A client that receives all control messages and publishes anywhere, as at a broker without access rules."""

    def __init__(self, address: Address, federation: str) -> None:
        self.topics = Topics(federation)
        self.transport = MqttTransport(SimpleQueue(), address, client_id=f"hostile-{secrets.token_hex(4)}")
        self.newest: dict[tuple[str, type], Any] = {}  # by device and type
        self.instances: dict[str, set[str]] = {}  # of all hellos of a device, also of damaged ones
        base = f"fl1/{federation}/d/+"
        for topic in (f"{base}/up/ctl", f"{base}/dn/ctl"):
            self.transport.subscribe(topic, 0)
        self.transport.open()
        self.wait(lambda event: isinstance(event, Connected), "the broker")

    def receive(self) -> list[object]:
        events: list[object] = []
        while True:
            try:
                event = self.transport.inbox.get_nowait()
            except Empty:
                return events
            events.append(event)
            if isinstance(event, Received):
                try:
                    message = decode(event.payload)
                except FedvitError:
                    continue
                device = self.topics.device_of(event.topic)
                self.newest[device, type(message)] = message
                if isinstance(message, Hello):
                    self.instances.setdefault(device, set()).add(message.instance)

    def wait(self, holds: Callable[[object], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if any(holds(event) for event in self.receive()):
                return
            time.sleep(0.02)
        raise FedvitError(f"waited {WAIT_S:.0f} s for {what}")

    def wait_for(self, device: str, kind: type) -> Any:
        if (device, kind) not in self.newest:
            self.wait(lambda event: (device, kind) in self.newest, f"a {kind.__name__} of or to {device}")
        return self.newest[device, kind]

    def send(self, topic: str, raw: bytes) -> None:
        while self.transport.pending_bytes() > IN_FLIGHT_BYTES:
            time.sleep(0.002)
        with contextlib.suppress(BadPayload):  # larger than the broker accepts
            self.transport.publish(topic, raw, qos=1)


def fuzz_over_broker(messages: int, seed: int, log: Callable[[str], None]) -> FuzzReport:
    """Send half of the messages to a device and half to the coordinator; then the run must finish."""
    part, mutator = Part("over the broker"), Mutator(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedvit-fuzz-") as folder, Fleet() as fleet:
        home = Path(folder)
        broker = start_broker("auto", home / "broker", port=0)
        try:
            log(f"broker: {broker.kind}")
            _attack(part, mutator, messages, home, broker.address, fleet, log)
        except FedvitError as error:
            part.finding(f"{error}; the coordinator's last line: {last_line(home / 'coordinator.log')}")
        finally:
            fleet.stop()
            broker.stop()
    part.seconds = time.monotonic() - began
    return FuzzReport(seed, [part])


def _attack(
    part: Part,
    mutator: Mutator,
    messages: int,
    home: Path,
    address: Address,
    fleet: Fleet,
    log: Callable[[str], None],
) -> None:
    settings = {**SETTINGS, "rounds": ROUNDS, "devices": 3, "deadline_s": DEADLINE_S, "evaluate_every": ROUNDS}
    url = f"mqtt://{address}"
    config = home / "run.toml"
    config.write_bytes(msgspec.toml.encode({**settings, "broker": {"broker": url}}))
    start = [*program("coordinator.cli"), "start", "--config", str(config), "--runs", str(home / "runs"), "--run", RUN]
    coordinator = fleet.start("coordinator", start, log=home / "coordinator.log")
    data = noise_folder(home / "data", images=16, size=8)
    devices = {}
    for name in ("healthy", "victim"):
        flags = ["--broker", url, "--data", str(data), "--state", str(home / name), "--id", name, "--threads", "1"]
        once = ["--once"] if name == "healthy" else []
        devices[name] = fleet.start(name, [*program("edge_client.cli"), *flags, *once], log=home / f"{name}.log")
    hostile = _Eavesdropper(address, "home")
    instance = secrets.token_hex(8)
    topics = hostile.topics
    until = time.monotonic() + WAIT_S
    while ("mallory", Task) not in hostile.newest:  # the coordinator may still be starting
        hostile.send(topics.from_device("mallory"), encode(hello(instance, CLASSES)))
        time.sleep(0.5)
        hostile.receive()
        if coordinator.poll() is not None or time.monotonic() > until:
            raise FedvitError("the run did not begin")
    watched = {"coordinator": coordinator, **devices}
    before = {name: psutil.Process(process.pid).memory_info().rss for name, process in watched.items()}
    log("the run has begun; sending damaged messages")
    _bombard(part, mutator, messages, hostile, instance)
    hostile.receive()
    for name in ("mallory", "eve"):  # otherwise each round would wait for them
        for known in hostile.instances.get(name, set()):
            hostile.send(topics.device_state(name), encode(DeviceState(known, online=False)))
    for name, process in watched.items():
        if process.poll() is None:
            grown = psutil.Process(process.pid).memory_info().rss - before[name]
            part.refusals[f"{name}'s memory grew by MB"] = grown // 10**6
            if grown > 64 * 10**6 and name != "coordinator":  # torch allocates in the coordinator's first rounds
                part.finding(f"{name}'s memory grew by {grown // 10**6} MB")
        elif name != "healthy":
            part.finding(f"{name} ended with code {process.returncode}: {last_line(home / f'{name}.log')}")
    log("all messages sent; waiting for the run to finish")
    if not fleet.wait(["coordinator", "healthy"], ROUNDS * DEADLINE_S + WAIT_S):
        part.finding(f"the run did not end: {last_line(home / 'coordinator.log')}")
    for name in ("coordinator", "healthy"):
        if watched[name].poll() != 0:
            part.finding(f"{name} ended with code {watched[name].poll()}: {last_line(home / f'{name}.log')}")
    if devices["victim"].poll() is None:
        devices["victim"].terminate()
        if (code := devices["victim"].wait(30)) != 0:
            part.finding(f"the victim ended with code {code} on SIGTERM: {last_line(home / 'victim.log')}")
    hostile.transport.close()
    _count(part, home)


def _bombard(part: Part, mutator: Mutator, messages: int, hostile: _Eavesdropper, instance: str) -> None:
    topics = hostile.topics
    upload = Manifest("blake3:" + "ab" * 32, 500, 126_976)
    for number in range(messages):
        if number % 50 == 0:
            hostile.receive()
        task: Task = hostile.wait_for("mallory", Task)
        if mutator.random.random() < 0.5:
            known: Hello = hostile.wait_for("victim", Hello)
            welcome = hostile.newest.get(("victim", Welcome))
            epoch = welcome.epoch if welcome else 1
            other = msgspec.structs.replace(task, instance=known.instance, epoch=epoch)
            valid = [encode(message) for message in from_coordinator(known.instance, other, upload.digest)]
            topic = topics.to_device("victim")
            if mutator.random.random() < 0.1:
                topic = topics.broadcast(mutator.random.choice(task.blobs).digest)
        else:
            known = hello(instance, CLASSES)
            valid = [encode(message) for message in from_device(instance, CLASSES, task, upload)]
            sender = mutator.random.choice(("mallory", "mallory", "eve"))
            topic = mutator.random.choice(
                (topics.from_device(sender),) * 8 + (topics.device_state(sender), topics.upload(sender, upload.digest))
            )
        original = mutator.random.choice(valid)
        _, raw = mutator.message(original, mutator.random.choice(valid))
        try:
            message = decode(raw)
        except FedvitError:
            message = None
        if isinstance(message, Refused) and message.instance == known.instance:
            continue  # the device would obey
        hostile.send(topic, raw)
        part.add(str(msgspec.msgpack.decode(original[1:])[0]), accepted=message is not None)


def _count(part: Part, home: Path) -> None:
    store = open_record(home / "runs")
    try:
        for entry in store.devices.read_refusals(RUN):
            part.refusals[entry.kind] = part.refusals.get(entry.kind, 0) + 1
        rounds = store.rounds.read_all(RUN)
        part.refusals["rounds closed"] = sum(record.closed_at is not None for record in rounds)
        results = [
            result for result in store.tasks.read_results(RUN) if result.device == "healthy" and result.kind == "train"
        ]
        part.refusals["of them with the healthy device"] = len(results)
        if len(results) < len(rounds):
            part.finding(f"the healthy device is in {len(results)} of {len(rounds)} rounds")
    finally:
        store.close()
