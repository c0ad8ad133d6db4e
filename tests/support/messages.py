"""What devices say, made by hand."""

from typing import Any

import msgspec

from fedvit.resources import DeviceProfile, ResourceUse
from fedvit.wire.messages import Hello, Result


def hello(instance: str = "i1", *, host: str = "desk", **changed: Any) -> Hello:
    """Of a device with the classes ant and bee, 20 training images and 5 test images, but for what is `changed`."""
    profile = DeviceProfile(host=host, machine="made", cores=1, threads=1)
    announced = Hello(instance, "0.1", profile, ("ant", "bee"), train_samples=20, test_samples=5)
    return msgspec.structs.replace(announced, **changed)


def result(number: int = 1, **changed: Any) -> Result:
    """Of a training in round `number` of the run `run`; it has no upload, unless `changed` says otherwise."""
    trained = Result("run", number, "train", 5, {"loss": 1 / number}, ResourceUse())
    return msgspec.structs.replace(trained, **changed)
