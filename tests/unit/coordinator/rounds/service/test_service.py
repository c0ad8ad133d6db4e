"""A service beside a run that cannot begin."""

import errno
import threading
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coordinator.compute.messages import ComputeRequest
from coordinator.config import BrokerConfig, ServiceConfig
from coordinator.record.record import Record, open_record
from coordinator.record.retention import lock_run
from coordinator.rounds.display import Display
from coordinator.rounds.service.broker import BrokerEndpoint
from coordinator.rounds.service.service import RunHost, RunService
from fedvit.transport.address import Address
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from tests.support.waiting import wait_until


class Lines(Display):
    """Keeps the lines for the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def line(self, text: str) -> None:
        self.said.append(text)


def never(*_: Any) -> Any:
    raise AssertionError("the run began")


def look_once(store: Record, folder: Path, compute_of: Any = never) -> tuple[RunService, list[str]]:
    """Let a service look at its queue, with one run of the name r; return it, and what it says."""
    store.runs.submit("r", {"method": "fedavg", "devices": 2})
    display, broker = Lines(), BrokerConfig(broker="mqtt://localhost")
    service = RunService(
        RunHost(folder, store, display, compute_of, lambda *_: nullcontext()),
        ServiceConfig(gc_every_h=0),
        link=MemoryTransport(SimpleQueue(), MemoryBroker(), "coordinator"),
        endpoint=BrokerEndpoint(Address.parse(broker.broker), broker),
        stop=threading.Event(),
        on_turn=lambda: None,
    )
    service._look()
    return service, display.said


def test_run_whose_folder_cannot_be_used_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file of the operator")
    with open_record(tmp_path) as store:
        _, [said] = look_once(store, tmp_path)
        record = store.runs.read("r")
    assert record.status == "failed"
    assert str(tmp_path / "r") in (record.reason or "")
    assert str(tmp_path / "r") in said


def test_run_that_another_process_serves_is_left_to_it(tmp_path: Path) -> None:
    lock_run(tmp_path / "r", "r")
    with open_record(tmp_path) as store:
        assert look_once(store, tmp_path)[1] == []
        assert store.runs.read("r").status == "queued"


class Forbidden:
    """A compute side that may not enter the folder of the server's images."""

    def ask(self, request: ComputeRequest[Any]) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/ada/pictures")

    def close(self) -> None:
        pass


def test_run_that_may_not_read_a_folder_fails_once(tmp_path: Path) -> None:
    with open_record(tmp_path) as store:
        service, _ = look_once(store, tmp_path, lambda *_: Forbidden())
        [run] = service.served()
        wait_until(run.is_over)
        record = store.runs.read("r")
    assert record.status == "failed"
    assert "/srv/ada/pictures" in (record.reason or "")
