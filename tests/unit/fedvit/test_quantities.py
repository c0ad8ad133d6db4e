"""Amounts as people write them, and as they are shown."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.errors import ConfigError
from fedvit.quantities import (
    format_bytes,
    format_flops,
    format_seconds,
    parse_bytes,
    parse_celsius,
    parse_flops,
    parse_seconds,
)

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), ("4096", 4096), ("4096B", 4096), ("1k", 1000), ("1kB", 1000), ("512MB", 512_000_000),
        ("512mb", 512_000_000), ("512 M", 512_000_000), ("1.5GB", 1_500_000_000), (" 2 GiB ", 2 * 1024 * MIB),
        ("0.5MiB", MIB // 2), ("1e6", 1_000_000), ("1e-3GB", 1_000_000), (".5kB", 500), ("2T", 2 * 10**12),
    ],
)  # fmt: skip
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2TFLOP", 2 * 10**12), ("2 tflops", 2 * 10**12), ("500G", 500 * 10**9), ("3e12", 3 * 10**12), ("7", 7)],
)
def test_flops(text: str, expected: int) -> None:
    assert parse_flops(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("10 min", 600.0), ("1h", 3600.0), ("1d", 86400.0),
        ("250ms", 0.25), ("1h30m", 5400.0), ("1h 30m 5s", 5405.0), ("0.5h", 1800.0),
    ],
)  # fmt: skip
def test_seconds(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("80", 80.0), ("80C", 80.0), ("72.5 °C", 72.5)])
def test_celsius(text: str, expected: float) -> None:
    assert parse_celsius(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "named"),
    [
        (parse_bytes, "12 quarts", "512MB"),
        (parse_bytes, "", "512MB"),
        (parse_bytes, "MB", "512MB"),
        (parse_bytes, "-5MB", "512MB"),
        (parse_bytes, "0", "must be finite and > 0"),
        (parse_bytes, "0.2", "must be finite and > 0"),
        (parse_bytes, "1e999", "must be finite and > 0"),
        (parse_bytes, "nan", "512MB"),
        (parse_bytes, "1GB2MB", "512MB"),
        (parse_flops, "2 MB", "2TFLOP"),
        (parse_flops, "2 GiFLOP", "2TFLOP"),
        (parse_seconds, "ten", "1h30m"),
        (parse_seconds, "1h30", "1h30m"),
        (parse_seconds, "1h and 5m", "1h30m"),
        (parse_seconds, "0s", "must be finite and > 0"),
        (parse_celsius, "80F", "degrees Celsius"),
        (parse_celsius, "0", "degrees Celsius"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_can(parse: Callable[[str], float], text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert repr(text) in str(refused.value)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_400, "999 kB"), (999_600, "1 MB"), (63_400_000, "63.4 MB"),
        (1_175_000_000, "1.18 GB"), (3 * 10**12, "3 TB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_with_three_digits(count: int, shown: str) -> None:
    assert format_bytes(count) == shown


def test_flops_and_times_are_shown() -> None:
    assert [format_flops(count) for count in (10**9, 1_234 * 10**9, 2 * 10**15)] == ["1 GFLOP", "1.23 TFLOP", "2 PFLOP"]
    assert [format_seconds(value) for value in (0.5, 1, 90, 119, 120, 7200)] == [
        "500 ms", "1 s", "90 s", "119 s", "2 min", "2 h",
    ]  # fmt: skip


@given(st.integers(1, 10**15))
def test_what_is_shown_can_be_read_again(count: int) -> None:
    """Three digits are within half a percent."""
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)
    assert parse_flops(format_flops(count)) == pytest.approx(count, rel=0.006)
    assert parse_seconds(format_seconds(count / 1000)) == pytest.approx(count / 1000, rel=0.006)
