"""One round of a cohort of devices: its tasks are recorded before they are sent, and it closes by quorum."""

from collections.abc import Callable

from coordinator.rounds.open_round import Missing, OpenRound, RoundPlan
from coordinator.rounds.tasks import TaskState
from fedvit.wire.messages import Cancel
from tests.support.parts import Parts


def test_journal_records_tasks_but_those_of_devices_that_have_a_result(parts: Parts) -> None:
    parts.state.store.rounds.open("r", 1, ["pi", "nano"], 2)
    parts.state.counted.add("nano")
    parts.ports.journal.add_tasks(1, {"pi": parts.work._replace(attempt=2), "nano": parts.work})
    [task] = parts.state.store.tasks.read_unanswered("r")
    assert (task.device, task.program, task.groups, task.attempt) == (
        "pi",
        parts.work.planned.program,
        parts.work.planned.groups,
        2,
    )


def test_journal_records_tasks_when_the_mirror_has_their_blobs(parts: Parts) -> None:
    mirrored: list[tuple[set[str], int]] = []
    parts.state.mirror = lambda digests: mirrored.append(
        (set(digests), len(parts.state.store.tasks.read_unanswered("r")))
    )
    parts.state.store.rounds.open("r", 1, ["pi"], 1)
    parts.ports.journal.add_tasks(1, {"pi": parts.work})
    assert mirrored == [(parts.work.offered(), 0)]
    assert len(parts.state.store.tasks.read_unanswered("r")) == 1


def test_trainer_plans_nothing_for_nobody(parts: Parts) -> None:
    assert parts.ports.trainer.plan([]) == {}


def test_trainer_leaves_recorded_tasks_out_whose_blobs_are_gone(parts: Parts) -> None:
    """They end, so that a late result of one is refused, and not awaited."""
    parts.state.store.rounds.open("r", 1, ["pi"], 1)
    parts.ports.journal.add_tasks(1, {"pi": parts.work})
    parts.state.blobs.path(parts.work.planned.groups["model"]).unlink()
    assert parts.ports.trainer.recall(parts.state.store.tasks.read_unanswered("r")) == {}
    assert parts.state.store.tasks.read_unanswered("r") == []


def test_trainer_opens_a_round_with_the_results_that_the_record_has(parts: Parts) -> None:
    """A restart in the middle of a round leads here."""
    parts.arrive("pi")
    parts.open("pi", "nano")
    parts.collector.on_result("pi", parts.result())
    parts.collector.commit(now=True)
    again = OpenRound(RoundPlan("r", 1, "train", ["pi", "nano"], 2))
    parts.ports.trainer.open(again)
    assert (again.accepted, again.waiting_for()) == ({"pi"}, ["nano"])
    assert parts.state.doing == f"round 1/{parts.state.config.rounds}: train"


def test_trainer_asks_until_enough_devices_have_answered(parts: Parts) -> None:
    """The slow one is dismissed without blame."""
    parts.arrive("quick", "slow")
    parts.state.store.rounds.open("r", 1, ["quick", "slow"], 1)
    work = {"quick": parts.work, "slow": parts.work}
    parts.ports.journal.add_tasks(1, work)
    parts.ports.trainer.wait = lambda until: answer(parts, until)  # type: ignore[method-assign]  # no device is connected
    opened = parts.engine.mode.ask(RoundPlan("r", 1, "train", list(work), 1, work))
    assert opened.accepted == {"quick"}
    assert [(cancel.round, cancel.reason) for cancel in parts.got("slow", Cancel)] == [
        (1, "late: round 1 has the results that it needs")
    ]
    assert list(parts.state.tasks) == []
    assert parts.refusals("slow") == []
    assert parts.state.counts_in == 2


def answer(parts: Parts, until: Callable[[], bool]) -> None:
    parts.collector.on_result("quick", parts.result())
    parts.collector.commit(now=True)
    assert until()


def test_trainer_says_without_which_devices_a_round_closed(parts: Parts) -> None:
    parts.arrive("pi", "nano")
    opened = parts.open("pi", "nano")
    opened.fail("pi", Missing.DEADLINE)
    opened.fail("nano", Missing.DECLINED)
    parts.ports.trainer.close(opened)
    assert [line for line in parts.lines if "closed without" in line] == [
        "round 1: train closed without pi (deadline)"
    ], "to decline is no failure"
    assert parts.state.opened is None
    assert {task.state for task in parts.state.tasks} == {TaskState.OFFERED}
