"""Checks of the options of models and model patches; the message names the option and its value."""

import math
from collections.abc import Sequence
from typing import Any

from fedvit.errors import ConfigError


def check_whole(owner: str, option: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner} option {option} = {value!r} must be a whole number of at least {least}")


def check_number(owner: str, option: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{owner} option {option} = {value!r} must be a finite number")


def check_switch(owner: str, option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{owner} option {option} = {value!r} must be true or false")


def check_choice(owner: str, option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{owner} option {option} = {value!r} must be one of {list(choices)}")
