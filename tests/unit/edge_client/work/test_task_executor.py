"""A task from end to end, and the reasons of one that cannot be done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_client.health.guard import Guard
from edge_client.link import resending
from edge_client.work.runtime import ModelTest, Seeds
from fedvit.blobs import digest_of
from fedvit.data.folder import DeviceData
from fedvit.policy import Policy, SendPolicy
from fedvit.program import Program, Role, TensorGroup
from fedvit.program_versions import VERSIONS
from fedvit.resources import Budget, ResourceUse
from fedvit.tensors import Array, Tensors, delta
from fedvit.wire import messages
from fedvit.wire.messages import BlobNack, Failed, Manifest, Progress, Result, Task, Welcome
from tests.support.agents import (
    FAR_OFF,
    SILENT,
    Device,
    Setting,
    World,
    always,
    assert_same_bits,
    train_here,
    with_generated_model,
    with_kept,
    with_local_head,
)


def test_training_sends_the_delta_of_what_is_shared(world: World, fedavg: Setting, digits: Path) -> None:
    """delta = after - start, and after is what the same graphs give without an agent, bit by bit."""
    device = world.device()
    result = world.result(fedavg)
    assert (result.run, result.round, result.kind, result.samples) == ("run", 1, "train", 20)
    assert set(result.metrics) == {"loss"}
    assert (result.use.steps, result.use.flops) == (6, 6 * fedavg.program.graphs["train"].flops)
    start = fedavg.start()
    upload = world.server.fetch(result.upload)
    assert_same_bits(upload, delta(train_here(fedavg, fedavg.program, start, digits), start))
    assert device.vault.pending() == [result]
    world.server.acknowledge(result)
    world.server.roll_call()
    assert device.vault.pending() == []
    *_, last = [message for message in world.server.heard if isinstance(message, Progress)]
    assert (last.round, last.kind, last.done_steps, last.total_steps) == (1, "train", 6, 6)


def test_evaluation_answers_with_counts_and_nothing_else(world: World, fedavg: Setting, digits: Path) -> None:
    device = world.device(policy=Policy(send=SendPolicy(class_counts=True)))
    result = world.result(fedavg, kind="evaluate")
    evaluated = fedavg.runtime().evaluate(
        ModelTest(fedavg.program, fedavg.start(), DeviceData.open(digits), Seeds(5, 1, "pi")), SILENT
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


@pytest.mark.parametrize("owner_counts", [True, False])
def test_evaluation_has_no_counts_by_class_without_consent(world: World, fedavg: Setting, owner_counts: bool) -> None:
    """The owner refuses, or the program does: EFTViT promises that the class distribution stays on the device."""
    world.device(policy=Policy(send=SendPolicy(class_counts=owner_counts)))
    evaluate = msgspec.structs.replace(fedavg.program.evaluate, counts_classes=not owner_counts)
    program = msgspec.structs.replace(fedavg.program, evaluate=evaluate)
    result = world.result(fedavg, kind="evaluate", program=program)
    assert (result.by_class, result.samples) == ((), 12)


def test_local_tensors_stay_in_the_vault_and_are_the_next_rounds_start(
    world: World, fedavg: Setting, digits: Path
) -> None:
    """The head is local: round 1 starts from its initial value, round 2 from the vault, whatever the server has."""
    program = with_local_head(fedavg)
    device = world.device()
    start = fedavg.start()
    for number in (1, 2):
        result = world.result(fedavg, program=program, round=number)
        after = train_here(fedavg, program, start, digits, number)
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
    after = train_here(eftvit, eftvit.program, eftvit.start(), digits)
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
    after = train_here(eftvit, eftvit.program, start | kept, digits, 2)
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
    """Personal tensors serve evaluations only: round 2 starts from the server's tensors, and replaces them."""
    program = with_kept(fedavg)
    device = world.device()
    start = fedavg.start()
    for number in (1, 2):
        result = world.result(fedavg, program=program, round=number)
        after = train_here(fedavg, program, start, digits, number)
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
    after = start | train_here(eftvit, program, start, digits)
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
        after = train_here(fedavg, program, made, digits, number)
        assert_same_bits(world.server.fetch(result.upload), delta(after, made))
        assert device.vault.local("run") == {}
        world.server.acknowledge(result)
    assert "group 'model' of round 3" in world.failure(fedavg, program=program, round=3, groups={})


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
    after = train_here(fedavg, program, start, digits, 2)
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
    """A device does not request blobs that a task contains; a small upload travels with its result, which names it.

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


def head(world: World, setting: Setting, change: Callable[[Array], Array | None]) -> Task:
    """Bring a model whose head is changed; None leaves it out."""
    values, name = setting.start(), "head.weight"
    changed = change(values.pop(name))
    return world.task(setting, group_values={"model": values if changed is None else values | {name: changed}})


def bring(world: World, setting: Setting, what: str, manifest: Manifest) -> Task:
    """Let `what` of the task be this blob."""
    task = world.task(setting)
    names = {"program": manifest.digest} if what == "program" else {"groups": {"model": manifest.digest}}
    return msgspec.structs.replace(task, blobs=(manifest, *task.blobs), **names)


def ask(world: World, setting: Setting, **changed: Any) -> Task:
    return world.task(setting, program=msgspec.structs.replace(setting.program, **changed))


def phase(world: World, setting: Setting) -> Task:
    [train] = setting.program.train
    return ask(world, setting, train=(msgspec.structs.replace(train, graph="no such graph"),))


ESCAPE = "blake3:../../../etc/passwd"
IMPOSSIBLE: dict[str, tuple[Callable[[World, Setting], Task], str]] = {
    "bytes without a description": (lambda w, s: w.task(s, inline=(b"stranger",)), "8 bytes that it does not describe"),
    "newer program": (lambda w, s: ask(w, s, v=max(VERSIONS) + 1), f"program version {max(VERSIONS) + 1}"),
    "no program": (lambda w, s: bring(w, s, "program", w.server.keep(b"\x81\xa1v\x01")), "not a program: "),
    "no tensors": (lambda w, s: bring(w, s, "model", w.server.keep(b"no tensors")), "10 bytes are not safetensors"),
    "no digest": (lambda w, s: bring(w, s, "model", Manifest(ESCAPE, 10, 1024)), ESCAPE),
    "no group": (lambda w, s: w.task(s, groups={}), "group 'model' of round 1: the task does not name it"),
    "group far off": (lambda w, s: w.task(s, groups={"model": FAR_OFF}), FAR_OFF),
    "group elsewhere": (lambda w, s: w.task(s, groups={"model": ESCAPE}), ESCAPE),
    "no initial value": (
        lambda w, s: ask(w, s, groups={"model": TensorGroup(Role.LOCAL)}),
        "group 'model' of round 1: it has no initial value",
    ),
    "shape": (lambda w, s: head(w, s, lambda value: value.T.copy()), "has shape (32, 3), expected (3, 32)"),
    "nan": (lambda w, s: head(w, s, lambda value: value * np.nan), "'head.weight' holds 96 values that are NaN"),
    "dtype": (lambda w, s: head(w, s, lambda value: value.astype(np.float64)), "float64, expected float32"),
    "missing": (lambda w, s: head(w, s, lambda value: None), "1 tensors are missing, the first is 'head.weight'"),
    "extra": (
        lambda w, s: w.task(s, group_values={"model": s.start() | {"head.extra": np.zeros(1, np.float32)}}),
        "1 tensors were not asked for, the first is 'head.extra'",
    ),
    "graph of a phase": (phase, "no such graph"),
    "classes": (lambda w, s: ask(w, s, classes=("0", "1", "seven")), "class folders that the run does not know: 2"),
    "run": (lambda w, s: w.task(s, run="../../escaped"), "../../escaped"),
}


@pytest.mark.parametrize(("make", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_task_that_cannot_be_done_is_named_and_the_device_stays(
    world: World, fedavg: Setting, tmp_path: Path, make: Callable[[World, Setting], Task], reason: str
) -> None:
    device = world.device(guard=Guard(Budget(memory_bytes=10**12)))
    world.server.tell(make(world, fedavg))
    failed = world.server.expect(Failed)
    assert reason in failed.reason
    assert (failed.broke, failed.use) == (None, None), "no budget is to blame"
    assert device.vault.round_of("run") == 0
    assert not (tmp_path / "escaped").exists()
    assert world.result(fedavg, run="another").run == "another"


def test_a_graph_that_is_none_is_declined_and_the_device_stays(world: World, fedavg: Setting) -> None:
    world.device()
    spec = msgspec.structs.replace(fedavg.program.graphs["train"], digest=world.server.keep(b"no graph").digest)
    program = msgspec.structs.replace(fedavg.program, graphs={**fedavg.program.graphs, "train": spec})
    assert "graph 'train' is not allowed: not protobuf" in world.refusal(fedavg, program=program)
    assert world.result(fedavg, round=2).round == 2


def test_diverged_training_keeps_nothing(world: World, fedavg: Setting) -> None:
    """A rate of 1e30 makes the second step infinite; personal tensors of round 1 and its result stay as they are."""
    program = with_local_head(fedavg)
    device = world.device()
    result = world.result(fedavg, program=program)

    def list_kept() -> list[tuple[Path, bytes]]:
        """All but what the newest task was made of."""
        files = [path for path in device.vault.folder.rglob("*") if path.is_file() and path.name != "TASK"]
        return sorted((path, path.read_bytes()) for path in files)

    before = list_kept()
    reason = world.failure(fedavg, program=program, round=2, lr_scale=1e30)
    assert reason.startswith("training diverged in round 2, nothing of it is kept: ")
    assert list_kept() == before
    assert device.vault.pending() == [result]
    assert world.result(fedavg, program=program, round=3).round == 3


def test_a_vault_that_cannot_be_written_is_named_and_the_device_stays(
    world: World, fedavg: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """The device's own log names the file, and the coordinator does not learn where the device keeps its state."""
    device = world.device()
    in_the_way = device.vault.folder / "run"
    device.vault.folder.mkdir(parents=True)
    in_the_way.write_text("no folder")
    assert world.failure(fedavg).endswith("PATH")
    assert str(in_the_way) in caplog.text + str([record.__dict__.get("reason") for record in caplog.records])
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


def make_budgeted(world: World, **budget: int) -> Device:
    return world.device(guard=Guard(Budget(**budget)))


def flops_of_training(world: World, setting: Setting) -> int:
    """The device reports the use of the whole task, without budgets too; its result is settled."""
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
    """No step is made, and nothing is kept. The device stays for the next task, for which graphs are loaded again."""
    guard = Guard(Budget(memory_bytes=10**6))
    device = world.device(guard=guard)
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
    guard.budget = Budget()
    use = world.result(fedavg, round=2).use
    assert (use.steps, use.broke) == (6, ())


def test_a_task_is_stopped_between_two_steps(world: World, fedavg: Setting) -> None:
    """Six equal steps; the budget is that of two and a half, so the third is the first beyond it and the last."""
    flops = flops_of_training(world, fedavg)
    device = make_budgeted(world, flops_per_round=flops * 5 // 12)
    world.give(fedavg, round=2)
    failed = world.server.expect(Failed)
    assert failed.broke == "flops"
    assert failed.use is not None
    assert (failed.use.steps, failed.use.flops) == (3, flops // 2)
    assert f"training took {flops // 2} FLOPs with 3 steps, the budget of a round is {flops * 5 // 12}" in failed.reason
    assert device.vault.round_of("run") == 1, "as the round before left it"
    world.server.mark()


@pytest.mark.parametrize("lacking_flops", [0, 1])
def test_a_budget_that_only_the_last_step_breaks_is_reported_with_the_result(
    world: World, fedavg: Setting, lacking_flops: int
) -> None:
    flops = flops_of_training(world, fedavg)
    make_budgeted(world, flops_per_round=flops - lacking_flops)
    use = world.result(fedavg, round=2).use
    assert (use.steps, use.flops, use.broke) == (6, flops, ("flops",) if lacking_flops else ())


def test_a_result_that_may_not_be_sent_is_not_kept(world: World, fedavg: Setting) -> None:
    device = make_budgeted(world, upload_bytes=1000)
    world.give(fedavg)
    failed = world.server.expect(Failed)
    assert failed.broke == "upload"
    assert "the upload budget is 1000 (1 kB)" in failed.reason
    assert failed.use is not None
    assert failed.use.steps == 6
    assert (device.vault.round_of("run"), device.vault.pending(), world.server.chunks) == (0, [], [])
    assert world.result(fedavg, kind="evaluate").use.broke == ()
