"""Devices that train nothing: they speak the messages of a device over the memory transport."""

from queue import Empty, SimpleQueue
from typing import Any

from fedvit.transport.base import Received, Will
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import DeviceState, FromDevice, Hello, decode, encode
from fedvit.wire.topics import Topics


def drained(inbox: "SimpleQueue[object]") -> list[object]:
    """Every event that has come so far."""
    events = []
    while True:
        try:
            events.append(inbox.get_nowait())
        except Empty:
            return events


class SpeakingDevice:
    """A device at the broker: it receives the coordinator's state and messages to it, and it has a last will."""

    def __init__(self, broker: MemoryBroker, name: str, hello: Hello) -> None:
        self.name = name
        self.hello = hello
        self.topics = Topics("home")
        self.transport = MemoryTransport(SimpleQueue(), broker, f"{name}-{hello.instance}")
        self.transport.subscribe(self.topics.coordinator_state, 1)
        self.transport.subscribe(self.topics.to_device(name), 1)

    @property
    def instance(self) -> str:
        return self.hello.instance

    def connect(self) -> None:
        will = encode(DeviceState(self.hello.instance, online=False))
        self.transport.open(Will(self.topics.device_state(self.name), will))

    def say(self, message: FromDevice) -> None:
        self.say_raw(encode(message))

    def say_raw(self, raw: bytes) -> None:
        self.transport.publish(self.topics.from_device(self.name), raw)

    def messages(self) -> list[Any]:
        """The messages to it since the last call."""
        return [decode(event.payload) for event in drained(self.transport.inbox) if isinstance(event, Received)]
