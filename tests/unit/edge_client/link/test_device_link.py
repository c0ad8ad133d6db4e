"""The topics, the will and the blobs of a device."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fedvit.data.folder import DeviceData
from fedvit.errors import DataError
from fedvit.tensors import pack
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import BlobNack, DeviceState, Hello, Manifest, Result, Welcome, decode_class_list
from tests.support.agents import FAR_OFF, Setting, World, with_local_head
from tests.support.codes import has_code


def add_classes(world: World, digits: Path, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the device's folder has so many classes."""
    names = tuple(f"class-{number:06}" for number in range(classes))
    data = replace(DeviceData.open(digits), classes=names)
    monkeypatch.setattr(DeviceData, "open", lambda folder: data)


def test_class_folders_that_fit_into_no_hello_travel_as_a_blob(
    world: World, fedavg: Setting, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob is served again, to the next coordinator process, after a task has tidied up what no task names."""
    add_classes(world, digits, 8000, monkeypatch)
    world.device()
    server = world.server
    hello, *_ = [message for message in server.heard if isinstance(message, Hello)]
    assert hello.classes == ()
    for _ in range(2):
        raw = server.fetch_bytes(hello.class_list)
        assert decode_class_list(raw) == tuple(f"class-{number:06}" for number in range(8000))
        assert hello.class_list is not None
        server.blobs.path(hello.class_list.digest).unlink()
        world.failure(fedavg, groups={})


def test_class_folders_that_fit_into_no_blob_are_said_before_anything_is_connected(
    world: World, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_classes(world, digits, 100_000, monkeypatch)
    with pytest.raises(DataError, check=has_code("FV1406", "100000")):
        world.device(joined=False)


def test_welcome_tells_the_limits_of_the_broker(world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport keeps them from then on. An upload that waits comes in chunks that the broker takes."""
    device, server, learnt = world.device(), world.server, list[BrokerLimits]()
    monkeypatch.setattr(device.transport, "use_limits", learnt.append)
    before = world.result(fedavg).upload
    limits = BrokerLimits(65_536, publishes_per_s=40)
    server.tell(Welcome(server.instance, server.epoch, "tests", limits=limits))

    def smaller() -> Manifest | None:
        uploads = (message.upload for message in server.heard if isinstance(message, Result))
        return next((upload for upload in uploads if upload and upload.chunk == 65_472), None)

    server.wait(smaller)
    upload = smaller()
    assert learnt == [limits]
    assert before
    assert upload == msgspec.structs.replace(before, chunk=65_472)
    assert pack(server.fetch(upload)) == device.blobs.get(upload.digest)


def test_a_device_says_farewell_and_its_will_speaks_when_it_cannot(world: World) -> None:
    device = world.device()
    assert device.stop() == "stopped"
    assert world.server.expect(DeviceState) == DeviceState(world.server.instance, online=False, connection=1)
    again = world.device()
    again.transport.vanish()
    assert world.server.expect(DeviceState) == DeviceState(world.server.instance, online=False, connection=1)


def test_hello_and_last_will_name_their_connection(world: World) -> None:
    """So that a will which arrives after the hello of the next connection is known to be about the one before."""
    device, server = world.device(joined=False), world.server
    assert server.expect(Hello).connection == 1
    world.broker.stop()
    world.broker.start()
    assert server.expect(Hello).connection == 2
    device.transport.vanish()
    assert server.expect(DeviceState).connection == 2


def test_only_uploads_are_served(world: World, fedavg: Setting) -> None:
    """The device has the program and the group too; a peer gets none of them, before and after the upload."""
    world.device()
    result = world.result(fedavg, program=with_local_head(fedavg))
    task = world.task(fedavg, program=with_local_head(fedavg))
    assert result.upload is not None
    for digest in (task.program, task.groups["model"], FAR_OFF, "nonsense"):
        world.server.tell(BlobNack(digest, ((0, 1),)))
    world.server.fetch(result.upload)
    assert set(world.server.chunks) == {world.server.topics.upload("pi", result.upload.digest)}
    world.server.acknowledge(result)
    world.server.roll_call()
    world.server.chunks.clear()
    world.server.tell(BlobNack(result.upload.digest, ((0, 1),)))
    world.server.roll_call()
    assert world.server.chunks == []
