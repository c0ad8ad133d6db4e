"""Damage to valid bytes, as a broken or hostile peer could send them. All choices are those of a random generator."""

import itertools
import json
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from fedvit.wire.messages import MAX_MESSAGE_BYTES, Task
from fedvit.wire.transfer import CHUNK_BYTES

INTEGERS = (
    0, 1, -1, 2, 127, 128, 255, 65_535, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
)  # fmt: skip
FLOATS = (0.0, -0.0, -1.0, 5e-324, 1e-30, 1e30, 1.7e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "", "\0", "a" * 70_000, "é" * 900, "../../etc/passwd", "..", "+", "#", "a/b", "blake3:", "blake3:" + "0" * 64,
    "blake3:../../" + "0" * 58, "blake3:" + "Z" * 64, "\x1b[2J\x1b]0;title\x07", "train", "evaluate", "task", "NaN",
)  # fmt: skip
EMPTY: tuple[Any, ...] = (None, True, False, b"", b"\xff" * 40, [], {})
LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
"""Headers of a msgpack array, map, text and bytes with 4 billion elements."""
CHUNK_FIELDS = ((">I", 8), (">I", 12), (">Q", 16), (">I", 56), (">I", 60))
"""Format and place of the numbers in a chunk's header."""
PIECES: tuple[Callable[[Random], bytes], ...] = (
    lambda random: random.randbytes(random.choice((1, 2, 4, 100))),
    lambda random: random.choice(LENGTHS),
    lambda random: random.choice((b"\x91", b"\x81\xa1a")) * 20_000,  # nested containers
)

Path = tuple[Any, ...]


def damage_message(random: Random, raw: bytes, other: bytes) -> bytes:
    """Damage a control message; `other` is another valid one."""
    if random.random() < 0.55:
        return raw[:1] + damage_structure(random, raw[1:], other[1:])
    if random.random() < 0.1:
        return bytes([random.randrange(256)]) + raw[1:]
    if random.random() < 0.03:
        return raw + bytes(MAX_MESSAGE_BYTES)
    return damage_bytes(random, raw, other)


def damage_bytes(random: Random, raw: bytes, other: bytes) -> bytes:
    """Damage bytes of any format: flip bits, cut, splice, overwrite, insert, or replace all."""
    at = random.randrange(len(raw) + 1)
    match random.randrange(8):
        case 0:
            changed = bytearray(raw or b"\0")
            for _ in range(random.choice((1, 1, 2, 8))):
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            return bytes(changed)
        case 1:
            return raw[:at]
        case 2:
            return raw[:at] + other[random.randrange(len(other) + 1) :]
        case 3:
            piece = random.choice((b"\0" * 8, b"\xff" * 8, random.randbytes(8)))
            return raw[:at] + piece + raw[at + len(piece) :]
        case 4:
            return random.randbytes(random.choice((0, 1, 2, 64, 1000)))
        case number:
            return raw[:at] + PIECES[number - 5](random) + raw[at:]


def damage_structure(random: Random, raw: bytes, other: bytes) -> bytes:
    """Damage a msgpack document's structure: the result is valid msgpack with other content."""
    value, foreign = msgspec.msgpack.decode(raw), msgspec.msgpack.decode(other)
    for _ in range(1 + (random.random() < 0.3)):
        value = _change(random, value, foreign)
    try:
        return msgspec.msgpack.encode(value)
    except (RecursionError, OverflowError):  # too deep or too large for msgpack
        return damage_bytes(random, raw, other)


def damage_chunk(random: Random, raw: bytes, other: bytes) -> bytes:
    """Damage a chunk: a field of its header, the length of its payload, or any bytes."""
    draw = random.random()
    if draw < 0.5 and len(raw) >= 64:
        form, at = random.choice(CHUNK_FIELDS)
        number = struct.pack(form, random.choice(INTEGERS) % 2 ** (8 * struct.calcsize(form)))
        return raw[:at] + number + raw[at + len(number) :]
    return raw + bytes(CHUNK_BYTES) if draw < 0.55 else damage_bytes(random, raw, other)


def damage_tensors(random: Random, raw: bytes, other: bytes) -> bytes:
    """Damage safetensors: its header's meaning (shapes, dtypes, offsets, names), its numbers, or any bytes."""
    draw, size, foreign = random.random(), int.from_bytes(raw[:8], "little"), int.from_bytes(other[:8], "little")
    if draw < 0.5:
        header = _change(random, json.loads(raw[8 : 8 + size]), json.loads(other[8 : 8 + foreign]))
        try:
            text = json.dumps(header, default=repr).encode()
        except RecursionError:
            return damage_bytes(random, raw, other)
        return struct.pack("<Q", len(text)) + text + raw[8 + size :]
    if draw < 0.6:
        return struct.pack("<Q", random.choice(INTEGERS) % 2**64) + raw[8:]
    if draw < 0.75:
        at = random.randrange(8 + size, max(9 + size, len(raw) - 3))
        number = struct.pack("<f", random.choice((math.nan, math.inf, -math.inf, 3e38)))
        return raw[:at] + number + raw[at + 4 :]
    return damage_bytes(random, raw, other)


def replace_delta_chains(random: Random, task: bytes) -> bytes:
    """Replace the recipes of a task by steps that a search could follow in too many ways, or too deep."""
    value = msgspec.msgpack.decode(task[1:])
    places = {name: place for place, name in enumerate(Task.__struct_fields__, 1)}
    target, patch = next(iter(value[places["groups"]].values())), value[places["blobs"]][-1]
    names = [target, *(f"blake3:{number:064x}" for number in range(random.choice((2, 12, 24, 200))))]
    steps = (
        [(one, other) for one in names[:16] for other in names[:16] if one != other],  # circles
        [step for step in itertools.pairwise(names) for _ in range(2)],  # a ladder
        list(itertools.pairwise(names)),  # a chain
    )
    value[places["recipes"]] = [[target, base, patch, "none"] for target, base in random.choice(steps)]
    return task[:1] + msgspec.msgpack.encode(value)


def _change(random: Random, value: Any, foreign: Any) -> Any:
    """Copy the value with one element replaced, dropped, doubled, renamed, or exchanged with one of another value."""
    paths = _list_paths(value)
    if len(paths) < 2:
        return _make_strange(random, value)
    path = random.choice(paths[1:])
    top = home = value.copy()
    for key in path[:-1]:
        home[key] = home[key].copy()
        home = home[key]
    key = path[-1]
    match random.randrange(7):
        case 0:
            home.pop(key)
        case 1 if isinstance(home, list):
            home[key:key] = [home[key]] * random.choice((1, 2, 500))
        case 1:
            home[f"{key}2"] = home[key]
        case 2 if isinstance(home, list):
            other = random.randrange(len(home))
            home[key], home[other] = home[other], home[key]
        case 2:
            home[random.choice(TEXTS)] = home.pop(key)
        case 3:
            for step in random.choice(_list_paths(foreign)):
                foreign = foreign[step]
            home[key] = foreign
        case _:
            home[key] = _make_strange(random, home[key])
    return top


def _make_strange(random: Random, value: Any) -> Any:
    """Make an unusual value, mostly of the same type, so that it passes the schema."""
    pick = random.choice
    if random.random() < 0.35:
        deep: Any = []
        for _ in range(pick((3, 100, 900))):
            deep = [deep]
        return pick((pick(INTEGERS), pick(FLOATS), pick(TEXTS), pick(EMPTY), deep))
    match value:
        case bool():
            return not value
        case int():
            return pick((pick(INTEGERS), value + 1, value - 1, -value, value * 1000, float(value)))
        case float():
            return pick((pick(FLOATS), -value, value * 1e10))
        case str():
            return pick((pick(TEXTS), value[:-1], value * 2, value + "\0"))
        case list():
            return pick((value * 2, value[:1] * pick((2, 300, 5000)), [], [*value, value]))
    return pick(EMPTY)


def _list_paths(value: Any, path: Path = ()) -> list[Path]:
    """List the paths of all elements of a value, itself included; of large containers only the first elements."""
    paths: list[Path] = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in itertools.islice(items, 40):
        paths += _list_paths(inner, (*path, key))
    return paths
