"""What the coordinator prints of a finished round."""

from pathlib import Path

from coordinator.record.tables import SavedState
from coordinator.rounds.round_line import round_line
from tests.support.records import RUN, begin_run


def test_the_line_of_a_round(tmp_path: Path) -> None:
    store = begin_run(tmp_path)
    assert round_line(store, RUN, 1, 3) == (
        "round   1/3   2/3 devices   accuracy 0.583 ± 0.232   loss 1.500   "
        "devices 2.5 s, server 0.5 s   down 11.0 MB, up 3.1 MB"
    )
    store.rounds.close(RUN, 2, SavedState({}, None, {}), {})
    assert round_line(store, RUN, 2, 3) == "round   2/3   1/2 devices   loss 0.500   down 0.0 MB, up 0.0 MB"
    store.close()
