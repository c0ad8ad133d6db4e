"""Runs whose record is kept in a real PostgreSQL server, which goes away meanwhile."""

from collections.abc import Iterator

import pytest

from tests.support.postgresql import PASSWORD, Postgresql
from tests.support.programs import DEVICES, ROUNDS, Stage, open_to_others, wait_for


@pytest.fixture
def server() -> Iterator[Postgresql]:
    """A server of this test's own: it is stopped."""
    made = Postgresql()
    yield made
    made.close()


@pytest.mark.slow
def test_run_survives_its_database(stage: Stage, undisturbed: bytes, server: Postgresql) -> None:
    """The server stops in round 2 and starts again; then the coordinator is killed and resumed: the same tensors."""
    stage.environment["FEDVIT_RECORD"] = server.schema()
    first = stage.coordinator()
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "round   1/" in stage.log("coordinator"), "round 1")
    server.stop()
    wait_for(lambda: "paused: database postgresql" in stage.log("coordinator"), "the run to pause")
    server.start()
    wait_for(lambda: "run resumed" in stage.log("coordinator"), "the run to be resumed")
    wait_for(lambda: "round   2/" in stage.log("coordinator"), "round 2")
    first.kill()
    first.wait()
    stage.finish_run(stage.coordinator(resume=True), devices)
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [len(DEVICES)] * ROUNDS
    assert stage.model() == undisturbed
    assert not list(stage.out.glob("fedvit.db*"))
    assert open_to_others(stage.out) == []
    texts = [path.read_text(errors="replace") for path in stage.out.rglob("*.log")] + [stage.log("coordinator")]
    assert not any(PASSWORD in text for text in texts)


def test_start_that_is_refused_leaves_nothing(stage: Stage) -> None:
    running = stage.coordinator("--record", "postgresql://u:p@127.0.0.1:1/d")
    assert stage.finish(running, "coordinator") == 10
    [line] = stage.log("coordinator").strip().splitlines()
    assert "database postgresql" in line
    assert "p@" not in line
    assert not stage.out.exists()
