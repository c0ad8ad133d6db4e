"""The oldest version of devices that a run admits."""

import re


def why_too_old(oldest: str | None, software: str) -> str | None:
    """The reason why a run does not admit a device with this version; None if it does.

    >>> why_too_old("0.2", "0.10.1"), why_too_old(None, "?")
    (None, None)
    >>> why_too_old("0.2", "0.1.9")
    "its fedvit is version '0.1.9', and this run requires 0.2 or newer: update fedvit on the device"
    """
    if oldest is None or _numbers(software) >= _numbers(oldest):
        return None
    return f"its fedvit is version {software!r}, and this run requires {oldest} or newer: update fedvit on the device"


def _numbers(version: str) -> list[int]:
    """The numbers at the beginning, without zeros at their end; none if there is no number."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
