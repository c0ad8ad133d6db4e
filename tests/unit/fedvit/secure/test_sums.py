"""Sums in memory: right, or failed with a reason; and nothing but the sum is learnt."""

import itertools

import msgspec
import numpy as np
import pytest

from fedvit.errors import BadPayload, NotAllowed
from fedvit.secure.attempt import begin_attempt
from fedvit.secure.device import DeviceSum, derive_mask
from fedvit.secure.fixed_point import decode_mean, encode_values, find_error_bound
from fedvit.secure.keys import Binding, KeyPair
from fedvit.secure.masks import add_masks
from fedvit.secure.neighbours import (
    _draw_circle,
    choose_degree,
    compute_failure_bound,
    count_needed_holders,
    digest_roster,
    find_neighbours,
)
from fedvit.secure.server import STEPS, SumServer, SumState
from fedvit.secure.shamir import SHARE_BYTES, join_shares
from fedvit.secure.vectors import Vector, unpack_vector
from fedvit.wire.messages import SumAsk, SumId, SumInbox, SumInvite, SumPeers, SumReveal, SumShares, SumSurvivors
from tests.support.codes import has_code
from tests.support.sums import (
    SUM,
    Group,
    HollowDevice,
    MemoryDevice,
    add_payloads,
    count_revealed,
    has_hollow_sum,
    make_devices,
    make_terms,
    play,
    play_attempts,
    play_drawn,
)

WORDS, EXACT = 40, 3
SCHEDULES, PARTS = 500, 10


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_drawn_schedules_give_the_right_sum_or_a_reason(part: int) -> None:
    drawn = [play_drawn(seed) for seed in range(part, SCHEDULES, PARTS)]
    assert not any(one.is_wrong or one.revealed for one in drawn)
    assert sum(one.has_sum for one in drawn) > len(drawn) / 2


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, 1000])
def test_large_groups_have_a_sum_though_devices_leave_in_each_step(count: int) -> None:
    """With the neighbours that the share of those that leave asks for."""
    draw, devices = np.random.default_rng(count), make_devices(count, words=8)
    gone = {(name, step) for name in devices for step in STEPS if draw.random() < 0.02}
    degree = choose_degree(count, 0.03, 20)  # the last two steps count as one, and here both are as long
    played = play_attempts(
        devices, lambda left: make_terms(left, degree), drops=lambda device, step: (device, step) in gone
    )
    assert played.total is not None
    right = add_payloads([devices[name] for name in played.server.state.masked], 32)
    assert all(map(np.array_equal, played.total, right))
    assert count_revealed(devices) == 0


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_neighbours_follow_the_share_of_devices_that_leave(count: int) -> None:
    """A twentieth of the devices leaves in each step: one attempt fails often with 20 neighbours, never with more."""
    few, enough = (Group(count, choose_degree(count, leaving, 20), 0.05) for leaving in (0.0, 0.05))
    assert few.neighbours == 20
    assert compute_failure_bound(count, enough.neighbours, 0.05) <= 0.01 < compute_failure_bound(count, 20, 0.05)
    assert sum(has_hollow_sum(few, seed, attempts=1) for seed in range(20)) <= 14
    assert all(has_hollow_sum(enough, seed, attempts=1) for seed in range(20))


def test_repeated_attempt_has_new_keys_and_the_same_sum() -> None:
    devices = make_devices(6, seed=1)
    drops = {("pi-0", "masked"), ("pi-1", "masked"), ("pi-2", "masked"), ("pi-3", "masked")}
    first = play(devices, make_terms(6), drops=lambda device, step: (device, step) in drops)
    assert first.total is None
    assert "sent their numbers" in first.reason
    second = play(devices, make_terms(6), sum_id=SumId("run", 1, "train", 2))
    assert second.total is not None
    assert np.array_equal(second.total.words, add_payloads(list(devices.values()), 32).words)
    assert not {*first.masked.values()} & {*second.masked.values()}


@pytest.mark.parametrize("step", STEPS[:3])
def test_attempt_begins_again_with_the_devices_that_are_left(step: str) -> None:
    """Four of twelve devices leave, and another one in the last step: one attempt alone has too few shares."""
    devices = make_devices(12, seed=11)
    left = {(f"pi-{number}", step) for number in range(4)} | {("pi-4", "reveal")}
    alone = play(devices, make_terms(12, 11), drops=lambda device, step: (device, step) in left)
    assert (alone.total is None) == (step != "keys")
    devices = make_devices(12, seed=11)
    played = play_attempts(
        devices, lambda count: make_terms(count, 11), drops=lambda device, step: (device, step) in left
    )
    assert played.total is not None
    assert played.server.state.sum.attempt == (1 if step == "keys" else 2)
    rest = [device for name, device in devices.items() if name not in {f"pi-{number}" for number in range(4)}]
    assert np.array_equal(played.total.words, add_payloads(rest, 32).words)
    assert count_revealed(devices) == 0


def test_nothing_is_revealed_if_a_device_that_left_has_too_few_holders() -> None:
    """Seven of the 21 holders of the device at place 0 leave, itself included, but only six of any other's."""
    devices = {f"pi-{number}": HollowDevice(f"pi-{number}") for number in range(40)}
    roster = {name: device.answer(SumInvite(SUM, make_terms(40, 20))).keys.nonce for name, device in devices.items()}
    circle = _draw_circle(roster)
    left = {circle[place] for place in (-10, -2, -1, 0, 1, 2, 10)}
    played = play(devices, make_terms(40, 20), drops=lambda device, step: step == "masked" and device in left)
    assert f"only 14 of 20 neighbours of {circle[0]}" in played.reason
    assert played.server.state.step == "masked"


def test_numbers_in_a_sum_are_not_added_again() -> None:
    devices = make_devices(4, seed=2)
    assert play(devices, make_terms(4)).total is not None
    rest = {name: device for name, device in devices.items() if name != "pi-0"}
    again = play(rest, make_terms(4), sum_id=SumId("run", 1, "train", 2))
    assert again.total is None
    assert "in a sum already" in again.reason


def test_coordinator_continues_at_the_reveal_after_a_restart() -> None:
    devices = make_devices(5, seed=3)
    terms = make_terms(5)
    played = play(devices, terms, drops=lambda device, step: step == "reveal" or (device, step) == ("pi-4", "masked"))
    assert played.total is None
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(played.server.state), type=SumState)
    server = SumServer(state, state.masked, words=WORDS, exact=EXACT)
    for device in state.masked:
        server.restore_masked(device, played.masked[device])
    for device in sorted(server.waiting):
        assert server.take(device, devices[device].answer(server.question(device)))  # type: ignore[arg-type]
    server.close_step()
    assert np.array_equal(server.unmask().words, add_payloads([devices[name] for name in state.masked], 32).words)


def test_decoded_mean_is_within_the_stated_error() -> None:
    draw = np.random.default_rng(4)
    for bits, count in itertools.product((16, 24, 32), (3, 50)):
        terms = make_terms(count, bits=bits)
        weights = draw.integers(1, 101, count)
        values = draw.normal(0.0, 1.0, (count, 1000)).clip(-4.0, 4.0).astype(np.float32)
        total = Vector.zeros(1000, 0)
        for value, weight in zip(values, weights, strict=True):
            words, clipped = encode_values(value, int(weight), terms, draw)
            assert clipped == 0
            total.add(Vector(words, np.zeros(0, np.uint64)), bits)
        mean = decode_mean(total.words, int(weights.sum()), terms)
        exact = (values.astype(np.float64) * weights[:, None]).sum(0) / weights.sum()
        assert np.abs(mean - exact).max() <= find_error_bound(int(weights.sum()), terms)
        assert (
            abs((mean - exact).mean()) < find_error_bound(int(weights.sum()), terms) / 10
        )  # the rounding has mean zero


def test_largest_numbers_do_not_wrap_and_larger_ones_are_clipped() -> None:
    terms = make_terms(3, bits=16)
    total = Vector.zeros(2, 0)
    for _ in range(3):
        words, clipped = encode_values(np.float32([1e9, -1e9]), 1000, terms, np.random.default_rng(5))
        assert clipped == 2
        total.add(Vector(words, np.zeros(0, np.uint64)), 16)
    assert decode_mean(total.words, 300, terms).tolist() == [4.0, -4.0]


# --- nothing is learnt ------------------------------------------------------------------------------------


def _chi_square(values: np.ndarray, buckets: int) -> float:
    """(chi2 - expectation) / deviation: of uniform numbers about a normal number."""
    counts = np.bincount(values, minlength=buckets)
    expected = len(values) / buckets
    return float((((counts - expected) ** 2 / expected).sum() - (buckets - 1)) / np.sqrt(2 * (buckets - 1)))


def _uniform(masked: Vector, plain: np.ndarray, bits: int) -> None:
    for shift in range(0, bits, 8):
        assert abs(_chi_square((masked.words >> shift & 255).astype(np.int64), 256)) < 6
    words = masked.words.astype(np.float64)
    assert abs(np.corrcoef(words, plain)[0, 1]) < 6 / np.sqrt(len(words))


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_masked_numbers_look_uniform(bits: int) -> None:
    count = 1_000_000
    plain = (np.arange(count) % 1000).astype(np.uint32)
    devices = {f"pi-{n}": MemoryDevice(f"pi-{n}", Vector(plain, np.zeros(4, np.uint64))) for n in range(3)}
    played = play(devices, make_terms(3, bits=bits))
    for content in played.masked.values():
        _uniform(unpack_vector(content, count, 4, bits), plain, bits)


def test_colluding_neighbours_and_the_coordinator_learn_nothing() -> None:
    """A third of the holders tell the coordinator everything, and it has all messages of a finished sum."""
    draw, count = np.random.default_rng(6), 200_000
    plain = (np.arange(count) % 1000).astype(np.uint32)
    names = [f"pi-{number}" for number in range(10)]
    devices = {name: MemoryDevice(name, Vector(plain, np.zeros(1, np.uint64))) for name in names}
    terms = make_terms(10, 9)
    played = play(devices, terms)
    victim, state = "pi-0", played.server.state
    holders = sorted(names)
    needed = count_needed_holders(len(holders))
    colluding = list(draw.permutation([name for name in names if name != victim]))[: len(holders) // 3]
    # its own mask is known, as its numbers are in the sum. Its key is not: honest neighbours reveal no share of it
    attempt = devices[victim].kept
    assert attempt
    assert attempt.peers
    binding = Binding.of(b"", state.sum, state.terms, digest_roster(attempt.peers.roster))
    shares = {}
    for name in colluding:
        kept = devices[name].kept
        assert kept
        assert kept.inbox
        part = DeviceSum(name, kept, lambda attempt: None)
        shares[holders.index(name) + 1] = part._unseal_shares(kept.inbox)[victim][SHARE_BYTES:]
    assert len(shares) < needed
    # with any value of the missing shares some secret fits: all secrets are equally likely
    missing = [place for place in range(1, len(holders) + 1) if place not in shares][: needed - len(shares)]
    guesses = set()
    for _ in range(20):
        drawn = {place: draw.bytes(32).rjust(33, b"\0") for place in missing}
        guesses.add(join_shares(shares | drawn))
    assert len(guesses) == 20
    assert attempt.mask_secret not in guesses
    # what is left of its numbers without all known masks is still uniform
    left = unpack_vector(played.masked[victim], count, 1, 32)
    add_masks(left, [(binding.derive(attempt.self_seed, "self", victim), True)], 32)
    for name in colluding:
        kept = devices[name].kept
        assert kept
        key = derive_mask(binding, KeyPair(kept.mask_secret), state.keys[victim].keys.mask_key, name, victim)
        add_masks(left, [(key, victim < name)], 32)
    _uniform(left, plain, 32)


def test_only_one_of_both_shares_is_revealed() -> None:
    devices = make_devices(9, seed=7)
    play(devices, make_terms(9), drops=lambda device, step: step == "agree" or (device, step) == ("pi-8", "shares"))
    ask, signed = SumAsk(SUM, {f"pi-{number}": b"" for number in range(1, 8)}), b"\xff\0"  # without pi-8
    with pytest.raises(NotAllowed, check=has_code("FV1451", "step of the sum is missing")):
        devices["pi-0"].answer(ask)
    devices["pi-0"].answer(SumSurvivors(SUM, signed))
    devices["pi-0"].answer(SumSurvivors(SUM, signed))  # the same again
    with pytest.raises(NotAllowed, check=has_code("FV1451", "2 of 7 devices have signed")):
        devices["pi-0"].answer(SumAsk(SUM, {"pi-1": b""}))
    for strangers in ({"pi-8": b""}, {"pi-0": b""}, {"pi-9": b""}):
        with pytest.raises(NotAllowed, check=has_code("FV1451", "others than its neighbours")):
            devices["pi-0"].answer(SumAsk(SUM, ask.signatures | strangers))
    assert isinstance(devices["pi-0"].answer(ask), SumReveal)
    with pytest.raises(NotAllowed, check=has_code("FV1451", "two different")):
        devices["pi-0"].answer(SumSurvivors(SUM, b"\xfe\0"))
    for wrong in (b"\xbf\0", b"\xff\x80"):  # without the device itself; with one that has sent no shares
        with pytest.raises(NotAllowed, check=has_code("FV1451", "contradicts")):
            devices["pi-1"].answer(SumSurvivors(SUM, wrong))
    for wrong in (b"\xff\x40", b"\xff\0\0", b"\xff"):  # of more or fewer devices than the sum has
        with pytest.raises(BadPayload, check=has_code("FV2312")):
            devices["pi-1"].answer(SumSurvivors(SUM, wrong))
    with pytest.raises(NotAllowed, check=has_code("FV1451", "are in the sum")):
        devices["pi-1"].answer(SumSurvivors(SUM, b"\xfc\0"))


def test_one_mask_never_covers_two_payloads() -> None:
    devices = make_devices(4, seed=8)
    play(devices, make_terms(4), drops=lambda device, step: step == "reveal")
    kept = devices["pi-0"].kept
    assert kept
    assert kept.inbox
    assert devices["pi-0"].answer(kept.inbox) == devices["pi-0"].answer(kept.inbox)
    fewer = dict(list(kept.inbox.sealed.items())[:2])
    with pytest.raises(NotAllowed, check=has_code("FV1451", "two different")):
        devices["pi-0"].answer(SumInbox(SUM, fewer))
    with pytest.raises(NotAllowed, check=has_code("FV1451", "over")):
        devices["pi-0"].answer(SumInvite(SUM, make_terms(5)))


def test_neighbours_that_do_not_follow_from_the_devices_are_refused() -> None:
    devices = make_devices(12, seed=9)
    terms = make_terms(12, 4)
    server = play(devices, terms, drops=lambda device, step: step == "shares").server
    asked = SumServer(server.state, devices, words=WORDS, exact=EXACT)
    asked.state.step = "shares"
    asked._find_neighbours()
    question = asked.question("pi-0")
    assert isinstance(question, SumPeers)
    others = [name for name in devices if name not in question.peers and name != "pi-0"]
    chosen = {name: server.state.keys[name].keys for name in others[:4]}
    with pytest.raises(BadPayload, check=has_code("FV2312", "do not follow")):
        devices["pi-0"].answer(SumPeers(SUM, question.roster, chosen))
    assert isinstance(devices["pi-0"].answer(question), SumShares)


def test_split_views_of_the_devices_fail() -> None:
    """Shares for another roster cannot be opened, so that all devices of a sum have seen the same one."""
    devices = make_devices(4, seed=10)
    play(devices, make_terms(4), drops=lambda device, step: step == "masked")
    kept = devices["pi-1"].kept
    assert kept
    assert kept.peers
    other = MemoryDevice("pi-0", devices["pi-0"].payload)
    other.kept = begin_attempt(SumInvite(SUM, make_terms(4)), None)
    roster = kept.peers.roster | {"pi-0": other.kept.nonce, "pi-9": bytes(16)}
    peers = dict(kept.peers.peers)
    peers.pop("pi-0")
    peers |= {"pi-1": peers["pi-2"], "pi-9": peers["pi-2"]}
    with pytest.raises(BadPayload, check=has_code("FV2312")):
        other.answer(SumPeers(SUM, roster, peers))


def test_graph_is_regular_and_mutual() -> None:
    roster = {f"pi-{number}": bytes([number]) * 16 for number in range(30)}
    neighbours = find_neighbours(roster, 6)
    assert {len(peers) for peers in neighbours.values()} == {6}
    assert all(device in neighbours[peer] for device, peers in neighbours.items() for peer in peers)
    assert find_neighbours(roster | {"pi-0": bytes([99]) * 16}, 6) != neighbours
