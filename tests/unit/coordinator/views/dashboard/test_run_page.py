from pathlib import Path

from msgspec.structs import replace

from coordinator.views.dashboard.run_page import read_details
from tests.support.records import RUN, begin_run


def test_time_left_does_not_count_the_open_round_twice(tmp_path: Path) -> None:
    """Round 2 of 3 is open, and as long as usual: one further round is left."""
    with begin_run(tmp_path) as store:
        seen = read_details(store, RUN)
    openings = [f"2026-01-01T00:0{minute}:00Z" for minute in range(3)]
    assert replace(seen, openings=openings).estimate_left_s() == 60.0
