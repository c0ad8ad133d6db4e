"""Until when a device is waited for; time is what the test says."""

import itertools

from coordinator.rounds.deadlines import (
    ALIVE,
    FIRST_S,
    FLOOR_S,
    SLACK,
    SLOW_LINK_BYTES_PER_S,
    SLOWEST_LINK_BYTES_PER_S,
    UPLOAD_S,
    Deadline,
    Links,
)

LIMIT_S = 10_000.0


def test_fixed_and_predicted_deadlines() -> None:
    deadline = Deadline.fixed(100.0, 60.0)
    deadline.sign(159.0)
    deadline.progressed(159.0, 5, 10)
    deadline.restart(159.0)
    assert (deadline.at, deadline.latest) == (160.0, 160.0)
    deadline = Deadline.fixed(100.0, 60.0, LIMIT_S)
    assert (deadline.at, deadline.latest) == (160.0, 100.0 + LIMIT_S)
    assert Deadline.expected(0.0, LIMIT_S, 100.0).at == SLACK * 100.0
    assert Deadline.expected(0.0, LIMIT_S, 0.5).at == FLOOR_S
    assert Deadline.expected(0.0, LIMIT_S, None).at == FIRST_S
    assert Deadline.expected(0.0, 50.0, 100.0).at == 50.0


def test_signs_of_life_extend_it_up_to_the_limit() -> None:
    """Predicted 20 s, so 60; at 55 s bytes move, at 85 s again. The longest silence was 30 s: 85 + 3 * 30."""
    deadline = Deadline.expected(0.0, 200.0, 20.0)
    deadline.sign(55.0)
    assert deadline.at == 55.0 + FLOOR_S
    deadline.sign(85.0)
    assert deadline.at == 85.0 + SLACK * 30.0
    deadline.sign(170.0)
    assert deadline.at == 200.0


def test_only_new_steps_are_a_sign_of_life() -> None:
    """A device that says the same again and again, or nonsense, does not move."""
    deadline = Deadline.expected(0.0, LIMIT_S, 20.0)
    deadline.progressed(50.0, 3, 10)
    updated = deadline.at
    for now, done, total in ((70.0, 3, 10), (75.0, 2, 10), (78.0, 2**31 - 1, 10), (79.0, -1, 10), (79.5, 0, 0)):
        deadline.progressed(now, done, total)
    assert deadline.at == updated == 50.0 + FLOOR_S
    deadline.progressed(79.9, 4, 10)
    assert deadline.at > updated


def test_without_a_prediction_the_first_steps_are_one() -> None:
    """10 s a step: at 30 s with 2 of 5 steps done 30 s are left, with slack 90; far sooner than the first patience."""
    deadline = Deadline.expected(0.0, LIMIT_S, None)
    deadline.progressed(20.0, 1, 5)
    assert deadline.at == FIRST_S
    deadline.progressed(30.0, 2, 5)
    assert deadline.at == 30.0 + SLACK * 30.0
    deadline.progressed(40.0, 3, 5)
    assert deadline.at == 40.0 + SLACK * 20.0


def test_a_device_that_begins_anew_gets_its_time_anew_within_the_limit() -> None:
    deadline = Deadline.expected(0.0, 250.0, 50.0)
    deadline.progressed(100.0, 7, 10)
    deadline.restart(120.0)
    assert deadline.at == 250.0
    deadline.progressed(130.0, 1, 10)
    assert deadline._sign_at == 130.0


def test_extension_is_sent_when_half_of_it_is_new() -> None:
    deadline = Deadline.expected(0.0, LIMIT_S, 20.0)
    deadline.announced = deadline.at
    deadline.sign(10.0)
    assert deadline.extension(10.0) is None, "60 s were told, and still hold"
    deadline.sign(55.0)
    assert deadline.at == 55.0 + SLACK * 45.0
    assert deadline.extension(55.0) == SLACK * 45.0
    deadline.announced = deadline.at
    assert deadline.extension(56.0) is None
    assert deadline.extension(deadline.at) is None


def test_silences_that_grow_are_not_allowed_to_grow_for_ever() -> None:
    """A device that is silent for as long as it may, again and again: a sign buys ten minutes at most."""
    deadline = Deadline.expected(0.0, 10**9, None)
    for _ in range(50):
        now = deadline.at
        deadline.sign(now)
        assert now + FLOOR_S <= deadline.at <= now + FIRST_S
    slow = Deadline.expected(0.0, 10**9, None)
    slow.progressed(1.0, 1, 1000)
    slow.progressed(590.0, 2, 1000)
    assert slow.at == 590.0 + FIRST_S, "two steps that far apart are no promise of a week"


def test_steps_move_a_deadline_to_so_many_times_the_prediction() -> None:
    deadline, now = Deadline.expected(0.0, 10**9, 100.0), 0.0
    for step in itertools.count(1):
        deadline.progressed(now := now + 20.0, step, 10**6)
        if now >= deadline.at:
            break
    assert deadline.at == ALIVE * 100.0
    quick = Deadline.expected(0.0, 10**9, 1.0)
    for now in range(10, 2000, 10):
        quick.progressed(float(now), now, 10**6)
    assert quick.at == FIRST_S, "what should take a second has ten minutes, if it moves"


def test_bytes_and_our_own_delay_move_a_deadline_beyond_that() -> None:
    """A link of four times the slowest is never too slow, however wrong the prediction was."""
    deadline = Deadline.expected(0.0, 10**9, 1.0)
    for now in range(10, 20_000, 10):
        deadline.received(float(now), int(40 * SLOWEST_LINK_BYTES_PER_S))
        assert deadline.at >= now + FLOOR_S
    waiting = Deadline.expected(0.0, 10**9, 1.0)
    for now in range(1, 20_000):
        waiting.kept_waiting(float(now))
        assert waiting.at >= now + FLOOR_S


def test_deadline_of_an_upload_and_the_speed_of_a_link() -> None:
    for deadline in (Deadline.fixed(0.0, 10**6), Deadline.expected(0.0, 10**6, 10**5)):
        assert deadline.upload_until > 10**9, "nothing is fetched"
        deadline.fetching(50.0)
        assert deadline.upload_until == 50.0 + UPLOAD_S
        deadline.received(60.0, int(SLOWEST_LINK_BYTES_PER_S) * 7)
        assert deadline.upload_until == 50.0 + UPLOAD_S + 7.0
        deadline.kept_waiting(70.0)
        assert deadline.upload_until > 10**9, "it is its turn no longer"
    links = Links()
    assert links.seconds("a", 250_000) == 250_000 / SLOW_LINK_BYTES_PER_S
    links.measured("a", 1_000_000, 1.0)
    links.measured("a", 3_000_000, 1.0)
    assert links.seconds("a", 4_000_000) == 2.0
    assert links.seconds("b", 250_000) == 2.0
