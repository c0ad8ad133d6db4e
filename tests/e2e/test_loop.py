"""The whole loop as `fleet demo loop` plays it: a class appears, is noticed, labelled, learned, tried and promoted."""

import json
import subprocess
from pathlib import Path

import pytest

from fleet.processes import program
from tests.support.programs import query_record
from tests.support.waiting import WAIT_S


@pytest.mark.slow
def test_class_that_appears_is_noticed_learned_and_promoted(tmp_path: Path) -> None:
    command = [*program("fleet.cli"), "demo", "loop", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["false_alarms"] == 0
    assert set(told["drift"]) <= {"garden", "gate"}
    assert told["drift"]
    assert sum(told["labels"].values()) == 40
    assert max(told["labels"], key=told["labels"].get) == "2", "the least sure pictures are those of the new class"
    assert told["canaries"] == 1, "garden alone is in Berlin"
    assert told["before"]["2"]["right"] == 0
    new = told["after"]["2"]
    assert new["right"] > new["pictures"] - new["right"] - new["unsure"], "more are right than wrong"
    acts = query_record(
        tmp_path / "loop" / "runs", "select act from promotions where model = ? order by id", told["second"]
    )
    assert [act for (act,) in acts] == ["compared", "canary", "promoted"]
    for log in (tmp_path / "loop" / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.name
