"""The graph of a sum: each device has masks in common with few neighbours, however large the cohort is.

The graph follows from everybody's nonces: devices are put in a circle in a random order, and each is the neighbour of
those next to it. So nobody who chose a nonce before the others were known can choose its neighbours.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from fedvit.errors import BadPayload
from fedvit.wire.messages import MAX_NEIGHBOURS

MOST_FAILURES = 0.01
"""Probability with which an attempt at a sum may fail because devices leave."""


def digest_roster(roster: Mapping[str, bytes]) -> bytes:
    """Return the digest of all devices and their nonces, 32 bytes."""
    digest = hashlib.sha256(b"fedvit sum roster 1")
    for device in sorted(roster):
        name = device.encode()
        digest.update(len(name).to_bytes(2, "big") + name + len(roster[device]).to_bytes(2, "big") + roster[device])
    return digest.digest()


def pack_devices(roster: Mapping[str, bytes], devices: Iterable[str]) -> bytes:
    """Return a bit for each device of the roster, in the order of names: whether it is one of `devices`.

    >>> pack_devices({"a": b"", "b": b"", "c": b""}, ["a", "c"])
    b'\\xa0'
    """
    here = set(devices)
    return np.packbits([device in here for device in sorted(roster)]).tobytes()


def unpack_devices(roster: Mapping[str, bytes], packed: bytes) -> set[str]:
    """Return the devices whose bits are set. Raises BadPayload if there are not as many bits as devices."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    if len(packed) != -(-len(roster) // 8) or bits[len(roster) :].any():
        raise BadPayload("FV2312", f"a list of {8 * len(packed)} devices in a sum of {len(roster)}")
    return {device for device, bit in zip(sorted(roster), bits, strict=False) if bit}


def find_neighbours(roster: Mapping[str, bytes], degree: int) -> dict[str, list[str]]:
    """Return the neighbours of each device, sorted: `degree` (one more if it is odd), or all others if fewer."""
    circle = _draw_circle(roster)
    return {device: _read_circle(circle, degree, place) for place, device in enumerate(circle)}


def list_neighbours(roster: Mapping[str, bytes], degree: int, device: str) -> list[str]:
    """Return the neighbours of one device, as `find_neighbours` does."""
    circle = _draw_circle(roster)
    return _read_circle(circle, degree, circle.index(device))


def _draw_circle(roster: Mapping[str, bytes]) -> list[str]:
    seed = digest_roster(roster)
    return sorted(roster, key=lambda name: hashlib.sha256(seed + name.encode()).digest())


def _read_circle(circle: list[str], degree: int, place: int) -> list[str]:
    """Return the neighbours of the device at a place of the circle."""
    each, count = -(-degree // 2), len(circle)
    if degree >= count - 1:
        each = count
    steps = range(-min(each, count - 1), min(each, count - 1) + 1)
    return sorted({circle[(place + step) % count] for step in steps} - {circle[place]})


def count_least_devices(devices: int, degree: int) -> int:
    """Return the fewest devices whose sum can be revealed, of so many that have sent keys.

    Around each device in the sum, at most `most` of its holders are not. So gaps in the circle are at most `most` long,
    and around a device in a gap, seen from the next one in the sum, at least `least` are in the sum. Pairs of a device
    in the sum and one that is not, counted from both sides, give the bound.

    >>> count_least_devices(4, 20), count_least_devices(100, 20), count_least_devices(1000, 20)
    (3, 67, 667)
    """
    holders = count_holders(devices, degree)
    needed = count_needed_holders(holders)
    if holders == devices:
        return needed
    most = holders - needed
    least = holders - -(-most // 2) - most
    return max(needed, -(-devices * least // (least + most)))


def choose_degree(devices: int, leaving: float, least: int) -> int:
    """Choose the number of neighbours, `least` or more, for sums of which this share of devices leaves in each step.

    An attempt then fails with a probability of at most `MOST_FAILURES`, unless even the most neighbours are too few.

    >>> [choose_degree(devices, 0.05, 20) for devices in (20, 100, 1000)], choose_degree(1000, 0.0, 20)
    ([20, 59, 77], 20)
    """
    most = max(least, min(MAX_NEIGHBOURS, devices - 1))
    degrees = range(least, most + 1)
    return next(
        (degree for degree in degrees if compute_failure_bound(devices, degree, leaving) <= MOST_FAILURES), most
    )


def compute_failure_bound(devices: int, degree: int, leaving: float) -> float:
    """Return a bound of the probability that an attempt fails: that a device has too few holders who reveal shares.

    Of the devices that have sent keys, this share leaves with the shares, with the masked numbers, and in the last two
    steps together, which are short.
    """
    holders, stays = count_holders(devices, degree), (1 - leaving) ** 3
    needed = count_needed_holders(holders)
    fails = sum(math.comb(holders, left) * stays**left * (1 - stays) ** (holders - left) for left in range(needed))
    return fails if holders == devices else min(1.0, devices * fails)


def count_holders(devices: int, degree: int) -> int:
    """Return the number of holders of a device's shares, itself included."""
    return min(devices, degree + degree % 2 + 1)


def count_needed_holders(holders: int) -> int:
    """Return how many of the holders of a device's shares must reveal them, more than two thirds.

    Each honest holder reveals a share of one kind only. As 2 * needed > holders + holders / 3, the coordinator cannot
    get both secrets of a device, even together with a third of the holders.

    >>> [count_needed_holders(holders) for holders in (3, 4, 21)]
    [3, 3, 15]
    """
    return 2 * holders // 3 + 1


def find_least_reserve(
    neighbours: Mapping[str, Collection[str]], left: Collection[str], began: Collection[str]
) -> tuple[int, str]:
    """Find the device that can spare the fewest holders of its shares, and how many; negative: too few are left.

    Also of a device that left, shares are needed if one that did not has masks in common with it.

    >>> find_least_reserve({"a": "bcd", "b": "acd", "c": "abd", "d": "abc"}, "abc", "abcd")
    (0, 'a')
    """
    here, reserves = set(left), []
    for device in began:
        holders = {device, *neighbours[device]}
        if here.isdisjoint(holders):
            continue
        reserves.append((len(here & holders) - count_needed_holders(len(holders)), device))
    return min(reserves)
