"""Quantities with units, for people: 512MB, 2TFLOP, 10m, 80C.

Decimal prefixes are powers of 1000 (kB, MB, GB), binary ones of 1024 (KiB, MiB, GiB). Upper and lower case are
the same. A plain number is in the base unit: bytes, FLOPs, seconds, degrees Celsius.
"""

import math
import re
from collections.abc import Mapping

from fedvit.errors import ConfigError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}

_BYTES = {f"{prefix}{end}": size for prefix, size in (_DECIMAL | _BINARY).items() for end in ("", "b")}
_FLOPS = {f"{prefix}{end}": size for prefix, size in _DECIMAL.items() for end in ("", "flop", "flops")}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_CELSIUS = {"": 1.0, "c": 1.0, "°c": 1.0}

_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?"
_AMOUNT = re.compile(rf"({_NUMBER})\s*([a-z°]*)")


def parse_bytes(text: str) -> int:
    """A positive number of bytes. Raises ConfigError naming the text and what may be written.

    >>> parse_bytes("512MB"), parse_bytes("1.5 GiB"), parse_bytes("4096")
    (512000000, 1610612736, 4096)
    """
    return round(_parse(text, _BYTES, "a number of bytes, or one with kB, MB, GB, KiB, MiB or GiB, e.g. 512MB", 1))


def parse_flops(text: str) -> int:
    """A positive number of FLOPs; 1 multiply-add = 2 FLOPs. Raises ConfigError.

    >>> parse_flops("2TFLOP"), parse_flops("500 GFLOPs")
    (2000000000000, 500000000000)
    """
    return round(_parse(text, _FLOPS, "a number of FLOPs, or one with MFLOP, GFLOP, TFLOP or PFLOP, e.g. 2TFLOP", 1))


def parse_seconds(text: str) -> float:
    """A positive time in seconds; units may follow each other. Raises ConfigError.

    >>> parse_seconds("10m"), parse_seconds("1h30m"), parse_seconds("2.5")
    (600.0, 5400.0, 2.5)
    """
    expected = "a number of seconds, or one with ms, s, m, h or d, e.g. 10m or 1h30m"
    pieces = re.findall(rf"(?:{_NUMBER})\s*[a-z]+", text.strip().lower())
    if len(pieces) > 1 and "".join(pieces) == re.sub(r"(?<=[a-z])\s+", "", text.strip().lower()):
        return sum(_parse(piece, _SECONDS, expected, 0) for piece in pieces)
    return _parse(text, _SECONDS, expected, 0)


def parse_celsius(text: str) -> float:
    """A temperature in degrees Celsius above zero. Raises ConfigError.

    >>> parse_celsius("80"), parse_celsius("72.5 °C")
    (80.0, 72.5)
    """
    return _parse(text, _CELSIUS, "degrees Celsius, e.g. 80", 0)


def _parse(text: str, units: Mapping[str, float], expected: str, least: float) -> float:
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None or found[2] not in units:
        raise ConfigError("FV1005", f"{text!r} cannot be read: expected {expected}")
    value = float(found[1]) * units[found[2]]
    if not math.isfinite(value) or value <= 0 or value < least:
        raise ConfigError("FV1005", f"{text!r} is out of range: it must be finite and > 0; expected {expected}")
    return value


def format_count(count: int, what: str) -> str:
    """A number with its noun, in the plural if needed.

    >>> format_count(1, "class"), format_count(2, "class"), format_count(0, "image")
    ('1 class', '2 classes', '0 images')
    """
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count} {what}{ending}"


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(512_000_000), format_bytes(1_234), format_bytes(17)
    ('512 MB', '1.23 kB', '17 B')
    """
    return _format(count, "B")


def format_flops(count: float) -> str:
    """
    >>> format_flops(2 * 10**12)
    '2 TFLOP'
    """
    return _format(count, "FLOP")


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(600), format_seconds(5400)
    ('12.3 ms', '2.5 s', '10 min', '1.5 h')
    """
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size * (2 if unit == "min" else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def _format(count: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:  # 1000 of a smaller unit is shown as 1 of the larger one
            return f"{_three_digits(count / size)} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
