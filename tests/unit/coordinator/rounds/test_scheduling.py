"""When tasks are sent and their deadlines checked, with a run's real state and many devices."""

import gc
import math
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.messages import PlannedTask
from coordinator.config import make_config
from coordinator.record.record import Record, open_record
from coordinator.rounds import scheduler
from coordinator.rounds.deadlines import FLOOR_S, Deadline
from coordinator.rounds.open_round import Missing
from coordinator.rounds.scheduler import SPARE_CHECKS, UNSENT_BYTES, Overdue, TaskScheduler
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import DeviceTask, TaskState, Work
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire import messages
from fedvit.wire.messages import MAX_MESSAGE_BYTES, DeltaStep, Manifest, encode
from fedvit.wire.topics import Topics
from tests.support.devices import hello

PROGRAM: Any = type("NothingFetched", (), {"list_fetched_once": staticmethod(list)})


class Sent:
    """A scheduler, and the tasks that it has sent; `unsent_bytes` wait in this process."""

    def __init__(self, folder: Path, store: Record) -> None:
        self.tasks: list[tuple[str, messages.Task]] = []
        self.unsent_bytes = 0
        blobs = VerifiedBlobs(folder / "blobs")
        self.state = RunState(
            run="r",
            config=make_config({"method": "fedavg"}, "test").run,
            store=store,
            blobs=blobs,
            topics=Topics("home"),
            operator_log=lambda line: None,
            send=self._send,
            classes=("ant", "bee"),
            unsent_bytes=lambda: self.unsent_bytes,
        )
        transport = MemoryTransport(SimpleQueue(), MemoryBroker(), "c")
        exchange = BlobExchange(
            transport, blobs, send=lambda *_: None, topics=ChunkTopics(str), may_read=lambda *_: True
        )
        self.scheduler = TaskScheduler(self.state, exchange)
        self.digest = blobs.put(b"program").digest
        self.value = blobs.put(b"value").digest

    def _send(self, device: str, message: Any) -> None:
        encode(message)
        self.tasks.append((device, message))
        self.unsent_bytes += UNSENT_BYTES // 2

    def assign(self, device: str, *, instance: str = "i1", delta_chain: tuple[DeltaStep, ...] = ()) -> DeviceTask:
        if device not in self.state.presence:
            self.state.presence.arrived(device, hello(instance))
        work = Work(PlannedTask(program=self.digest, groups={"g": self.value}, delta_chain=delta_chain), PROGRAM)
        self.scheduler.assign(device, 1, "train", work)
        task = self.state.tasks.of(device)
        assert task is not None
        return task

    def due_now(self, task: DeviceTask, deadline: Deadline) -> None:
        """Its deadline is another one, which is checked at once."""
        task.deadline = deadline
        task.check_at = math.inf
        self.scheduler.schedule_check(task)

    def overdue(self, waiting: Collection[str] = ()) -> list[Overdue]:
        return self.scheduler.overdue((), waiting)


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    monkeypatch.setattr(scheduler, "CHECK_INTERVAL_S", 0.0)
    with open_record(tmp_path) as store:
        store.runs.create("r", {})
        yield Sent(tmp_path, store)


def test_tasks_wait_while_earlier_ones_have_not_left_this_process(sent: Sent) -> None:
    """So a cohort of thousands does not lie in memory as messages. The time in the queue is not the device's."""
    devices = [f"d{number}" for number in range(5)]
    tasks = [sent.assign(device) for device in devices]
    assert [device for device, _ in sent.tasks] == ["d0", "d1"]
    last = tasks[-1]
    sent.due_now(last, Deadline.fixed(time.monotonic(), -1.0))
    assert sent.overdue() == [], "a task that was not sent yet is not overdue"
    assert last.queued_at is not None
    last.queued_at -= 100.0
    due_at = last.deadline.at
    for _ in range(2):
        sent.unsent_bytes = 0
        sent.scheduler.send_queued()
    assert [device for device, _ in sent.tasks] == devices
    assert last.deadline.at >= due_at + 100.0


def test_task_that_ended_in_the_queue_is_not_sent(sent: Sent) -> None:
    sent.unsent_bytes = UNSENT_BYTES
    first, second = sent.assign("a"), sent.assign("b")
    sent.state.tasks.end(first, TaskState.CANCELLED)
    sent.unsent_bytes = 0
    sent.scheduler.send_queued()
    assert [device for device, _ in sent.tasks] == ["b"]
    assert second.queued_at is None


def test_repeated_task_carries_no_blobs(sent: Sent) -> None:
    """A hello that is only repeated costs a small message; a new connection may have lost the first one."""
    task = sent.assign("a")
    sent.scheduler.send_task(task)
    sent.unsent_bytes = 0
    sent.state.presence.arrived("a", hello("i1", connection=1))
    sent.scheduler.send_task(task)
    assert [message.inline for _, message in sent.tasks] == [(b"value",), (), (b"value",)]


def test_delta_chain_that_fits_into_no_message_is_left_out(sent: Sent) -> None:
    """The device then gets the value as a whole."""
    chain = tuple(
        DeltaStep(f"blake3:{number:064x}", f"blake3:{number - 1:064x}", Manifest(f"blake3:{number:064x}", 10, 1024))
        for number in range(1, 400)
    )
    assert len(chain) * 200 > MAX_MESSAGE_BYTES
    sent.assign("a", delta_chain=chain)
    [(_, message)] = sent.tasks
    assert (message.recipes, message.inline) == ((), (b"value",))
    assert sent.overdue() == []


def test_overdue_tasks_are_found_among_many(sent: Sent) -> None:
    """Each once, whatever was scheduled for it before, and none that has ended."""
    tasks = {number: sent.assign(f"d{number}") for number in range(50)}
    for number, task in tasks.items():
        task.queued_at = None
        sent.due_now(task, Deadline.fixed(time.monotonic(), -1.0 if number % 2 else 3600.0))
    sent.state.tasks.end(tasks[1], TaskState.DEADLINE)
    found = sent.overdue()
    assert sorted(int(one.task.device[1:]) for one in found) == list(range(3, 50, 2))
    assert {one.why for one in found} == {Missing.DEADLINE}
    assert sent.overdue() == []


def test_checks_of_ended_tasks_do_not_accumulate(sent: Sent) -> None:
    ended = []
    for _ in range(SPARE_CHECKS + 1):
        ended.append(weakref.ref(task := sent.assign("a")))
        sent.state.tasks.end(task, TaskState.DEADLINE)
        sent.unsent_bytes = 0
    del task
    sent.overdue()
    gc.collect()
    assert [one for one in ended if one() is not None] == []


def test_upload_that_waits_for_others_costs_its_device_no_time(sent: Sent) -> None:
    """Its deadline is only looked at when it is due, however many uploads wait."""
    task = sent.assign("a")
    task.to(TaskState.UPLOADING)
    deadline = Deadline.expected(time.monotonic(), 7200.0, 1.0)
    deadline.at = at = time.monotonic() + 0.01
    sent.due_now(task, deadline)
    while (now := time.monotonic()) <= at:
        time.sleep(0.01)
    assert sent.overdue({"a"}) == []
    assert task.deadline.at >= now + FLOOR_S
