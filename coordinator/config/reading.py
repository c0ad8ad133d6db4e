"""From a TOML file and flags to a configuration, or to an error that names key, value and what is allowed."""

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from coordinator.config.broker import BrokerConfig, with_listen_port
from coordinator.config.run import TABLES, RunConfig
from fedvit.errors import ConfigError


class StartConfig(Struct, frozen=True):
    run: RunConfig
    broker: BrokerConfig


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError naming the file, and the line when it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def make_config(values: dict[str, Any], where: str) -> StartConfig:
    """Validate what a file and flags said together.

    Raises ConfigError naming the key, its value and what is allowed.
    """
    values = dict(values)
    broker = convert_broker(values.pop("broker", {}), where)
    return StartConfig(convert_table(values, RunConfig, where), broker)


def convert_broker(values: Any, where: str) -> BrokerConfig:
    """The table [broker]. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f'{where}: broker = {values!r} must be a table: [broker] with broker = "..."')
    table = f"{where} [broker]"
    return convert_table(with_listen_port(values, table), BrokerConfig, table)


Config = TypeVar("Config", bound=Struct)


def convert_table(values: dict[str, Any], kind: type[Config], where: str) -> Config:
    """Values as a table's class. Raises ConfigError naming the key, its value and what is allowed."""
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    for table, inner in TABLES.items() if kind is RunConfig else ():
        given = values.get(table)
        if isinstance(given, dict):
            values = {**values, table: convert_table(given, inner, f"{where} [{table}]")}
    for key, value in values.items():  # one key at a time, so that the message can name key and value
        try:
            msgspec.convert({key: value} if not isinstance(value, Struct) else {}, _alone(kind, key))
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at")[0].lower().replace("`object`", "a table")
            raise ConfigError(f"{where}: {key} = {value!r}: {reason}") from None
    try:
        return msgspec.convert(values, kind)
    except (ConfigError, msgspec.ValidationError) as error:  # the latter from a ValueError or TypeError inside
        raise ConfigError(f"{where}: {error}") from None


def _alone(kind: type[Struct], key: str) -> type[Struct]:
    """A struct with only the one field, so that checks across fields do not run on half a config."""
    hint = {field.name: field.type for field in msgspec.structs.fields(kind)}[key]
    return msgspec.defstruct("Alone", [(key, hint, None)], kw_only=True)
