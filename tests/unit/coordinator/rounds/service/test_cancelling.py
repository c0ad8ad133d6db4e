"""A run that is served by `coordinator start` is cancelled, too."""

from pathlib import Path

import pytest

from coordinator.record.record import open_record
from coordinator.rounds.service import cancelling
from coordinator.rounds.service.cancelling import Cancellation


def test_cancellation_is_found_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_record(tmp_path) as store:
        for run in ("r", "other"):
            store.runs.create(run, {})
        monkeypatch.setattr(cancelling, "EVERY_S", 0.0)
        cancellation = Cancellation(store, "r")
        assert not cancellation.is_asked_for()
        store.runs.cancel("other")
        assert not cancellation.is_asked_for()
        store.runs.cancel("r")
        assert cancellation.is_asked_for()
        assert store.runs.read("r").status == "waiting", "its coordinator ends it"
