"""The device's loop over the memory transport; the test is the coordinator and says every word itself."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_client.health.guard import Guard
from edge_client.link import resending
from edge_client.link import session as session_module
from edge_client.settings import OwnerPolicy
from edge_client.work import task_executor as task_executor_module
from edge_client.work.runtime import Seeds
from fedvit.blobs import digest_of
from fedvit.data.folder import DeviceData
from fedvit.errors import DataError, PeerRefused
from fedvit.program import Program, Role, TensorGroup
from fedvit.resources import Budget, ResourceUse
from fedvit.tensors import Tensors, delta, pack
from fedvit.wire import messages
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    Cancel,
    Declined,
    DeviceState,
    Extended,
    Failed,
    FromCoordinator,
    Hello,
    Manifest,
    Progress,
    Refused,
    Result,
    ResultAck,
    RunEnded,
    Welcome,
    decode_class_list,
    encode,
    leading_epoch,
)
from tests.support.agents import (
    FAR_OFF,
    PROFILE,
    SILENT,
    Device,
    Setting,
    World,
    trained_here,
    with_kept,
    with_local_head,
)


def with_generated_model(setting: Setting) -> Program:
    """FedAvg's graphs with a model that the server makes for each device."""
    return msgspec.structs.replace(setting.program, groups={"model": TensorGroup(Role.GENERATED)})


def always(setting: Setting, answer: int) -> Tensors:
    """The model with a head that gives one answer to everything."""
    head = {"head.weight": np.zeros((3, 32), np.float32), "head.bias": np.eye(3, dtype=np.float32)[answer]}
    return setting.start() | head


def with_epochs(program: Program, epochs: int) -> Program:
    [phase] = program.train
    return msgspec.structs.replace(program, train=(msgspec.structs.replace(phase, epochs=epochs),))


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


# --- joining ------------------------------------------------------------------------------------------


def test_a_device_announces_itself(world: World) -> None:
    world.device(joined=False)
    hello = world.server.expect(Hello)
    assert hello == Hello(hello.instance, "9.9", PROFILE, ("0", "1", "2"), 20, 12, {}, 1)
    assert len(hello.instance) == 16


def crowded(world: World, digits: Path, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the device's folder has so many classes."""
    names = tuple(f"class-{number:06}" for number in range(classes))
    data = replace(DeviceData.open(digits), classes=names)
    monkeypatch.setattr(DeviceData, "open", lambda folder: data)


def test_class_folders_that_fit_into_no_hello_travel_as_a_blob(
    world: World, fedavg: Setting, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served again, to the next process of the coordinator, after a task has tidied up what no task names."""
    crowded(world, digits, 8000, monkeypatch)
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
    crowded(world, digits, 100_000, monkeypatch)
    with pytest.raises(DataError, match=r"^100000 class folders cannot be announced: .* at most 1048576 may be"):
        world.device(joined=False)


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


def test_hello_that_is_answered_is_not_said_again_for_the_new_epoch(
    world: World,
) -> None:
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


def test_an_unanswered_hello_is_said_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    world.device(joined=False)
    instances = {world.server.expect(Hello).instance for _ in range(3)}
    assert len(instances) == 1


def test_an_unanswered_hello_is_said_to_be_so_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device in a federation that nobody serves would otherwise be silent for ever."""
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    world.device(joined=False)
    for _ in range(4):
        world.server.expect(Hello)
    [record] = [record for record in caplog.records if record.getMessage().startswith("no coordinator answers")]
    assert record.__dict__["federation"] == world.server.topics.federation


def test_a_hello_for_a_coordinator_that_has_just_come_is_not_said_to_be_unanswered(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resending, "AGAIN_S", 600.0)
    world.device(joined=False)
    world.server.expect(Hello)
    world.server.is_here(7)
    world.server.expect(Hello)
    assert [record.getMessage() for record in caplog.records if "answers" in record.getMessage()] == []


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


# --- a task from end to end ---------------------------------------------------------------------------


def test_training_sends_the_delta_of_what_is_shared(world: World, fedavg: Setting, digits: Path) -> None:
    """delta = after - start, and after is what the same graphs give without an agent, bit by bit."""
    device = world.device()
    result = world.result(fedavg)
    assert (result.run, result.round, result.kind, result.samples) == ("run", 1, "train", 20)
    assert set(result.metrics) == {"loss"}
    assert (result.use.steps, result.use.flops) == (6, 6 * fedavg.program.graphs["train"].flops)
    start = fedavg.start()
    upload = world.server.fetch(result.upload)
    assert_same_bits(upload, delta(trained_here(fedavg, fedavg.program, start, digits), start))
    assert device.vault.pending() == [result]
    world.server.acknowledge(result)
    world.server.roll_call()
    assert device.vault.pending() == []
    progress = [message for message in world.server.heard if isinstance(message, Progress)]
    assert (progress[-1].round, progress[-1].kind, progress[-1].done_steps, progress[-1].total_steps) == (
        1,
        "train",
        6,
        6,
    )


def test_evaluation_answers_with_counts_and_nothing_else(world: World, fedavg: Setting, digits: Path) -> None:
    device = world.device()
    result = world.result(fedavg, kind="evaluate")
    evaluated = fedavg.runtime().evaluate(
        fedavg.program, fedavg.start(), DeviceData.open(digits), Seeds(5, 1, "pi"), SILENT
    )
    assert (result.kind, result.samples, result.metrics) == ("evaluate", 12, {"correct": float(evaluated.correct)})
    assert result.by_class == evaluated.by_class
    assert sum(count.correct for count in result.by_class) == evaluated.correct
    assert sum(count.images for count in result.by_class) == 12
    assert [sum(images for _, images in count.wrong) for count in result.by_class] == [
        count.images - count.correct for count in result.by_class
    ]
    assert result.upload is None
    assert device.vault.pending() == []


def test_evaluation_has_no_counts_by_class_where_the_owner_wants_none(world: World, fedavg: Setting) -> None:
    world.device(policy=OwnerPolicy(counts_classes=False))
    assert world.result(fedavg, kind="evaluate").by_class == ()


def test_evaluation_has_no_counts_by_class_where_the_program_keeps_them(world: World, fedavg: Setting) -> None:
    """EFTViT's promise: the class distribution stays on the device, whatever its owner allows."""
    world.device()
    evaluate = msgspec.structs.replace(fedavg.program.evaluate, counts_classes=False)
    program = msgspec.structs.replace(fedavg.program, evaluate=evaluate)
    result = world.result(fedavg, kind="evaluate", program=program)
    assert result.by_class == ()
    assert result.samples == 12


def test_local_tensors_stay_in_the_vault_and_are_the_next_rounds_start(
    world: World, fedavg: Setting, digits: Path
) -> None:
    """The head is local: round 1 starts from its initial value, round 2 from the vault, whatever the server has."""
    program = with_local_head(fedavg)
    device = world.device()
    start = fedavg.start()
    for number in (1, 2):
        result = world.result(fedavg, program=program, round=number)
        after = trained_here(fedavg, program, start, digits, number)
        upload = world.server.fetch(result.upload)
        assert set(upload) == set(program.names("model")) == set(start) - {"head.weight", "head.bias"}
        assert_same_bits(upload, delta(after, {name: start[name] for name in upload}))
        kept = device.vault.local("run")
        assert kept is not None
        assert_same_bits(kept, {name: after[name] for name in ("head.weight", "head.bias")})
        start |= kept
        world.server.acknowledge(result)


def test_evaluation_uses_the_local_tensors_of_the_vault(world: World, fedavg: Setting) -> None:
    """A head in the vault that always answers "2" is right on the 4 twos of 12 test images."""
    program = with_local_head(fedavg)
    device = world.device()
    head: Tensors = {"head.weight": np.zeros((3, 32), np.float32), "head.bias": np.array([0, 0, 9], np.float32)}
    device.vault.commit(Result("run", 1, "train", 20, {}, ResourceUse()), head)
    assert world.result(fedavg, program=program, kind="evaluate").metrics == {"correct": 4.0}


def test_an_upload_of_features_holds_no_tensor_of_the_model(world: World, eftvit: Setting, digits: Path) -> None:
    device = world.device()
    upload = world.server.fetch(world.result(eftvit).upload)
    after = trained_here(eftvit, eftvit.program, eftvit.start(), digits)
    assert_same_bits(upload, {name: after[name] for name in ("features.1", "labels")})
    local = device.vault.local("run")
    assert local is not None
    assert_same_bits(local, {name: after[name] for name in eftvit.program.names("local")})


def test_a_seeded_head_comes_from_the_server_each_round(world: World, eftvit: Setting, digits: Path) -> None:
    """Round 2 brings another head: the device starts from it, not from what it trained in round 1."""
    device = world.device()
    world.server.acknowledge(world.result(eftvit))
    start = eftvit.start()
    start["head.bias"] = np.array([1, -1, 0.5], np.float32)
    world.server.roll_call()
    kept = device.vault.local("run")
    assert kept is not None
    head = {name: start[name] for name in eftvit.program.names("head")}
    upload = world.server.fetch(world.result(eftvit, round=2, group_values={"head": head}).upload)
    after = trained_here(eftvit, eftvit.program, start | kept, digits, 2)
    assert_same_bits(upload, {name: after[name] for name in ("features.1", "labels")})


# A head that always says class c is right on c + 1 of six test images; a rate of next to nothing leaves it so.
STILL = 1e-30


def correct(world: World, setting: Setting, program: Program, answer: int, round: int) -> float:
    """Right answers in an evaluation to which the server brings a model that always gives this one."""
    outputs = {"model": always(setting, answer)}
    result = world.result(setting, program=program, kind="evaluate", round=round, group_values=outputs)
    world.server.acknowledge(result)
    return result.metrics["correct"]


def test_without_a_word_of_what_is_kept_the_newest_is_tested(
    world: World, fedavg: Setting, uneven_digits: Path
) -> None:
    device = world.device(digits=uneven_digits)
    world.result(fedavg, group_values={"model": always(fedavg, 0)}, lr_scale=STILL)
    assert correct(world, fedavg, fedavg.program, 2, round=1) == 3
    assert device.vault.local("run") == {}


def test_kept_groups_are_tested_as_the_device_last_trained_them(
    world: World, fedavg: Setting, uneven_digits: Path
) -> None:
    """In round 1 what it trained always says 0, in round 3 it says 1; the server's newest says 2, which is tested only
    as long as the device has trained nothing."""
    program = with_kept(fedavg)
    world.device(digits=uneven_digits)
    assert correct(world, fedavg, program, 2, round=1) == 3
    world.server.acknowledge(
        world.result(fedavg, program=program, group_values={"model": always(fedavg, 0)}, lr_scale=STILL)
    )
    assert [correct(world, fedavg, program, 2, round=number) for number in (1, 2)] == [1, 1]
    three = {"model": always(fedavg, 1)}
    world.server.acknowledge(world.result(fedavg, program=program, round=3, group_values=three, lr_scale=STILL))
    assert correct(world, fedavg, program, 2, round=3) == 2


def test_what_is_kept_for_a_round_is_tested_in_that_round_alone(
    world: World, fedavg: Setting, uneven_digits: Path
) -> None:
    """Before averaging: who was in the cohort of round 1 tests its own then; in round 2, whose cohort it is not in, the
    newest."""
    program = with_kept(fedavg, of_this_round=True)
    world.device(digits=uneven_digits)
    world.server.acknowledge(
        world.result(fedavg, program=program, group_values={"model": always(fedavg, 0)}, lr_scale=STILL)
    )
    assert [correct(world, fedavg, program, 2, round=number) for number in (1, 2)] == [1, 3]


def test_training_begins_with_the_newest_and_not_with_what_is_kept(world: World, fedavg: Setting, digits: Path) -> None:
    """What is kept is for evaluations: round 2 starts from what the server brings, and replaces what is kept."""
    program = with_kept(fedavg)
    device = world.device()
    start = fedavg.start()
    for number in (1, 2):
        result = world.result(fedavg, program=program, round=number)
        after = trained_here(fedavg, program, start, digits, number)
        assert_same_bits(world.server.fetch(result.upload), delta(after, start))
        kept = device.vault.local("run")
        assert kept is not None
        assert_same_bits(kept, after)
        world.server.acknowledge(result)


def test_the_vault_holds_kept_groups_beside_local_ones(world: World, eftvit: Setting, digits: Path) -> None:
    """EFTViT's head is seeded and would be gone after the round. What is kept and did not move stays as it came."""
    program = eftvit.program
    evaluate = msgspec.structs.replace(program.evaluate, kept=("head", "norm"))
    program = msgspec.structs.replace(program, evaluate=evaluate)
    device = world.device()
    world.result(eftvit, program=program)
    start = eftvit.start()
    after = start | trained_here(eftvit, program, start, digits)
    kept = device.vault.local("run")
    assert kept is not None
    names = [name for group in ("local", "head", "norm") for name in program.names(group)]
    assert_same_bits(kept, {name: after[name] for name in names})
    assert kept["norm.weight"].tobytes() == start["norm.weight"].tobytes()


def test_generated_groups_come_from_the_task_each_round(world: World, fedavg: Setting, digits: Path) -> None:
    """In training and in evaluation; the device sends back how far it moved them, and keeps nothing."""
    program = with_generated_model(fedavg)
    device = world.device()
    for number, answer in ((1, 0), (2, 1)):
        made = always(fedavg, answer)
        result = world.result(fedavg, program=program, round=number, group_values={"model": made})
        after = trained_here(fedavg, program, made, digits, number)
        assert_same_bits(world.server.fetch(result.upload), delta(after, made))
        assert device.vault.local("run") == {}
        world.server.acknowledge(result)
    assert world.failure(fedavg, program=program, round=3, groups={}) == (
        "group 'model' of round 3: the task does not name it"
    )


def test_an_evaluation_tests_what_was_generated_for_it(world: World, fedavg: Setting, uneven_digits: Path) -> None:
    world.device(digits=uneven_digits)
    program = with_generated_model(fedavg)
    assert [correct(world, fedavg, program, answer, round=1 + answer) for answer in (0, 1, 2)] == [1, 2, 3]


def test_a_group_that_becomes_local_on_the_way_begins_with_its_first_value(
    world: World, fedavg: Setting, digits: Path
) -> None:
    """Roles may change from round to round: the head is shared in round 1, and local from round 2 on."""
    device = world.device()
    world.server.acknowledge(world.result(fedavg))
    program = with_local_head(fedavg)
    start = fedavg.start()
    result = world.result(fedavg, program=program, round=2)
    after = trained_here(fedavg, program, start, digits, 2)
    assert_same_bits(
        world.server.fetch(result.upload), delta(after, {name: start[name] for name in program.names("model")})
    )
    kept = device.vault.local("run")
    assert kept is not None
    assert_same_bits(kept, {name: after[name] for name in program.names("head")})


def test_what_is_here_already_is_not_fetched_again(world: World, fedavg: Setting) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg))
    before = len(world.server.heard)
    world.result(fedavg, round=2)
    assert "BlobNack" not in world.server.since(before)


def test_small_blobs_come_and_go_inside_messages(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task brings along is not asked for; an upload that fits goes with its result, and is the one it names.

    The model of these tests has 134 kB, so messages may be larger than usual.
    """
    for limit in ("MAX_MESSAGE_BYTES", "INLINE_BYTES"):
        monkeypatch.setattr(messages, limit, 500_000)
    world.device()
    task = world.task(fedavg)
    inline = tuple(world.server.blobs.get(digest) for digest in task.groups.values())
    world.server.tell(msgspec.structs.replace(task, inline=inline))
    result = world.server.expect(Result)
    wanted = {message.digest for message in world.server.heard if isinstance(message, BlobNack)}
    assert wanted.isdisjoint(task.groups.values())
    assert task.program in wanted
    assert result.upload is not None
    assert digest_of(result.inline) == result.upload.digest


def test_upload_inside_a_message_is_not_repeated_with_it(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is slow to answer has it, and one that has lost the message fetches it. A coordinator that
    welcomes the device gets it again."""
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    for limit in ("MAX_MESSAGE_BYTES", "INLINE_BYTES"):
        monkeypatch.setattr(messages, limit, 500_000)
    world.device()
    first = world.result(fedavg)
    assert first.inline
    assert world.server.expect(Result) == msgspec.structs.replace(first, inline=b"")
    world.server.tell(Welcome(world.server.instance, world.server.epoch, "tests"))
    world.server.wait(lambda: world.server.heard.count(first) == 2)


def test_what_a_task_brings_must_be_what_it_describes(world: World, fedavg: Setting) -> None:
    world.device()
    assert "the task contains 8 bytes that it does not describe" in world.failure(fedavg, inline=(b"stranger",))


# --- which tasks are taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"epoch": 99}, {"instance": "an earlier process"}])
def test_a_task_for_another_process_or_epoch_is_ignored(world: World, fedavg: Setting, changed: dict[str, Any]) -> None:
    """A task that is taken is answered at once, by what the device wants."""
    world.device()
    before = len(world.server.heard)
    world.give(fedavg, **changed)
    world.server.mark()
    assert world.server.since(before) == []
    assert world.result(fedavg).round == 1


def test_the_same_task_again_starts_nothing_twice(world: World, fedavg: Setting) -> None:
    device = world.device()
    task = world.task(fedavg, program=with_epochs(fedavg.program, 40))
    for _ in range(3):
        world.server.tell(task)
    result = world.server.expect(Result)
    world.server.acknowledge(result)
    world.server.roll_call()
    assert (result.use.steps, world.server.count(Result)) == (120, 1)
    assert device.vault.round_of("run") == 1


def test_a_new_task_supersedes_the_running_one(world: World, fedavg: Setting) -> None:
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 1_000_000))
    assert world.server.expect(Progress).total_steps == 3_000_000
    result = world.result(fedavg, round=2)
    assert (result.round, result.use.steps) == (2, 6)
    assert device.vault.pending() == [result]
    world.server.acknowledge(result)
    world.server.roll_call()
    assert (world.server.count(Result), world.server.count(Failed)) == (1, 0)


def test_a_task_ends_at_its_deadline(world: World, fedavg: Setting) -> None:
    device = world.device()
    reason = world.failure(fedavg, program=with_epochs(fedavg.program, 1_000_000), deadline_s=0.4)
    assert "deadline" in reason
    assert device.vault.local("run") is None
    assert world.result(fedavg, round=2).round == 2


def test_the_end_of_a_run_stops_its_task(world: World, fedavg: Setting) -> None:
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 1_000_000))
    world.server.expect(Progress)
    world.server.tell(RunEnded("run", "failed: tests"))
    assert world.result(fedavg, run="next").run == "next"
    assert device.vault.local("run") is None


def test_the_end_of_another_run_does_not(world: World, fedavg: Setting) -> None:
    world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100))
    world.server.expect(Progress)
    world.server.tell(RunEnded("yesterday", "finished"))
    assert world.server.expect(Result).use.steps == 300


def test_once_leaves_when_the_run_has_ended(world: World, fedavg: Setting) -> None:
    device = world.device(once=True)
    world.server.acknowledge(world.result(fedavg))
    world.server.tell(RunEnded("run", "finished"))
    assert device.ended() == "run run finished"


# --- results stay until they are acknowledged ---------------------------------------------------------


@pytest.fixture
def repeating(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not answered is said again at once."""
    monkeypatch.setattr(resending, "AGAIN_S", 0.0)
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.0)


ANSWERS_TO_A_REFUSAL: dict[str, Callable[[Failed | Declined], FromCoordinator]] = {
    "acknowledged": lambda said: ResultAck(said.run, said.round, said.kind, accepted=False),
    "cancelled": lambda said: Cancel(said.run, said.round, said.kind, "the round is over"),
    "run ended": lambda said: RunEnded(said.run, "failed"),
}


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("answer", ANSWERS_TO_A_REFUSAL.values(), ids=ANSWERS_TO_A_REFUSAL)
@pytest.mark.parametrize("kind", [Failed, Declined])
def test_failures_and_refusals_are_repeated_until_they_are_answered(
    world: World,
    fedavg: Setting,
    tmp_path: Path,
    kind: type[Failed | Declined],
    answer: Callable[[Failed | Declined], FromCoordinator],
) -> None:
    busy, server = tmp_path / "busy", world.server
    world.device(policy=OwnerPolicy(busy_file=busy))
    if kind is Declined:
        busy.touch()
    world.give(fedavg, groups={}, task="what nobody can do")
    said = server.expect(kind)
    assert [server.expect(kind) for _ in range(3)] == [said] * 3
    server.tell(ResultAck("other", said.round, said.kind, accepted=False))  # about another run
    assert [server.expect(kind) for _ in range(3)] == [said] * 3
    busy.unlink(missing_ok=True)
    server.tell(answer(said))
    server.is_here(server.epoch + 1)
    server.expect(Hello)  # by now the device knows the answer
    before = server.count(kind)
    server.tell(Welcome(server.instance, server.epoch, "tests"))  # with which all that is pending is said again
    server.mark()
    assert server.count(kind) == before


@pytest.mark.usefixtures("repeating")
def test_failure_that_was_lost_with_the_link_is_said_after_the_next_welcome(world: World, fedavg: Setting) -> None:
    device, server = world.device(), world.server
    world.give(fedavg, program=with_epochs(fedavg.program, 500_000), deadline_s=600.0)
    server.expect(Progress)
    world.broker.stop()
    assert device.agent.current.execution is not None
    device.agent.current.execution.expires_at = 0.0  # the deadline passes while nobody can be told
    server.wait(lambda: device.agent.current.execution is None)
    world.broker.start()
    server.is_here(server.epoch + 1)
    server.welcome()
    assert "not done within the deadline" in server.expect(Failed).reason


def test_task_that_was_given_again_is_left_when_its_failure_is_acknowledged(world: World, fedavg: Setting) -> None:
    """The coordinator heard of the failure after all; to go on would only cost energy."""
    device, server = world.device(), world.server
    world.give(fedavg, groups={})
    failed = server.expect(Failed)
    world.give(fedavg, program=with_epochs(fedavg.program, 500_000))
    server.expect(Progress)
    server.tell(ResultAck(failed.run, failed.round, failed.kind, accepted=False))
    server.wait(lambda: device.agent.current.execution is None)


def test_a_result_is_sent_until_it_is_acknowledged(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.1)
    device = world.device()
    first = world.result(fedavg)
    assert [world.server.expect(Result) for _ in range(3)] == [first] * 3
    world.server.acknowledge(first)
    world.server.wait(lambda: device.vault.pending() == [])
    world.server.roll_call()
    said = world.server.count(Result)
    time.sleep(0.5)  # five times the longest wait
    world.server.roll_call()
    assert world.server.count(Result) == said


def test_a_result_survives_the_device(world: World, fedavg: Setting) -> None:
    """Started again from the same state, it sends the same bytes, and trains nothing: the vault's folder stays."""
    first = world.device()
    result = world.result(fedavg)
    upload = first.blobs.get(result.upload.digest)  # type: ignore[union-attr]
    first.stop()
    committed = sorted(first.vault.folder.rglob("*"))
    again = world.device()
    assert again.agent.link.instance != first.agent.link.instance
    assert world.server.expect(Result) == result
    before = len(world.server.heard)
    assert world.result(fedavg) == result
    assert "Progress" not in world.server.since(before)
    assert sorted(again.vault.folder.rglob("*")) == committed
    assert pack(world.server.fetch(result.upload)) == upload
    world.server.acknowledge(result)
    world.server.wait(lambda: again.vault.pending() == [])


def test_progress_is_said_as_often_as_the_task_asks(world: World, fedavg: Setting) -> None:
    """At the first step, at the last, and in between only where the interval has passed: here it never has."""
    world.device()
    result = world.result(fedavg, program=with_epochs(fedavg.program, 150), progress_s=3600.0)
    said = [
        (message.done_steps, message.total_steps) for message in world.server.heard if isinstance(message, Progress)
    ]
    assert said == [(1, result.use.steps), (result.use.steps, result.use.steps)]


def test_progress_is_in_the_log_of_the_device(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_executor_module, "LOG_EVERY_S", 0.0)
    caplog.set_level("INFO")
    world.device()
    result = world.result(fedavg, program=with_epochs(fedavg.program, 3))
    said = [record.__dict__["steps"] for record in caplog.records if record.getMessage() == "task in progress"]
    assert said == [f"{step}/{result.use.steps}" for step in range(1, int(result.use.steps) + 1)]


def test_what_a_device_says_of_a_task_names_the_task(world: World, fedavg: Setting, tmp_path: Path) -> None:
    """A result does, and names its Program, also when another process of the device sends it again."""
    first, server = world.device(), world.server
    task = world.task(fedavg, task="digest of what is asked")
    server.tell(task)
    assert server.expect(Progress).task == task.task
    result = server.expect(Result)
    assert (result.task, result.program) == (task.task, task.program)
    first.stop()
    busy = tmp_path / "busy"
    world.device(policy=OwnerPolicy(busy_file=busy))
    assert server.expect(Result) == result
    busy.touch()
    server.tell(world.task(fedavg, round=2, task="another"))
    assert server.expect(Declined).task == "another"


def test_a_failure_names_its_task(world: World, fedavg: Setting) -> None:
    world.device()
    world.give(fedavg, groups={}, task="nothing is brought")
    assert world.server.expect(Failed).task == "nothing is brought"


def test_a_result_of_a_run_that_is_not_known_now_is_kept_and_sent_in_the_next_epoch(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, server = world.device(), world.server
    monkeypatch.setattr(resending, "AGAIN_S", 0.0)  # of results from now on
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.0)
    result = world.result(fedavg)
    assert server.expect(Result) == result, "it is repeated until it is answered"
    server.tell(ResultAck(result.run, result.round, result.kind, False, "run 'other' is served here", keep=True))
    server.mark()
    said = server.count(Result)
    server.tell(Welcome(server.instance, server.epoch, "tests"))  # the same epoch: nothing is new
    for _ in range(5):
        server.mark()
    assert server.count(Result) == said
    assert device.vault.pending() == [result]
    server.is_here(server.epoch + 1)
    server.welcome()
    server.wait(lambda: server.count(Result) > said)
    server.acknowledge(result)
    server.wait(lambda: device.vault.pending() == [])


def test_a_result_survives_other_tasks(world: World, fedavg: Setting) -> None:
    """Blobs that no task names are deleted, but not an upload that nobody has fetched."""
    world.device()
    result = world.result(fedavg)
    assert world.result(fedavg, run="other", kind="evaluate").run == "other"
    world.server.mark()
    assert set(world.server.fetch(result.upload)) == set(fedavg.program.tensors)


def test_a_result_whose_upload_is_gone_is_lost_and_the_device_is_not(world: World, fedavg: Setting) -> None:
    """Found by fuzzing: a newer task had tidied up. Such a device ended, and ended again at each start."""
    first = world.device()
    result = world.result(fedavg)
    first.stop()
    first.blobs.path(result.upload.digest).unlink()  # type: ignore[union-attr]
    again = world.device()
    lost = world.server.expect(Failed)
    assert (lost.run, lost.round, lost.kind) == (result.run, result.round, "train")
    assert "is not in" in lost.reason
    world.server.wait(lambda: again.vault.pending() == [])
    assert world.result(fedavg, run="other", kind="evaluate").run == "other"


def test_a_result_survives_the_link(world: World, fedavg: Setting) -> None:
    world.device()
    result = world.result(fedavg)
    world.broker.stop()
    world.broker.start()
    world.server.is_here(world.server.epoch + 1)
    world.server.welcome()
    assert world.server.expect(Result) == result


def test_a_refused_result_is_settled(world: World, fedavg: Setting) -> None:
    """Its personal tensors stay: they are as good as before."""
    device = world.device()
    result = world.result(fedavg, program=with_local_head(fedavg))
    world.server.acknowledge(result, accepted=False)
    world.server.roll_call()
    assert device.vault.pending() == []
    assert device.vault.local("run") is not None
    world.server.roll_call()
    assert world.server.count(Result) == 1


def test_an_acknowledgement_of_something_else_settles_nothing(world: World, fedavg: Setting) -> None:
    device = world.device()
    result = world.result(fedavg)
    for wrong in (
        msgspec.structs.replace(result, round=2),
        msgspec.structs.replace(result, run="other"),
        msgspec.structs.replace(result, kind="evaluate"),
    ):
        world.server.acknowledge(wrong)
    world.server.roll_call()
    assert world.server.expect(Result) == result
    assert device.vault.pending() == [result]


def test_once_leaves_with_a_result_of_another_run(world: World, fedavg: Setting) -> None:
    """That run may have been interrupted, and nobody is there to acknowledge; the vault keeps the result for it."""
    device = world.device(once=True)
    result = world.result(fedavg, run="other")
    world.server.tell(RunEnded("run", "finished"))
    assert device.ended() == "run run finished"
    assert device.vault.pending() == [result]


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


# --- what cannot be done is said, and nothing of it is kept -------------------------------------------


def test_a_program_of_another_version_is_named(world: World, fedavg: Setting) -> None:
    world.device()
    newer = msgspec.structs.replace(fedavg.program, v=5)
    assert world.failure(fedavg, program=newer) == "program version 5, this software knows versions 1, 2, 3, 4"
    assert world.result(fedavg, round=2).round == 2


def test_a_program_that_is_none_is_named(world: World, fedavg: Setting) -> None:
    world.device()
    task, nonsense = world.task(fedavg), world.server.keep(b"\x81\xa1v\x01")  # {"v": 1}
    world.server.tell(msgspec.structs.replace(task, program=nonsense.digest, blobs=(nonsense, *task.blobs)))
    assert world.server.expect(Failed).reason.startswith("not a program: ")


def damaged(start: Tensors, how: str) -> Tensors:
    """The model's tensors, one of them not as it should be."""
    changed = dict(start)
    match how:
        case "shape":
            changed["head.weight"] = changed["head.weight"].T.copy()
        case "nan":
            changed["head.weight"] = np.full_like(changed["head.weight"], np.nan)
        case "dtype":
            changed["head.weight"] = changed["head.weight"].astype(np.float64)
        case "missing":
            del changed["head.weight"]
        case "extra":
            changed["head.extra"] = changed["head.weight"]
    return changed


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("shape", r"'head\.weight' has shape \(32, 3\), expected \(3, 32\)"),
        ("nan", r"'head\.weight' holds 96 values that are NaN"),
        ("dtype", r"'head\.weight' has dtype float64, expected float32"),
        ("missing", r"1 tensors are missing, the first is 'head\.weight'"),
        ("extra", r"1 tensors were not asked for, the first is 'head\.extra'"),
    ],
)
def test_a_group_that_is_not_as_the_program_says_is_named(world: World, fedavg: Setting, how: str, reason: str) -> None:
    device = world.device()
    values = damaged(fedavg.start(), how)
    failed = world.failure(fedavg, group_values={"model": values})
    assert re.search(reason, failed), failed
    assert failed.startswith("group 'model' of round 1: ")
    assert device.vault.round_of("run") == 0
    assert world.result(fedavg, round=2).round == 2


def test_a_group_that_is_no_tensors_at_all_is_named(world: World, fedavg: Setting) -> None:
    world.device()
    nonsense = world.server.keep(b"no tensors")
    task = world.task(fedavg)
    world.server.tell(msgspec.structs.replace(task, groups={"model": nonsense.digest}, blobs=(nonsense, *task.blobs)))
    assert "10 bytes are not safetensors" in world.server.expect(Failed).reason


def test_a_group_that_is_not_brought_is_named(world: World, fedavg: Setting) -> None:
    world.device()
    assert world.failure(fedavg, groups={}) == "group 'model' of round 1: the task does not name it"


@pytest.mark.parametrize("digest", [FAR_OFF, "nonsense", "blake3:../../../etc/passwd"])
def test_a_blob_that_the_task_does_not_describe_is_named(world: World, fedavg: Setting, digest: str) -> None:
    world.device()
    assert digest in world.failure(fedavg, program=None, groups={"model": digest})
    assert world.result(fedavg, round=2).round == 2


def test_a_description_that_is_no_digest_is_named(world: World, fedavg: Setting) -> None:
    world.device()
    task = world.task(fedavg)
    bad = Manifest("blake3:../../../etc/passwd", 10, 1024)
    world.server.tell(msgspec.structs.replace(task, groups={"model": bad.digest}, blobs=(bad, *task.blobs)))
    assert bad.digest in world.server.expect(Failed).reason
    assert world.result(fedavg, round=2).round == 2


def test_a_damaged_graph_is_named(world: World, fedavg: Setting) -> None:
    device = world.device()
    nonsense = world.server.keep(b"no graph")
    graphs = {
        **fedavg.program.graphs,
        "train": msgspec.structs.replace(fedavg.program.graphs["train"], digest=nonsense.digest),
    }
    reason = world.failure(fedavg, program=msgspec.structs.replace(fedavg.program, graphs=graphs))
    assert f"graph {nonsense.digest} cannot be loaded" in reason
    assert device.vault.round_of("run") == 0


def test_images_of_a_class_that_the_run_does_not_know_are_named(world: World, fedavg: Setting) -> None:
    world.device()
    other = msgspec.structs.replace(fedavg.program, classes=("0", "1", "seven"))
    assert "class folders that the run does not know: 2" in world.failure(fedavg, program=other)


def test_diverged_training_keeps_nothing(world: World, fedavg: Setting) -> None:
    """A rate of 1e30 makes the second step infinite; personal tensors of round 1 and its result stay as they are."""
    program = with_local_head(fedavg)
    device = world.device()
    result = world.result(fedavg, program=program)

    def kept() -> list[tuple[Path, bytes]]:
        """All but what the newest task was made of."""
        files = [path for path in device.vault.folder.rglob("*") if path.is_file() and path.name != "TASK"]
        return sorted((path, path.read_bytes()) for path in files)

    before = kept()
    reason = world.failure(fedavg, program=program, round=2, lr_scale=1e30)
    assert reason.startswith("training diverged in round 2, nothing of it is kept: ")
    assert kept() == before
    assert device.vault.pending() == [result]
    assert world.result(fedavg, program=program, round=3).round == 3


def test_a_vault_that_cannot_be_written_is_named_and_the_device_stays(world: World, fedavg: Setting) -> None:
    device = world.device()
    in_the_way = device.vault.folder / "run"
    device.vault.folder.mkdir(parents=True)
    in_the_way.write_text("no folder")
    assert str(in_the_way) in world.failure(fedavg)
    in_the_way.unlink()
    assert world.result(fedavg, round=2).round == 2


def test_a_vault_whose_round_is_gone_is_named_and_the_run_begins_anew(world: World, fedavg: Setting) -> None:
    device = world.device()
    result = world.result(fedavg)
    [folder] = (device.vault.folder / "run").glob("round-*")
    folder.rename(device.vault.folder / "elsewhere")
    world.server.acknowledge(result)
    [told] = world.result(fedavg, round=2).damaged
    assert str(folder.parent) in told
    assert "personal tensors of run 'run' are lost, and start from" in told
    assert world.result(fedavg, round=3, run="other").damaged == ()


def test_a_run_whose_name_leads_elsewhere_is_refused(world: World, fedavg: Setting, tmp_path: Path) -> None:
    world.device()
    assert "../../escaped" in world.failure(fedavg, run="../../escaped")
    assert not (tmp_path / "escaped").exists()


def test_an_error_that_nobody_foresaw_is_named_and_the_device_stays(world: World, fedavg: Setting) -> None:
    world.device()
    [phase] = fedavg.program.train
    odd = msgspec.structs.replace(fedavg.program, train=(msgspec.structs.replace(phase, graph="no such graph"),))
    assert "no such graph" in world.failure(fedavg, program=odd)
    assert world.result(fedavg, round=2).round == 2


# --- budgets ------------------------------------------------------------------------------------------


def budgeted(world: World, **budget: int) -> Device:
    return world.device(guard=Guard(Budget(**budget)))


def flops_of_training(world: World, setting: Setting) -> int:
    """Of the whole task, as a device without budgets reports it; its result is settled."""
    device = world.device()
    result = world.result(setting)
    world.server.acknowledge(result)
    device.stop()
    assert result.use.flops is not None
    return result.use.flops


def test_a_result_says_what_was_measured(world: World, fedavg: Setting) -> None:
    """Two epochs of three batches. Without sensors energy and heat are None, as is `sustained` after six steps."""
    world.device()
    use = world.result(fedavg).use
    assert use.steps == 6
    assert use.train_s is not None
    assert use.step_s is not None
    assert 6 * use.step_s < 2 * use.train_s
    assert use.peak_rss_bytes is not None
    assert (use.energy_j, use.temperature_c, use.throttled, use.sustained, use.broke) == (None, None, None, None, ())


def test_a_task_over_its_memory_is_refused_with_what_was_measured(world: World, fedavg: Setting) -> None:
    """No step is made, nothing is kept, and the device stays for the next task."""
    device = budgeted(world, memory_bytes=10**6)
    for kind in ("train", "evaluate"):
        world.give(fedavg, kind=kind)
        failed = world.server.expect(Failed)
        assert (failed.kind, failed.broke) == (kind, "memory")
        assert "the memory budget is 1.0 MB" in failed.reason
        assert failed.use is not None
        assert (failed.use.steps, failed.use.broke) == (0, ("memory",))
        assert failed.use.peak_rss_bytes is not None
        assert failed.use.received_bytes is not None
    assert device.vault.round_of("run") == 0
    assert device.vault.pending() == []
    assert world.server.count(Result) == 0
    world.server.roll_call()


def test_after_a_task_over_its_memory_graphs_are_loaded_again(world: World, fedavg: Setting) -> None:
    """The same device, with a budget that it can keep: its engine gave everything back and works as before."""
    guard = Guard(Budget(memory_bytes=1))
    world.device(guard=guard)
    assert "memory" in world.failure(fedavg)
    guard.budget = Budget()
    result = world.result(fedavg, round=2)
    assert result.use.steps == 6
    assert result.use.broke == ()


def test_a_task_is_stopped_between_two_steps(world: World, fedavg: Setting) -> None:
    """Six equal steps; the budget is that of two and a half, so the third is the first beyond it and the last."""
    flops = flops_of_training(world, fedavg)
    device = budgeted(world, flops_per_round=flops * 5 // 12)
    world.give(fedavg, round=2)
    failed = world.server.expect(Failed)
    assert failed.broke == "flops"
    assert failed.use is not None
    assert (failed.use.steps, failed.use.flops) == (3, flops // 2)
    assert f"training took {flops // 2} FLOPs with 3 steps, the budget of a round is {flops * 5 // 12}" in failed.reason
    assert device.vault.round_of("run") == 1, "as the round before left it"
    world.server.mark()


def test_a_budget_that_only_the_last_step_broke_is_reported_with_the_result(world: World, fedavg: Setting) -> None:
    flops = flops_of_training(world, fedavg)
    budgeted(world, flops_per_round=flops - 1)
    result = world.result(fedavg, round=2)
    assert result.use.broke == ("flops",)
    assert (result.use.steps, result.use.flops) == (6, flops)


def test_a_budget_that_is_just_kept(world: World, fedavg: Setting) -> None:
    flops = flops_of_training(world, fedavg)
    budgeted(world, flops_per_round=flops)
    assert world.result(fedavg, round=2).use.broke == ()


def test_a_result_that_may_not_be_sent_is_not_kept(world: World, fedavg: Setting) -> None:
    device = budgeted(world, upload_bytes=1000)
    world.give(fedavg)
    failed = world.server.expect(Failed)
    assert failed.broke == "upload"
    assert "the upload budget is 1000 (1 kB)" in failed.reason
    assert failed.use is not None
    assert failed.use.steps == 6
    assert (device.vault.round_of("run"), device.vault.pending(), world.server.chunks) == (0, [], [])
    assert world.result(fedavg, kind="evaluate").use.broke == ()


def test_other_failures_break_no_budget(world: World, fedavg: Setting) -> None:
    world.device(guard=Guard(Budget(memory_bytes=10**12)))
    world.give(fedavg, groups={})
    failed = world.server.expect(Failed)
    assert (failed.broke, failed.use) == (None, None)


# --- not now, not any more, longer --------------------------------------------------------------------


def test_a_device_that_is_not_ready_declines_and_works_when_it_is(
    world: World, fedavg: Setting, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    device = world.device(policy=OwnerPolicy(busy_file=busy))
    busy.touch()
    world.give(fedavg)
    declined = world.server.expect(Declined)
    assert (declined.run, declined.round, declined.kind) == ("run", 1, "train")
    assert declined.reason == f"busy: {busy} exists"
    assert declined.again_s == 60.0
    assert world.server.count(Failed) == 0
    assert device.vault.local("run") is None
    busy.unlink()
    assert world.result(fedavg).round == 1


def test_a_cancelled_task_is_dropped_and_nothing_of_it_is_kept(world: World, fedavg: Setting) -> None:
    """It would train for an hour; the next task is done as if that one had not been."""
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100_000))
    world.server.expect(Progress)
    world.server.tell(Cancel("run", 2, "train", "another round"))
    world.server.expect(Progress)
    world.server.tell(Cancel("run", 1, "train", "enough"))
    world.server.tell(Extended("run", 1, "train", 0.0))  # a task that were still there would fail now
    world.server.mark()
    assert device.vault.local("run") is None
    assert world.result(fedavg, round=2).round == 2
    assert world.server.count(Failed) == 0
    assert device.vault.round_of("run") == 2


def test_a_deadline_can_be_extended(world: World, fedavg: Setting) -> None:
    """3 s are too few; told in time that it has ten minutes, the device goes on until it is told to stop."""
    world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100_000), deadline_s=3.0)
    world.server.tell(Extended("run", 1, "train", 600.0))
    began = time.monotonic()
    while time.monotonic() - began < 4.0:
        world.server.expect(Progress)
    assert world.server.count(Failed) == 0
    world.server.tell(Extended("run", 1, "train", 0.01))
    assert "not done within the deadline of" in world.server.expect(Failed).reason
