"""Tables of a run's configuration that had another name in an earlier version."""

from collections.abc import Iterable
from typing import Any

from fedvit.errors import ConfigError

RENAMED = {"protection": "robust"}
"""Old name -> new name."""


def check_new_names(keys: Iterable[str], where: str) -> None:
    """Raises ConfigError, which says the new name, where a file has a table by its old one."""
    for key in keys:
        if key in RENAMED:
            raise ConfigError(f"{where}: the table {key!r} is {RENAMED[key]!r} now; rename it")


def with_new_names(recorded: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run as an earlier version recorded it, with the names of this version.

    >>> with_new_names({"rounds": 3, "protection": {"strikes": 2}})
    {'rounds': 3, 'robust': {'strikes': 2}}
    """
    return {RENAMED.get(key, key): value for key, value in recorded.items()}
