"""The scheduler of the tests begins no group when it is too late, and names those that it left out."""

from collections import OrderedDict

import pytest

from tests.support.scheduling import UNTIL, Groups


class Worker:
    shutting_down = False
    ended = False

    def shutdown(self) -> None:
        self.ended = True


def test_groups_that_come_too_late_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTIL, "1")
    groups, worker = Groups.__new__(Groups), Worker()
    groups.workqueue = OrderedDict({"tests/a.py": {}, "tests/b.py": {}})
    groups.registered_collections = {worker: []}  # type: ignore[dict-item]
    groups.assigned_work = {worker: {}}  # type: ignore[dict-item]
    groups._reschedule(worker)
    assert groups.left_out == ["tests/a.py", "tests/b.py"]
    assert worker.ended
