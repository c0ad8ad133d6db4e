"""The worker process: what it is asked and answers, and what happens when it dies."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.compute import process
from coordinator.compute.integrity import DamagedBlob
from coordinator.compute.messages import Check, Finish
from coordinator.compute.process import Raised, Worker, encode_error, exception_of
from coordinator.config import make_config
from coordinator.record.tables import SavedState
from fedvit import errors
from fedvit.errors import ConfigError, DeviceTrouble, FedvitError
from tests.support.codes import has_code
from tests.support.forked import ForkedWorker
from tests.support.programs import wait_for

CHECK = Check(config=make_config({"method": "fedavg", "accelerator": "cpu"}, "test").run, where="run.toml", runs="runs")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Its process has torch at once. It is told of no run, so that it opens no database."""
    monkeypatch.setattr(process, "spawn", ForkedWorker)
    monkeypatch.setattr(process, "BACK_OFF_S", 0.01)
    worker = Worker()
    yield worker
    worker.close()


def dying(code: int) -> process.Child:
    """A process that ends at once."""
    return subprocess.Popen(["sh", "-c", f"exit {code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_worker_answers_whether_a_configuration_can_be_run(worker: Worker) -> None:
    assert worker.ask(CHECK).accelerator == "cpu"
    with pytest.raises(ConfigError, check=has_code("FV1101")):
        worker.ask(msgspec.structs.replace(CHECK, config=make_config({"method": "fedavk"}, "test").run))
    with pytest.raises(ConfigError, check=has_code("FV1022")):
        worker.ask(msgspec.structs.replace(CHECK, config=make_config({"accelerator": "warp"}, "test").run))


def test_worker_reports_unexpected_error(worker: Worker) -> None:
    with pytest.raises(FedvitError, check=has_code("FV1510")):
        worker.ask(Finish(saved=SavedState({}, None, {})))
    assert worker.ask(CHECK).accelerator == "cpu", "it goes on"


def test_worker_that_was_killed_while_it_had_nothing_to_do_is_started_again(worker: Worker) -> None:
    assert worker.ask(CHECK).accelerator == "cpu"
    killed, said = worker.pid, list[str]()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: said.extend(worker.take_warnings()) or len(said) == 2, "it to be started again")
    assert said == [
        "the worker process ended with signal 9 (SIGKILL); nothing is lost",
        "the worker process was started again",
    ]
    assert worker.pid != killed
    assert worker.ask(CHECK).accelerator == "cpu"


def test_worker_that_dies_is_asked_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = iter([dying, dying, lambda _: ForkedWorker()])
    monkeypatch.setattr(process, "spawn", lambda: next(spawned)(3))
    assert worker.ask(CHECK).accelerator == "cpu"
    assert worker.take_warnings().count("the worker process ended with exit code 3; nothing is lost") == 2


def test_worker_that_dies_each_time_fails_the_run(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "spawn", lambda: dying(3))
    with pytest.raises(DeviceTrouble, check=has_code("FV1510")):
        worker.ask(CHECK)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FedvitError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_of_the_worker_are_the_same_here(kind: type[FedvitError]) -> None:
    again = travelled(kind("FV1203", "what came"))
    assert (type(again), str(again), getattr(again, "code", None)) == (kind, "what came", "FV1203")


def test_errors_keep_what_others_ask_of_them() -> None:
    """The name of the damaged file, and what the system said."""
    damaged = travelled(DamagedBlob("blake3:ab", Path("blobs/ab")))
    assert isinstance(damaged, DamagedBlob)
    assert (damaged.digest, damaged.path) == ("blake3:ab", Path("blobs/ab"))
    failed = travelled(OSError(24, "Too many open files", "somewhere"))
    assert isinstance(failed, OSError)
    assert (failed.errno, failed.strerror, failed.filename) == (24, "Too many open files", "somewhere")


def test_errors_of_a_kind_that_only_the_worker_knows_are_of_the_next_general_one() -> None:
    class Torn(errors.Damaged):
        """Of some library."""

    assert type(travelled(Torn("FV0015", "a file"))) is errors.Damaged


def travelled(error: Exception) -> Exception:
    raw = msgspec.msgpack.encode(encode_error(error, []))
    return exception_of(msgspec.msgpack.decode(raw, type=Raised), None)
