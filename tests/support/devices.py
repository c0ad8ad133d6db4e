"""Devices that train nothing: their messages, and how they speak them over the memory transport."""

from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from fedvit.resources import DeviceProfile, ResourceUse
from fedvit.transport.base import Received, Will
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import DeviceState, FromDevice, Hello, Result, decode, encode
from fedvit.wire.topics import Topics


def hello(instance: str = "i1", *, host: str = "desk", **changed: Any) -> Hello:
    """Of a device with the classes ant and bee, 20 training images and 5 test images, but for what is `changed`."""
    profile = DeviceProfile(host=host, machine="made", cores=1, threads=1)
    announced = Hello(instance, "0.1", profile, ("ant", "bee"), train_samples=20, test_samples=5)
    return msgspec.structs.replace(announced, **changed)


def result(number: int = 1, **changed: Any) -> Result:
    """Of a training in round `number` of the run `run`; it has no upload, unless `changed` says otherwise."""
    trained = Result("run", number, "train", 5, {"loss": 1 / number}, ResourceUse())
    return msgspec.structs.replace(trained, **changed)


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
