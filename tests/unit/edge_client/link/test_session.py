"""The joining of a device: hello, welcome, refusals, and their repetition."""

import time

import pytest

from edge_client.link import resending
from edge_client.link import session as session_module
from fedvit.errors import PeerRefused
from fedvit.wire.messages import BlobAck, Hello, Progress, Refused, Welcome, encode, leading_epoch
from tests.support.agents import FAR_OFF, PROFILE, World


def test_a_device_announces_itself(world: World) -> None:
    world.device(joined=False)
    hello = world.server.expect(Hello)
    assert hello == Hello(hello.instance, "9.9", PROFILE, ("0", "1", "2"), 20, 12, {}, 1)
    assert len(hello.instance) == 16


def test_every_epoch_of_the_coordinator_gets_one_hello(world: World) -> None:
    server = world.server
    world.device(joined=False)
    server.expect(Hello)  # nobody was there to hear it
    server.is_here(7)
    server.welcome()
    before = server.count(Hello)
    server.is_here(7)
    server.is_here(7, alive=False)
    server.is_here(8)
    server.welcome()
    server.is_here(8)
    server.is_here(9)
    server.welcome()
    assert server.count(Hello) == before + 2


def test_device_ignores_a_coordinator_that_no_longer_leads(world: World) -> None:
    """Neither its state nor its welcome; a coordinator without a term may follow it."""
    earlier, later = (leading_epoch(term, 1) for term in (1_700_000_000, 1_700_000_001))
    server = world.server
    world.device(joined=False)
    server.expect(Hello)  # nobody was there to hear it
    for epoch in (earlier, later):
        server.is_here(epoch)
        server.welcome()
    said = server.count(Hello)
    server.is_here(earlier)
    server.tell(Welcome(server.instance, earlier, "tests"))
    server.epoch = later
    server.mark()  # by a task of the later epoch
    assert server.count(Hello) == said
    server.is_here(7)
    server.welcome()


def test_hello_that_is_answered_is_not_said_again_for_the_new_epoch(world: World) -> None:
    """The coordinator heard the hello of a new connection before its own words about its epoch got to the device."""
    world.device(joined=False)
    server = world.server
    server.instance = server.expect(Hello).instance
    server.is_here(7, spread_s=600.0)
    server.tell(Welcome(server.instance, 7, "tests"))
    server.mark()
    assert server.count(Hello) == 1


def test_welcome_sets_the_time_over_which_the_fleet_returns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small fleet keeps the device's own time."""
    device, spread = world.device(), list[float]()
    monkeypatch.setattr(device.transport, "spread_return", spread.append)
    for spread_s in (1.0, 20.0):
        world.server.tell(Welcome(world.server.instance, world.server.epoch, "tests", spread_s=spread_s))
    world.server.wait(lambda: spread == [session_module.RETURN_SPREAD_S, 20.0])


def test_an_unanswered_hello_is_repeated_and_logged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device in a federation that nobody serves would otherwise be silent for ever."""
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    world.device(joined=False)
    instances = {world.server.expect(Hello).instance for _ in range(4)}
    assert len(instances) == 1
    [record] = [record for record in caplog.records if record.getMessage().startswith("no coordinator answers")]
    assert record.__dict__["federation"] == world.server.topics.federation


def test_a_final_refusal_ends_the_program(world: World) -> None:
    device = world.device(joined=False)
    hello = world.server.expect(Hello)
    world.server.tell(Refused("somebody else", "not meant for this one", final=True))
    world.server.tell(Refused(hello.instance, "its class folder 'cat' is unknown", final=True))
    ended = device.ended()
    assert isinstance(ended, PeerRefused)
    assert str(ended) == "the coordinator refused device 'pi': its class folder 'cat' is unknown"


def test_a_refusal_that_is_not_final_is_tried_again_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    monkeypatch.setattr(session_module, "SAME_ID_PATIENCE_S", 0.3)
    device, server = world.device(joined=False), world.server
    instance = server.expect(Hello).instance
    answered = 0

    def ended() -> bool:
        nonlocal answered
        while answered < server.count(Hello):
            answered += 1
            server.tell(Refused(instance, "the id is taken", final=False))
        return device.outcome is not None

    server.wait(ended)
    assert isinstance(device.outcome, PeerRefused)
    assert "the id is taken" in str(device.outcome)
    assert answered >= 2


def test_an_accepted_hello_ends_the_patience_with_refusals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SAME_ID_PATIENCE_S", 0.0)
    world.device(joined=False)
    world.server.tell(Refused(world.server.expect(Hello).instance, "the id is taken", final=False))
    world.server.roll_call()
    world.server.tell(Refused(world.server.instance, "the id is taken", final=False))
    world.server.roll_call()


def test_a_stray_message_of_another_wire_version_ends_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device says hello again, and is welcomed: so its coordinator still speaks its version."""
    monkeypatch.setattr(session_module, "OTHER_VERSION_PATIENCE_S", 1.0)
    device, server = world.device(), world.server
    before = server.count(Hello)
    server.transport.publish(server.topics.to_device("pi"), bytes([9]) + encode(BlobAck(FAR_OFF))[1:])
    server.wait(lambda: server.count(Hello) > before)
    server.welcome()
    server.roll_call()
    time.sleep(1.2)  # without the welcome the device would now end
    server.roll_call()
    assert device.outcome is None


def test_another_wire_version_is_named_with_both_versions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "OTHER_VERSION_PATIENCE_S", 0.2)
    device = world.device()
    world.server.transport.publish(world.server.topics.to_device("pi"), bytes([9]) + encode(BlobAck(FAR_OFF))[1:])
    ended = device.ended()
    assert isinstance(ended, PeerRefused)
    assert "wire version 9" in str(ended)
    assert "version 1" in str(ended)


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x01nonsense", encode(Progress("r", 1, "train", 1, 1))])
def test_what_cannot_be_read_is_dropped(world: World, raw: bytes) -> None:
    world.device()
    world.server.transport.publish(world.server.topics.to_device("pi"), raw)
    world.server.transport.publish(world.server.topics.broadcast(FAR_OFF), raw)
    world.server.roll_call()
