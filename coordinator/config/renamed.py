"""Tables and keys of a run's configuration that had another name in an earlier version."""

from collections.abc import Mapping
from typing import Any

from fedvit.errors import ConfigError

RENAMED = {"protection": "robust", "privacy.rehearsal": "privacy.deterministic_noise"}
"""Old name -> new name; keys of tables as "privacy.clip"."""


def check_new_names(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, which names the new name, if a file has a table or a key under its old name."""
    for old, new in RENAMED.items():
        if _has(values, old):
            kind = "key" if "." in old else "table"
            raise ConfigError(f"{where}: the {kind} {old!r} is {new!r} now; rename it")


def with_new_names(recorded: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run as an earlier version recorded it, with the names of this version.

    >>> with_new_names({"rounds": 3, "protection": {"strikes": 2}, "privacy": {"rehearsal": True}})
    {'rounds': 3, 'privacy': {'deterministic_noise': True}, 'robust': {'strikes': 2}}
    """
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in recorded.items()}
    for old, new in RENAMED.items():
        if _has(config, old):
            table, _, key = old.rpartition(".")
            keys = config[table] if table else config
            keys[new.rpartition(".")[2]] = keys.pop(key)
    return config


def _has(values: Mapping[str, Any], name: str) -> bool:
    table, _, key = name.rpartition(".")
    keys = values.get(table) if table else values
    return isinstance(keys, Mapping) and key in keys
