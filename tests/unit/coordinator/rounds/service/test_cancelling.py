"""A run that is served by `coordinator start` is cancelled, too."""

from pathlib import Path

import pytest

from coordinator.record.store import Store
from coordinator.rounds.service import cancelling
from coordinator.rounds.service.cancelling import Cancellation


def test_cancellation_is_found_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.in_folder(tmp_path)
    for run in ("r", "other"):
        store.create_run(run, {})
    monkeypatch.setattr(cancelling, "EVERY_S", 0.0)
    cancellation = Cancellation(store, "r")
    assert not cancellation.is_asked_for()
    store.cancel_run("other")
    assert not cancellation.is_asked_for()
    store.cancel_run("r")
    assert cancellation.is_asked_for()
    assert store.run("r").status == "waiting", "its coordinator ends it"
    store.close()
