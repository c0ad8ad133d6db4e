"""A flag for every key of a configuration, made from the types of its tables.

The flag is the key, with its table before it: `--privacy.clip`; but the key `broker` of the table [broker] is just
`--broker`. The key's type decides what the flag accepts: a boolean has two flags, a list takes one entry and a table of
free keys one KEY=VALUE (both are repeatable); `msgspec.convert` reads everything else. `Meta(extra=...)` overrides it:
`flags` are other names, such as those of one entry, `metavar` is shown by `--help` for the value.
"""

import types
import typing
from collections.abc import Callable
from typing import Any

import click
import msgspec
from msgspec import Meta, Struct

from coordinator.commands.flags import literal
from coordinator.config import SECTIONS, TABLES, BrokerConfig, RunConfig, ServiceConfig, merge_tables
from fedvit.command_line import SectionOption
from fedvit.errors import ConfigError

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def flags_of(*tables: tuple[str, type[Struct]]) -> _Decorator:
    """Give a command one flag for every key of some tables, each a name and a class; an unset flag is None.

    Keys outside of tables have the name "".
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        for table, kind in reversed(tables):
            for field in reversed(_by_section(kind)):
                if table or field.name not in TABLES:
                    command = _flag(table, field)(command)
        return command

    return give


run_flags = flags_of(("", RunConfig), *TABLES.items())
"""Flags of a run."""
config_flags = flags_of(("", RunConfig), *TABLES.items(), ("broker", BrokerConfig))
"""Flags of a run and its broker."""
service_flags = flags_of(("", ServiceConfig), ("broker", BrokerConfig))


# --- one flag -----------------------------------------------------------------------------------------


class _Flag(SectionOption):
    """The flag of one key; its value is converted to the key's type."""

    def __init__(self, *arguments: Any, path: str, hint: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.name = path
        self._hint = hint

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        value = super().process_value(ctx, value)
        if value is None or value == ():
            return None
        if not self.multiple:
            return value if self.is_flag else _read(value, self._hint)
        origin, *inner = typing.get_origin(_bare(self._hint)), *typing.get_args(_bare(self._hint))
        if origin is not dict:
            return [_read(text, inner[0]) for text in value]
        entries: dict[str, Any] = {}
        for text in value:
            try:
                merge_tables(entries, _entry(text, inner[1]))
            except ValueError:
                raise ConfigError("FV1003", f"{self.opts[0]} {text!r} must be written {self.metavar}") from None
        return entries


def _flag(table: str, field: Any) -> _Decorator:
    meta = _meta(field.type)
    extra = meta.extra or {}
    prefix = f"{table}." if table else ""
    key = field.name.replace("_", "-")
    kind = _bare(field.type)
    repeatable = typing.get_origin(kind) in (dict, tuple)
    settings: dict[str, Any] = {"default": None, "show_default": False, "multiple": repeatable}
    if kind is bool:
        names = [f"--{prefix}{key}/--{prefix}no-{key}"]
    else:
        names = [f"--{prefix}{name}" if len(name) > 1 else f"-{name}" for name in extra.get("flags", ())]
        names = names or [f"--{table}" if field.name == table else f"--{prefix}{key}"]
        settings |= {"metavar": extra.get("metavar") or _metavar(msgspec.inspect.type_info(field.type))}
    text = meta.description or ""
    if repeatable:
        text += " Repeatable."
    elif field.default not in (None, "") and not isinstance(field.default, bool):
        text += f" [default: {field.default}]"
    section = f"Table [{table}]" if table else _section(field.name)
    return click.option(
        *names, "value", cls=_Flag, path=prefix + field.name, hint=field.type, section=section, help=text, **settings
    )


def _by_section(kind: type[Struct]) -> list[Any]:
    """The fields of a table, in the order of the sections that they belong to."""
    order = list(SECTIONS)
    fields = msgspec.structs.fields(kind)
    return sorted(fields, key=lambda field: order.index(name) if (name := _section(field.name)) in order else -1)


def _section(key: str) -> str:
    return next((title for title, keys in SECTIONS.items() if key in keys), SectionOption.OWN)


def _meta(hint: Any) -> Meta:
    """The annotation that describes a key, also inside of a union."""
    for part in (hint, *typing.get_args(hint)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                return note
    return Meta()


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint


def _metavar(kind: msgspec.inspect.Type) -> str:
    """The allowed names, and other kinds of value, for `--help`."""
    match kind:
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            return _metavar(inner)
        case msgspec.inspect.UnionType(types=kinds):
            words = [_metavar(each) for each in kinds if not isinstance(each, msgspec.inspect.NoneType)]
            return "|".join(dict.fromkeys(sorted(words, key=str.isupper)))
        case msgspec.inspect.LiteralType(values=values):
            return "|".join(map(str, values))
        case msgspec.inspect.DictType():
            return "KEY=VALUE"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return "NUMBER"
        case msgspec.inspect.BoolType():
            return "true|false"
    return "TEXT"


# --- one value ----------------------------------------------------------------------------------------


def _read(text: str, hint: Any) -> Any:
    """Convert a text to the type: numbers, booleans and names take precedence over free text.

    A text that fits no type is returned as a number or text, so that the check of the configuration reports it.
    """
    if hint is Any:
        return literal(text)
    union = _bare(hint)
    kinds = typing.get_args(union) if typing.get_origin(union) in (typing.Union, types.UnionType) else (union,)
    others = [kind for kind in kinds if _bare(kind) not in (str, types.NoneType)]
    try:
        return msgspec.convert(text, typing.Union[tuple(others)], strict=False) if others else text  # noqa: UP007
    except msgspec.ValidationError:
        return text if any(_bare(kind) is str for kind in kinds) else literal(text)


def _entry(text: str, hint: Any) -> dict[str, Any]:
    """One KEY=VALUE, or NAME:KEY=VALUE where the values are tables. Raises ValueError for another format."""
    if typing.get_origin(hint) is dict:
        name, inner = text.split(":", 1)
        return {name: _entry(inner, typing.get_args(hint)[1])}
    key, value = text.split("=", 1)
    return {key: _read(value, hint)}
