"""The configuration of a resumed run: the recorded one; more rounds, fewer devices, other
stop rules, metrics and alerts, and another store of blobs are allowed."""

from typing import Any

import msgspec

from coordinator.config.reading import make_config
from coordinator.config.run import RunConfig
from fedvit.errors import ConfigError

FREE_TABLES = ("trackers", "blobs", "alerts")
"""Tables that have no influence on training."""
CHANGING_TABLES = (*FREE_TABLES, "stop")
"""Tables that a resumed run may change."""


def resume_config(run: str, recorded: dict[str, Any], given: dict[str, Any], where: str) -> RunConfig:
    """The recorded configuration of a run, with the allowed changes of a file and flags.

    Raises ConfigError, naming the key and both values, for any other difference.
    """
    began = make_config(recorded, f"run {run}").run
    asked = _plain(make_config(given, where).run)
    before = _plain(began)
    for key in given:
        if key not in ("broker", *CHANGING_TABLES) and (
            differs := _difference(key, before[key], asked[key], given[key])
        ):
            _check_change(run, *differs)
    changed: dict[str, Any] = {key: asked[key] for key in ("rounds", "devices") if key in given}
    for table in CHANGING_TABLES:
        if table in given:
            values = {table: {**before[table], **given[table]}}
            changed[table] = getattr(make_config(values, where).run, table)
    return msgspec.structs.replace(began, **changed)


def _plain(config: RunConfig) -> dict[str, Any]:
    """Return a value as the record has it: lists instead of tuples."""
    return dict(msgspec.json.decode(msgspec.json.encode(config)))


def _difference(key: str, before: Any, asked: Any, given: Any) -> tuple[str, Any, Any] | None:
    """The first key with a different value; of a table, only the given keys are compared."""
    if isinstance(given, dict) and isinstance(before, dict) and isinstance(asked, dict):
        inner = (_difference(f"{key}.{name}", before.get(name), asked.get(name), given[name]) for name in given)
        return next((found for found in inner if found), None)
    return (key, before, asked) if before != asked else None


def _check_change(run: str, key: str, before: Any, asked: Any) -> None:
    """Raise ConfigError if a resumed run cannot have the new value."""
    if key == "rounds":
        if asked > before:
            return
        hint = "a resumed run can have more rounds, not fewer"
    elif key == "devices":
        if asked < before:
            return
        hint = "a resumed run can wait for fewer devices, not for more"
    else:
        hint = "only rounds, devices, stop rules, metrics, blobs and alerts of a resumed run may change"
    raise ConfigError(
        "FV1616", f"run {run!r} began with {key} = {before!r}, and now {key} = {asked!r} is asked for: {hint}"
    )
