"""Worlds to hold a contract in: a broker in memory, embedded amqtt, mosquitto; all behave alike."""

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.broker import Broker, start_broker
from fedvit.transport.base import Connected, Received, Transport, Will, WillMaker
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.transport.mqtt import BOTH_VERSIONS, MqttTransport
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
    def __init__(self, broker: Broker, versions: Sequence[MQTTProtocolVersion] = BOTH_VERSIONS) -> None:
        super().__init__()
        self.broker = broker
        self.versions = versions
        self._processes: list[subprocess.Popen[str]] = []

    def transport(self, client_id: str) -> Transport:
        return MqttTransport(SimpleQueue(), self.broker.address, client_id, versions=self.versions)

    def kill_broker(self) -> None:
        os.kill(self.broker.pid, signal.SIGKILL)
        wait_until(lambda: not self.broker.alive())

    def bring_broker_back(self) -> None:
        assert self.broker.tend()

    def doomed(self, client_id: str, will: Will) -> Callable[[], None]:
        return self._other_process(client_id, will).kill

    def hung(self, client_id: str, will: Will) -> None:
        self._other_process(client_id, will).send_signal(signal.SIGSTOP)

    def _other_process(self, client_id: str, will: Will) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", OTHER_PROCESS, str(self.broker.address), self.prefix.rstrip("/") + client_id]
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
        self.broker.stop()


def make_world(kind: str, folder: Path) -> Any:
    """`memory`, or a broker's kind; `mosquitto-3.1.1` has clients that do not try version 5."""
    if kind == "memory":
        return MemoryWorld()
    broker, _, version = kind.partition("-")
    return MqttWorld(start_broker(broker, folder, port=0), BOTH_VERSIONS[1:] if version else BOTH_VERSIONS)
