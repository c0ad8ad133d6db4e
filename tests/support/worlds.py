"""Worlds to hold a contract in: a broker in memory, embedded amqtt, mosquitto; all behave alike."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.security.broker import Broker, start_broker
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received, Transport, Will, WillMaker
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.transport.mqtt import BOTH_VERSIONS, MqttTransport
from tests.support.other_brokers import start_nats, start_rabbitmq
from tests.support.waiting import WAIT_S, wait_until

T = TypeVar("T")

OTHER_PROCESS = """
import sys, time
from queue import SimpleQueue
from fedvit.transport.base import Will
from fedvit.transport.address import Address
from fedvit.transport.mqtt import MqttTransport
address, client_id, topic, payload = sys.argv[1:]
inbox = SimpleQueue()
MqttTransport(inbox, Address.parse(address), client_id).open(Will(topic, payload.encode()))
print(type(inbox.get()).__name__, flush=True)
time.sleep(600)
"""


class Client:
    """A transport and its inbox, with waits that end."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def event(self, kind: type[T]) -> T:
        """The next event of a kind; others are passed over."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                event = self.transport.inbox.get(timeout=deadline - time.monotonic())
            except Empty:
                break
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind.__name__} came within {WAIT_S:.0f} s")

    def messages(self, count: int) -> list[tuple[str, bytes]]:
        return [tuple(self.event(Received)) for _ in range(count)]

    def publish(self, topic: str, payload: bytes, **options: Any) -> None:
        assert self.transport.publish(topic, payload, **options)


class World(ABC):
    """A broker and the clients of one test; topics begin with `prefix`."""

    publishes_wills_at_take_over = True
    """Whether the broker publishes the will of a client whose id connects anew."""

    def __init__(self) -> None:
        self.prefix = ""
        self.clients: list[Transport] = []

    @abstractmethod
    def transport(self, client_id: str) -> Transport:
        """A transport that is not opened yet."""

    def client(self, client_id: str, *filters: tuple[str, int], will: Will | WillMaker | None = None) -> Client:
        """A connected client that receives `filters`."""
        client = Client(self.new_transport(client_id))
        for topic_filter, qos in filters:
            client.transport.subscribe(self.prefix + topic_filter, qos)
        client.transport.open(will)
        client.event(Connected)
        return client

    def new_transport(self, client_id: str) -> Transport:
        transport = self.transport(self.prefix.rstrip("/") + client_id)
        self.clients.append(transport)
        return transport

    def end_test(self) -> None:
        for transport in self.clients:
            transport.close()
        self.clients.clear()

    @abstractmethod
    def kill_broker(self) -> None: ...

    @abstractmethod
    def bring_broker_back(self) -> None: ...

    @abstractmethod
    def cut(self, transport: Transport) -> None:
        """The connection of a client is lost."""

    @abstractmethod
    def doomed(self, client_id: str, will: Will) -> Callable[[], None]:
        """A connected client; calling the answer makes it vanish without a farewell."""

    @abstractmethod
    def hung(self, client_id: str, will: Will) -> None:
        """A client whose link is up, but whose program has ended."""


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.broker = MemoryBroker()

    def transport(self, client_id: str) -> Transport:
        return MemoryTransport(SimpleQueue(), self.broker, client_id)

    def kill_broker(self) -> None:
        self.broker.stop()

    def bring_broker_back(self) -> None:
        self.broker.start()

    def cut(self, transport: Transport) -> None:
        assert isinstance(transport, MemoryTransport)
        transport.vanish()

    def doomed(self, client_id: str, will: Will) -> Callable[[], None]:
        transport = self.new_transport(client_id)
        assert isinstance(transport, MemoryTransport)
        transport.open(will)
        return transport.vanish

    def hung(self, client_id: str, will: Will) -> None:
        self.new_transport(client_id).open(will)

    def stop(self) -> None:
        pass


class MqttWorld(World):
    """A broker of one node or several; the clients of a test connect to one node after the other."""

    def __init__(self, *nodes: Broker, versions: Sequence[MQTTProtocolVersion] = BOTH_VERSIONS) -> None:
        super().__init__()
        self.nodes = nodes
        self.versions = versions
        self.after: Callable[[], None] = lambda: None  # is called when the nodes have stopped
        self._next_node = itertools.cycle(nodes)
        self._processes: list[subprocess.Popen[str]] = []

    def transport(self, client_id: str) -> Transport:
        return MqttTransport(SimpleQueue(), self.address(), client_id, versions=self.versions)

    def address(self) -> Address:
        """Where the next client connects."""
        return next(self._next_node).address

    def kill_broker(self) -> None:
        for node in self.nodes:
            os.kill(node.pid, signal.SIGKILL)
        wait_until(lambda: not any(node.alive() for node in self.nodes))

    def bring_broker_back(self) -> None:
        """The nodes of a cluster begin at the same time, as they may wait for each other."""
        with ThreadPoolExecutor() as pool:
            assert all(pool.map(Broker.tend, self.nodes))
        wait_until(lambda: [node.tend() for node in self.nodes] == [None] * len(self.nodes))

    def cut(self, transport: Transport) -> None:
        assert isinstance(transport, MqttTransport)
        assert transport.client is not None
        opened = transport.client.socket()
        assert isinstance(opened, socket.socket)
        opened.shutdown(socket.SHUT_RDWR)

    def doomed(self, client_id: str, will: Will) -> Callable[[], None]:
        return self._other_process(client_id, will).kill

    def hung(self, client_id: str, will: Will) -> None:
        self._other_process(client_id, will).send_signal(signal.SIGSTOP)

    def _other_process(self, client_id: str, will: Will) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", OTHER_PROCESS, str(self.address()), self.prefix.rstrip("/") + client_id]
        process = subprocess.Popen([*command, will.topic, will.payload.decode()], stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "Connected"
        return process

    def end_test(self) -> None:
        super().end_test()
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        self.after()


def make_world(kind: str, folder: Path) -> Any:
    """`memory`, or a broker: `mosquitto-3.1.1` has clients that do not try version 5, `nats-cluster` three nodes,
    `rabbitmq-cluster` two."""
    if kind == "memory":
        return MemoryWorld()
    broker, _, variant = kind.partition("-")
    if broker not in ("nats", "rabbitmq"):
        return MqttWorld(start_broker(broker, folder, port=0), versions=BOTH_VERSIONS[1:] if variant else BOTH_VERSIONS)
    if broker == "nats":
        world = MqttWorld(*start_nats(folder, 3 if variant else 1))
    else:
        nodes, after = start_rabbitmq(folder, 2 if variant else 1)
        world = MqttWorld(*nodes)
        world.after = after
    world.publishes_wills_at_take_over = False
    return world
