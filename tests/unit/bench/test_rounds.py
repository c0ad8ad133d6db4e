"""What a bench of rounds makes of the rounds of a run that was watched half of the time."""

from datetime import UTC, datetime, timedelta

import pytest

from bench.rounds import Sample, Sampled, compare_watched, run_rounds_bench
from coordinator.record.tables import RoundRecord
from fedvit.errors import FedvitError
from profiles.probes.host import usable_cores

BEGIN = datetime(2026, 11, 23, tzinfo=UTC)


def test_watched_rounds_arecompare_watched_with_their_neighbours() -> None:
    """Rounds 2 and 5 take 2 s, the watched ones 3 and 4 2.2 s: of 100 devices 20 and 22 ms each, 10 % more. The control
    process takes 1 s of a round's processor time, and 1.5 s of a watched one's."""
    seconds = {1: 10.0, 2: 2.0, 3: 2.2, 4: 2.2, 5: 2.0}
    control_s = {1: 5.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 1.0}
    rounds: list[RoundRecord] = []
    samples = [Sample(BEGIN.timestamp(), 0, {"control": 0.0})]
    at, spent_s = BEGIN, 0.0
    for number, took_s in seconds.items():
        opened, at = at, at + timedelta(seconds=took_s)
        spent_s += control_s[number]
        rounds.append(RoundRecord("r", number, [], opened.isoformat(), at.isoformat()))
        samples.append(Sample(at.timestamp(), 0, {"control": spent_s}))
    seen = Sampled("mosquitto", BEGIN.timestamp(), samples, rounds, [], [], set(), None)
    report = compare_watched(seen, devices=100, hosts=usable_cores())
    assert report.pairs == 2
    assert (report.overhead_ms_per_device, report.unwatched_overhead_ms_per_device) == pytest.approx((22.0, 20.0))
    growth = (report.growth_low_ratio, report.growth_ratio, report.growth_high_ratio)
    assert growth == pytest.approx((0.1, 0.1, 0.1))
    assert report.unwatched_cpu_ms_per_device == pytest.approx({"control": 10.0})
    assert report.cpu_ms_per_device == pytest.approx({"control": 15.0})


def test_too_few_rounds_to_compare_are_refused() -> None:
    with pytest.raises(FedvitError, match="--rounds 2 has none"):
        run_rounds_bench(
            devices=1, rounds=2, hosts=1, cohorts=[], broker="auto", watched=True, progress=lambda line: None
        )
