"""Makes a configuration from a TOML file and flags; errors name the key, its value and the allowed values."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from coordinator.config.broker import BrokerConfig, with_listen_port
from coordinator.config.budget import check_memory_budget
from coordinator.config.robust import AGGREGATORS
from coordinator.config.run import TABLES, RunConfig
from coordinator.config.selection import check_selection
from fedvit import known_values, plugins
from fedvit.choices import did_you_mean, why_invalid
from fedvit.errors import ConfigError


class StartConfig(Struct, frozen=True):
    run: RunConfig
    broker: BrokerConfig


def read_toml(path: Path) -> dict[str, Any]:
    """Raise ConfigError, naming the file, and the line if it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("FV1001", f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("FV1001", f"config file {path} is not TOML: {error}") from error


def make_config(values: dict[str, Any], where: str) -> StartConfig:
    """Validate the merged values of a file and flags.

    Raises ConfigError, naming the key, its value and the allowed values.
    """
    values = dict(values)
    broker = convert_broker(values.pop("broker", {}), where)
    return StartConfig(convert_table(values, RunConfig, where), broker)


def check_settings(config: RunConfig, where: str) -> None:
    """Raise ConfigError, beginning with `where`, for an unknown method, model, option or plugin, or a wrong value.

    Does not import torch.
    """
    try:
        known_values.check_settings(config.method, config.options, config.model, config.model_options)
        for pattern, options in config.variants.items():
            try:
                known_values.check_settings(config.method, options, config.model, config.model_options)
            except ConfigError as error:
                raise ConfigError("FV1002", f"variants: {pattern!r}: {error}") from None
        check_selection(config.selection)
        plugins.check_value(plugins.AGGREGATORS, "aggregator", config.robust.aggregator, AGGREGATORS)
        check_memory_budget(config.budget)
    except ConfigError as error:
        raise ConfigError(error.code, f"{where}: {error}") from None


def convert_broker(values: Any, where: str) -> BrokerConfig:
    """The table [broker]. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError("FV1002", f'{where}: broker = {values!r} must be a table: [broker] with broker = "..."')
    table = f"{where} [broker]"
    return convert_table(with_listen_port(values, table), BrokerConfig, table)


Config = TypeVar("Config", bound=Struct)


def convert_table(values: dict[str, Any], kind: type[Config], where: str) -> Config:
    """Convert values to a table's class. Raises ConfigError, naming the key, its value and the allowed values."""
    errors: dict[str, ConfigError] = {}
    converted = _convert(values, kind, where, errors)
    if converted is None:
        raise next(iter(errors.values()))
    return converted


def find_errors(values: dict[str, Any], where: str) -> dict[str, ConfigError]:
    """Return all errors of a run's configuration by key, such as "privacy.clip"; "" for keys that do not fit together.

    `where` begins their texts. Does not import torch.
    """
    errors: dict[str, ConfigError] = {}
    config = _convert({key: value for key, value in values.items() if key != "broker"}, RunConfig, where, errors)
    if config is not None:
        try:
            check_settings(config, where)
        except ConfigError as error:
            errors[""] = error
    return errors


def _convert(
    values: dict[str, Any], kind: type[Config], where: str, errors: dict[str, ConfigError], table: str = ""
) -> Config | None:
    """Convert values to a table's class; or add what is wrong to `errors` and return None."""
    before, known = len(errors), kind.__struct_fields__
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, most=1) or f"; known keys are {', '.join(known)}"
            errors[table + key] = ConfigError("FV1002", f"{where}: unknown key {key!r}{hint}")
    for name, inner in TABLES.items() if kind is RunConfig else ():
        given = values.get(name)
        if isinstance(given, dict):
            converted = _convert(given, inner, f"{where} [{name}]", errors, f"{name}.")
            values = {key: value for key, value in values.items() if key != name}
            values |= {name: converted} if converted is not None else {}
    for key, value in values.items():  # one key at a time, so that the message can name key and value
        if key not in known or isinstance(value, Struct):
            continue
        try:
            msgspec.convert({key: value}, _alone(kind, key))
            msgspec.msgpack.encode(value)  # for the worker process
        except OverflowError:
            text = f"{where}: {key} = {value!r}: a whole number may have 64 bits"
            errors[table + key] = ConfigError("FV1004", text)
        except msgspec.ValidationError as error:
            reason = why_invalid(error, value, _hint(kind, key)).replace("`object`", "a table")
            text = f"{where}: {key} = {value!r}: {reason[:1].lower()}{reason[1:]}"
            errors[table + key] = ConfigError("FV1004", text)
    if len(errors) > before:
        return None
    try:
        return msgspec.convert(values, kind)
    except (
        ConfigError,
        msgspec.ValidationError,
    ) as error:  # the latter: from a ValueError or TypeError in __post_init__
        errors[table.rstrip(".")] = ConfigError("FV1004", f"{where}: {error}")
        return None


def _alone(kind: type[Struct], key: str) -> type[Struct]:
    """A struct with only this field, so that checks across fields do not run on a partial configuration."""
    return msgspec.defstruct("Alone", [(key, _hint(kind, key), None)], kw_only=True)


def _hint(kind: type[Struct], key: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(kind) if field.name == key)


def merge_flags(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Merge the flags that were set into a copy of a file's values."""
    merged = {**values}
    for path, value in flags.items():
        if value is not None:
            table, _, key = path.rpartition(".")
            merge_tables(merged, {table: {key: value}} if table else {key: value})
    return merged


def merge_tables(into: dict[str, Any], added: dict[str, Any]) -> None:
    """Merge tables key by key. A value in place of a table is kept, so that make_config refuses it."""
    for key, value in added.items():
        if not isinstance(value, dict):
            into[key] = value
        elif isinstance(before := into.get(key, {}), dict):
            into[key] = {**before}
            merge_tables(into[key], value)
