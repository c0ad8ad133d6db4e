"""Parts of error messages about allowed values: the nearest name, and all values."""

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

NAMES = "names"
"""Key of `Meta.extra` of a text that is one of these names, or a plugin's."""


def did_you_mean(given: str, known: Iterable[str], most: int = 3) -> str:
    """The end of an error about an unknown name: similar known names, or nothing.

    >>> did_you_mean("fedav", ["local", "fedavg"])
    "; did you mean 'fedavg'?"
    """
    near = difflib.get_close_matches(given, list(known), n=most)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def suggest_names(given: str, known: Iterable[str], words: str = "known are") -> str:
    """The end of an error about an unknown name: similar names, and all names.

    >>> suggest_names("fedav", ["local", "fedavg"]), suggest_names("xyz", ["local"])
    ("; did you mean 'fedavg'? Known are local, fedavg", '; known are local')
    """
    known = list(known)
    near = did_you_mean(given, known)
    return f"{near} {words.capitalize()} {', '.join(known)}" if near else f"; {words} {', '.join(known)}"


def describe_allowed(hint: Any) -> str:
    """The values that a type with constraints allows, as text; empty if they cannot be listed.

    >>> from typing import Annotated, Literal
    >>> describe_allowed(Annotated[float, msgspec.Meta(gt=0)] | Literal["auto"] | None)
    'auto | number > 0 | none'
    """
    return _describe(msgspec.inspect.type_info(hint))


def why_invalid(error: msgspec.ValidationError, value: Any, hint: Any) -> str:
    """Explain why a value could not be converted to `hint`, with the allowed values if they are few."""
    reason = str(error).partition(" - at")[0].replace("Invalid enum", "invalid")
    kinds = msgspec.inspect.type_info(hint)
    values = choices(hint)
    if not values:
        return reason
    near = did_you_mean(value, values) if isinstance(value, str) else ""
    return f"{reason}; allowed are {_describe(kinds)}{near}"


def choices(hint: Any) -> list[str]:
    """The names that a type allows, whatever else it allows."""
    return _choices(msgspec.inspect.type_info(hint))


def _choices(kind: msgspec.inspect.Type) -> list[str]:
    match kind:
        case msgspec.inspect.Metadata(extra={"names": names}):
            return [*names]
        case msgspec.inspect.LiteralType(values=values):
            return list(map(str, values))
        case msgspec.inspect.UnionType(types=types):
            return [value for each in types for value in _choices(each)]
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            return _choices(inner)
    return []


def _describe(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.Metadata(extra={"names": names}):
            return " | ".join([*names, "a plugin's name"])
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            return _describe(inner)
        case msgspec.inspect.LiteralType(values=values):
            return " | ".join(map(str, values))
        case msgspec.inspect.UnionType(types=types):  # names first, "none" last
            ordered = sorted(types, key=lambda each: (isinstance(each, msgspec.inspect.NoneType), not _choices(each)))
            return " | ".join(dict.fromkeys(filter(None, map(_describe, ordered))))
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "whole number" if isinstance(kind, msgspec.inspect.IntType) else "number"
            bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            return " ".join([name, *(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)])
        case msgspec.inspect.BoolType():
            return "true | false"
        case msgspec.inspect.NoneType():
            return "none"
        case msgspec.inspect.StrType():
            return "text"
    return ""
