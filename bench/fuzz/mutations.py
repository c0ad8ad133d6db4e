"""Mutations of valid bytes into bytes that a broken or hostile peer could send. The same seed gives the same result."""

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

Path = tuple[Any, ...]


class Mutator:
    """Every public method takes bytes and returns (kind of damage, damaged bytes)."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def message(self, raw: bytes, other: bytes) -> tuple[str, bytes]:
        """Damage a control message; `other` is another valid one."""
        if self.random.random() < 0.55:
            kind, body = self.document(raw[1:], other[1:])
            return kind, raw[:1] + body
        if self.random.random() < 0.1:
            return "version", bytes([self.random.randrange(256)]) + raw[1:]
        if self.random.random() < 0.03:
            return "too long", raw + bytes(MAX_MESSAGE_BYTES)
        return self.damaged(raw, other)

    def damaged(self, raw: bytes, other: bytes) -> tuple[str, bytes]:
        """Damage bytes of any format."""
        mutations: tuple[Callable[[bytes, bytes], bytes], ...] = (
            self._flipped, self._cut, self._inserted, self._spliced, self._overwritten, self._noise, self._lengthened,
            self._nested,
        )  # fmt: skip
        mutation = self.random.choice(mutations)
        return mutation.__name__.removeprefix("_"), mutation(raw, other)

    def document(self, raw: bytes, other: bytes) -> tuple[str, bytes]:
        """Damage a msgpack document's structure: the result is valid msgpack with other content."""
        value, foreign = msgspec.msgpack.decode(raw), msgspec.msgpack.decode(other)
        kind = ""
        for _ in range(1 + (self.random.random() < 0.3)):
            kind, value = self._changed(value, foreign)
        try:
            return kind, msgspec.msgpack.encode(value)
        except (RecursionError, OverflowError):  # too deep or too large for msgpack
            return self.damaged(raw, other)

    def chunk(self, raw: bytes, other: bytes) -> tuple[str, bytes]:
        """Damage a chunk: a field of its header, the length of its payload, or any bytes."""
        fields = ((">I", 8), (">I", 12), (">Q", 16), (">I", 56), (">I", 60))
        draw = self.random.random()
        if draw < 0.5 and len(raw) >= 64:
            form, at = self.random.choice(fields)
            limit = 2 ** (8 * struct.calcsize(form))
            number = struct.pack(form, self.random.choice(INTEGERS) % limit)
            return "header", raw[:at] + number + raw[at + len(number) :]
        if draw < 0.55:
            return "too long", raw + bytes(CHUNK_BYTES)
        return self.damaged(raw, other)

    def tensors(self, raw: bytes, other: bytes) -> tuple[str, bytes]:
        """Damage safetensors: its header's meaning (shapes, dtypes, offsets, names), its numbers, or any bytes."""
        draw = self.random.random()
        size = int.from_bytes(raw[:8], "little")
        if draw < 0.5:
            kind, header = self._changed(json.loads(raw[8 : 8 + size]), json.loads(_header(other)))
            try:
                text = json.dumps(header, default=repr).encode()
            except RecursionError:
                return self.damaged(raw, other)
            return f"header: {kind}", struct.pack("<Q", len(text)) + text + raw[8 + size :]
        if draw < 0.6:
            return "header size", struct.pack("<Q", self.random.choice(INTEGERS) % 2**64) + raw[8:]
        if draw < 0.75:
            at = self.random.randrange(8 + size, max(9 + size, len(raw) - 3))
            number = struct.pack("<f", self.random.choice((math.nan, math.inf, -math.inf, 3e38)))
            return "numbers", raw[:at] + number + raw[at + 4 :]
        return self.damaged(raw, other)

    def delta_steps(self, task: bytes) -> tuple[str, bytes]:
        """Replace the recipes of a task by steps that a search could follow in too many ways, or too deep."""
        value = msgspec.msgpack.decode(task[1:])
        places = {name: place for place, name in enumerate(Task.__struct_fields__, 1)}
        target, patch = next(iter(value[places["groups"]].values())), value[places["blobs"]][-1]
        names = [target, *(f"blake3:{number:064x}" for number in range(self.random.choice((2, 12, 24, 200))))]
        links = {
            "circle": [(one, other) for one in names[:16] for other in names[:16] if one != other],
            "ladder": [link for link in itertools.pairwise(names) for _ in range(2)],
            "chain": list(itertools.pairwise(names)),
        }
        kind = self.random.choice(tuple(links))
        value[places["recipes"]] = [[target, base, patch, "none"] for target, base in links[kind]]
        return f"steps in a {kind}", task[:1] + msgspec.msgpack.encode(value)

    # --- structure ------------------------------------------------------------------------------------

    def _changed(self, value: Any, foreign: Any) -> tuple[str, Any]:
        """The value with one element replaced, dropped, doubled, renamed, or exchanged with one of another value."""
        paths = _paths(value)
        if len(paths) < 2:
            return "replaced", self._strange(value)
        path = self.random.choice(paths[1:])
        kind = self.random.choice(("replaced", "replaced", "replaced", "dropped", "doubled", "transplanted", "renamed"))
        if kind == "replaced":
            return kind, _with(value, path, lambda home, key: _set(home, key, self._strange(home[key])))
        if kind == "dropped":
            return kind, _with(value, path, lambda home, key: home.pop(key))
        if kind == "doubled":
            return kind, _with(value, path, self._double)
        if kind == "renamed":
            return kind, _with(value, path, self._rename)
        donor = foreign
        for key in self.random.choice(_paths(foreign)):
            donor = donor[key]
        return kind, _with(value, path, lambda home, key: _set(home, key, donor))

    def _strange(self, value: Any) -> Any:
        """An unusual value, mostly of the same type, so that it passes the schema."""
        pick = self.random.choice
        if self.random.random() < 0.35:
            deep: Any = []
            for _ in range(pick((3, 100, 900))):
                deep = [deep]
            return pick((pick(INTEGERS), pick(FLOATS), pick(TEXTS), pick(EMPTY), deep))
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return pick((pick(INTEGERS), value + 1, value - 1, -value, value * 1000, float(value)))
        if isinstance(value, float):
            return pick((pick(FLOATS), -value, value * 1e10))
        if isinstance(value, str):
            return pick((pick(TEXTS), value[:-1], value * 2, value + "\0"))
        if isinstance(value, list):
            return pick((value * 2, value[:1] * pick((2, 300, 5000)), [], [*value, value]))
        return pick(EMPTY)

    def _double(self, home: Any, key: Any) -> None:
        if isinstance(home, list):
            home[key:key] = [home[key]] * self.random.choice((1, 2, 500))
        else:
            home[f"{key}2"] = home[key]

    def _rename(self, home: Any, key: Any) -> None:
        if isinstance(home, dict):
            home[self.random.choice(TEXTS)] = home.pop(key)
        else:
            other = self.random.randrange(len(home))
            home[key], home[other] = home[other], home[key]

    # --- bytes ----------------------------------------------------------------------------------------

    def _flipped(self, raw: bytes, other: bytes) -> bytes:
        changed = bytearray(raw or b"\0")
        for _ in range(self.random.choice((1, 1, 2, 8))):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _cut(self, raw: bytes, other: bytes) -> bytes:
        return raw[: self.random.randrange(len(raw) + 1)]

    def _inserted(self, raw: bytes, other: bytes) -> bytes:
        at = self.random.randrange(len(raw) + 1)
        return raw[:at] + self.random.randbytes(self.random.choice((1, 2, 4, 100))) + raw[at:]

    def _spliced(self, raw: bytes, other: bytes) -> bytes:
        return raw[: self.random.randrange(len(raw) + 1)] + other[self.random.randrange(len(other) + 1) :]

    def _overwritten(self, raw: bytes, other: bytes) -> bytes:
        at = self.random.randrange(len(raw) + 1)
        piece = self.random.choice((b"\0" * 8, b"\xff" * 8, self.random.randbytes(8)))
        return raw[:at] + piece + raw[at + len(piece) :]

    def _noise(self, raw: bytes, other: bytes) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 64, 1000)))

    def _lengthened(self, raw: bytes, other: bytes) -> bytes:
        at = self.random.randrange(len(raw) + 1)
        return raw[:at] + self.random.choice(LENGTHS) + raw[at:]

    def _nested(self, raw: bytes, other: bytes) -> bytes:
        at = self.random.randrange(len(raw) + 1)
        return raw[:at] + self.random.choice((b"\x91", b"\x81\xa1a")) * 20_000 + raw[at:]


def _header(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def _paths(value: Any, path: Path = ()) -> list[Path]:
    """The paths of all elements of a value, itself included; of large containers only the first elements."""
    paths: list[Path] = [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, inner) in enumerate(inside):
        if number >= 40:
            break
        paths += _paths(inner, (*path, key))
    return paths


def _with(value: Any, path: Path, change: Callable[[Any, Any], object]) -> Any:
    """A changed copy of the value; only the containers along the path are copied."""
    top = home = value.copy()
    for key in path[:-1]:
        home[key] = home[key].copy()
        home = home[key]
    change(home, path[-1])
    return top


def _set(home: Any, key: Any, value: Any) -> None:
    home[key] = value
