"""A flag for every key of a run's configuration, and what a file and flags say together."""

import typing
from collections.abc import Callable
from typing import Any

import click
import msgspec
from msgspec import Meta, Struct

from coordinator.commands.flags import key_value, literal
from coordinator.config import (
    TABLES,
    BrokerConfig,
    BudgetConfig,
    PrivacyConfig,
    ProtectionConfig,
    RunConfig,
    ServiceConfig,
)
from fedvit.choices import allowed, choices
from fedvit.errors import ConfigError


class GroupedCommand(click.Command):
    """A command whose `--help` shows the flags of each table under the table's name."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                shown.setdefault(_section(parameter.name or ""), []).append(record)
        for title in sorted(shown, key=_SECTIONS.index):
            with formatter.section(title):
                formatter.write_dl(shown[title])


def flags_of(*kinds: type[Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for every key of some tables; an unset flag is None."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        for kind in kinds:
            for field in reversed(msgspec.structs.fields(kind)):
                if field.name not in TABLES:
                    command = _flag(kind, field.name, field.type, field.default)(command)
        return command

    return give


run_flags = flags_of(*TABLES.values(), RunConfig)
"""Of a run alone."""
config_flags = flags_of(BrokerConfig, *TABLES.values(), RunConfig)
"""Of a run, and of where its devices meet it."""
service_flags = flags_of(BrokerConfig, ServiceConfig)


def _flag(
    kind: type[Struct], name: str, hint: Any, default: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    text = _description(hint)
    flag = "--" + name.replace("_", "-")
    common: dict[str, Any] = {"default": None, "help": text, "show_default": False}
    if default not in (None, msgspec.NODEFAULT, ()) and not isinstance(default, bool):
        common["help"] = f"{text} [default: {default}]"
    if name in ("options", "model_options"):
        flags = ["--option", "-o"] if name == "options" else ["--model-option"]
        return click.option(*flags, name, multiple=True, metavar="KEY=VALUE", help=f"{text} Repeatable.")
    if name == "up_groups":
        return click.option("--up-group", name, multiple=True, metavar="GROUP=CODEC", help=f"{text} Repeatable.")
    if name == "variants":
        metavar = "DEVICES:KEY=VALUE"
        return click.option("--variant", name, multiple=True, metavar=metavar, help=f"{text} Repeatable.")
    if name == "writers":
        return click.option("--writer", name, multiple=True, metavar=_metavar(name, hint), help=f"{text} Repeatable.")
    if name == "classes":
        return click.option("--class", name, multiple=True, metavar="NAME", help=f"{text} Repeatable.")
    if isinstance(default, bool) and name != "pretrained":
        return click.option(f"{flag}/--no-{name.replace('_', '-')}", name, **common)
    numbers = {int: int, float: float}
    kind = str if name.endswith("cohort") else numbers.get(type(default), str)
    return click.option(flag, name, type=kind, metavar=_metavar(name, hint), **common)


def _metavar(name: str, hint: Any) -> str | None:
    """What `--help` shows for a flag's value, where its type says more than click's: the names that are allowed."""
    if name == "pretrained":
        return "true|FILE"
    if name in BudgetConfig.__struct_fields__:
        return "AMOUNT"
    if not (names := choices(hint)):
        return None
    others = ("NUMBER",) if "number" in allowed(hint) else ()
    return f"[{'|'.join((*names, *others))}]"


def _description(hint: Any) -> str:
    """The description in an annotation, also inside a union."""
    for part in (hint, *typing.get_args(hint)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                return note.description
    return ""


_NUMBER_OR_TEXT = {
    "cohort",
    "evaluation_cohort",
    "keep_rounds",
    "keep_runs",
    "pretrained",
    "deadline_s",
    "concurrency",
    *(
        field.name
        for kind in (ProtectionConfig, PrivacyConfig)
        for field in msgspec.structs.fields(kind)
        if field.default is None
    ),
}


_OF_RUN = {
    "What is trained": (
        "method", "options", "variants", "model", "model_options", "pretrained", "start_from", "classes", "max_classes",
        "seed", "accelerator", "server_precision",
    ),
    "Rounds and devices": (
        "rounds", "devices", "devices_where", "federation", "cohort", "quorum", "over_select", "selection",
        "deadline_s", "deadline_limit_s", "late", "max_staleness", "mode", "buffer", "concurrency", "rejoin_grace_s",
    ),
    "Evaluation": ("evaluate_every", "evaluation", "evaluation_cohort", "evaluation_quorum"),
    "What is kept": ("backup_every", "keep_rounds", "keep_runs"),
}  # fmt: skip
"""Keys of a run that are in no table, by what they are about."""
_TABLES: dict[str, type[Struct]] = {"broker": BrokerConfig, **TABLES}
_SECTIONS = ["Options", *_OF_RUN, *(f"Table [{table}]" for table in _TABLES)]


def _section(name: str) -> str:
    of_run = {key: title for title, keys in _OF_RUN.items() for key in keys}
    of_tables = {key: f"Table [{table}]" for table, kind in _TABLES.items() for key in kind.__struct_fields__}
    return (of_tables | of_run).get(name, "Options")


def merge_flags(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Put the flags that were set over a file's values."""
    merged = {**values}
    for name, value in flags.items():
        if value is None or value == ():
            continue
        if name == "variants":
            if isinstance(merged.get(name, {}), dict):  # else the file is wrong, and make_config says so
                merged[name] = _with_variants(merged.get(name, {}), value)
            continue
        if name in ("options", "model_options"):
            inside = merged.get(name, {})
            if isinstance(inside, dict):  # else the file is wrong, and make_config says so
                merged[name] = {**inside, **dict(key_value(pair) for pair in value)}
            continue
        if name in _NUMBER_OR_TEXT:
            value = literal(value)
        home = next((table for table, kind in _TABLES.items() if name in kind.__struct_fields__), None)
        if home:
            inside = merged.get(home, {})
            if isinstance(inside, dict):
                merged[home] = {**inside, name: _by_group(inside, value) if name == "up_groups" else value}
        else:
            merged[name] = list(value) if isinstance(value, tuple) else value
    return merged


def _by_group(table: dict[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
    """A file's codecs of groups, and over them those of the flags GROUP=CODEC."""
    merged = dict(table.get("up_groups", {}))
    for text in flags:
        group, equals, codec = text.partition("=")
        if not equals:
            raise ConfigError(f"up-group {text!r} must be written GROUP=CODEC, as in 'head=none'")
        merged[group] = codec
    return merged


def _with_variants(tables: dict[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
    """A file's variants, and over them those of the flags DEVICES:KEY=VALUE."""
    merged = {**tables}
    for text in flags:
        pattern, colon, pair = text.partition(":")
        if not colon:
            example = "'jetson-*:batch_size=64'"
            raise ConfigError(f"variant {text!r} must be written DEVICES:KEY=VALUE, as in {example}")
        key, value = key_value(pair)
        inside = merged.get(pattern, {})
        if isinstance(inside, dict):
            merged[pattern] = {**inside, key: value}
    return merged
