from fedvit.timings import RECENT_S, LoopWatch, Timings


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000 * RECENT_S

    def __call__(self) -> float:
        return self.now


def test_timings_count_and_add_up() -> None:
    timings = Timings(Clock())
    for seconds in (0.5, 2.0, 1.0):
        timings.add(seconds)
    assert (timings.count, timings.total_s, timings.longest_s()) == (3, 3.5, 2.0)


def test_longest_is_forgotten_after_two_intervals() -> None:
    clock = Clock()
    timings = Timings(clock)
    timings.add(3.0)
    clock.now += RECENT_S
    timings.add(1.0)
    assert timings.longest_s() == 3.0
    clock.now += RECENT_S
    assert timings.longest_s() == 1.0
    clock.now += 2 * RECENT_S
    assert timings.longest_s() == 0.0
    assert timings.count == 2


def test_loop_watch_counts_only_what_exceeds_the_usual_turn() -> None:
    clock, calls = Clock(), list[float]()
    loop = LoopWatch(0.1, lambda: calls.append(clock.now), clock)
    clock.now += 0.05
    loop.turn()
    clock.now += 2.1
    loop.turn()
    assert loop.delays.count == len(calls) == 2
    assert abs(loop.delays.longest_s() - 2.0) < 1e-6
    assert abs(loop.delays.total_s - 2.0) < 1e-6
    clock.now += 7
    assert loop.silent_s() == 7
