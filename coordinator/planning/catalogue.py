"""The figures of all methods: tensors on a device, and bytes of a round. For `coordinator methods`.

Everything is read from the methods' own role tables and phases, for a model without memory for its numbers.
"""

import ast
import inspect
import itertools
import math
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import msgspec
import torch
from msgspec import Struct
from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedvit.choices import allowed
from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method, method_class, method_names
from fedvit.methods.base import Method
from fedvit.methods.novel import phases_of
from fedvit.models.vit import PatchViT
from fedvit.program import Role

_ON_DEVICE = {
    Role.SHARED: "trains and returns {}",
    Role.GENERATED: "trains and returns {}, made for it",
    Role.LOCAL: "trains and keeps {}",
    Role.SEEDED: "trains a copy of {}",
    Role.GLOBAL: "uses the server's {}",
    Role.FROZEN: "uses the fixed {}",
}
"""The use of each role's groups on a device, in the order of the sentence."""


class GroupEntry(Struct, frozen=True, kw_only=True):
    group: str
    role: Role
    tensors: int
    parameters: int


class OptionEntry(Struct, frozen=True, kw_only=True):
    option: str
    default: Any
    allowed: str
    text: str


class MethodEntry(Struct, frozen=True, kw_only=True):
    """One method on one model. Bytes are those of tensors, without names, framing and graphs."""

    name: str
    source: str
    on_device: str
    travels: str
    parameters: int  # numbers that a device holds
    parameters_trained: int  # that it trains
    parameters_local: int  # that never leave it
    bytes_once: int  # first values of what is frozen or local
    bytes_down: int  # per round and device, at most: a group that did not change is not sent again
    bytes_up: int  # per round and device, the changes of what it returns
    bytes_up_per_image: int  # for each image that a phase also uploads something of, label included
    groups: list[GroupEntry]
    options: list[OptionEntry]
    doc: str


def catalogue(
    names: Sequence[str],
    model: str,
    classes: int,
    *,
    options: dict[str, Any],
    model_options: dict[str, Any],
    warn: Callable[[str], None],
) -> list[MethodEntry]:
    """Entries of the methods `names`, or of all, as in a run's first round.

    A method of another package that cannot be used is left out of the list of all; `warn` is called with the reason.
    Raises ConfigError for an unknown method or model, and for an option that one of the methods does not have.
    """
    if classes < 1:
        raise ConfigError(f"--classes {classes} must be at least 1")
    models: dict[Any, PatchViT] = {}
    entries = []
    for name in names or _usable(warn):
        try:
            method = make_method(name, options)
        except ConfigError as error:
            hint = "" if names else "; --method lists some methods alone"
            raise ConfigError(f"{error}{hint}") from None
        with torch.device("meta"):
            added = method.all_patches()
            if added not in models:
                models[added] = build_model(method, model, classes, seed=0, options=model_options)
            entries.append(_entry(name, method.in_round(1, 1), models[added]))
    return entries


def _usable(warn: Callable[[str], None]) -> list[str]:
    """All methods that can be used."""
    usable = []
    for name in method_names():
        try:
            method_class(name)
            usable.append(name)
        except ConfigError as error:
            warn(str(error))
    return usable


def _entry(name: str, method: Method, vit: PatchViT) -> MethodEntry:
    tensors = method.tensors(vit)
    groups = {group: (role, names) for group, (role, names) in method.groups(vit).items() if names}
    collected = [phase.collect for phase in phases_of(method, vit) if phase.collect]

    def held(*roles: Role) -> list[str]:
        return [tensor for role, names in groups.values() if role in roles for tensor in names]

    def parameters(*roles: Role) -> int:
        return sum(tensors[tensor].numel() for tensor in held(*roles))

    def size(*roles: Role) -> int:
        return sum(tensors[tensor].nbytes for tensor in held(*roles))

    return MethodEntry(
        name=name,
        source=method.source,
        on_device=_on_device({group: role for group, (role, _) in groups.items()}),
        travels=_travels({group: role for group, (role, _) in groups.items()}, [each.output for each in collected]),
        parameters=parameters(*Role),
        parameters_trained=parameters(*(role for role in Role if role.trained_on_device)),
        parameters_local=parameters(Role.LOCAL),
        bytes_once=size(*(role for role in Role if not role.from_server_each_round)),
        bytes_down=size(*(role for role in Role if role.from_server_each_round)),
        bytes_up=size(*(role for role in Role if role.sent_back)),
        bytes_up_per_image=sum(4 * math.prod(each.shape) + 8 for each in collected),
        groups=[
            GroupEntry(
                group=group, role=role, tensors=len(names), parameters=sum(tensors[tensor].numel() for tensor in names)
            )
            for group, (role, names) in groups.items()
        ],
        options=options_of(type(method)),
        doc=inspect.getdoc(type(method)) or "",
    )


# --- in words -----------------------------------------------------------------------------------------


def _on_device(roles: dict[str, Role]) -> str:
    parts = ((text, [group for group in roles if roles[group] is role]) for role, text in _ON_DEVICE.items())
    return "; ".join(text.format(listed(groups)) for text, groups in parts if groups)


def _travels(roles: dict[str, Role], collected: list[str]) -> str:
    down = [group for group, role in roles.items() if role.from_server_each_round]
    up = [group for group, role in roles.items() if role.sent_back]
    sent = ([f"changes of {listed(up)}"] if up else []) + [f"{output} of chosen images" for output in collected]
    parts = ([f"down: {listed(down)}"] if down else []) + ([f"up: {' and '.join(sent)}"] if sent else [])
    return "; ".join(parts) or "nothing"


def listed(groups: Sequence[str]) -> str:
    """Names in a list; consecutive numbers as a range.

    >>> listed(["norm", "block.2", "block.3", "block.4", "head"])
    'norm, block.2 to block.4, head'
    """
    named = [re.fullmatch(r"(.*?)(\d*)", group) for group in groups]
    parts = [(match[1], int(match[2]) if match[2] else None) for match in named if match]
    runs = itertools.groupby(enumerate(parts), key=lambda item: (item[1][0], (item[1][1] or 0) - item[0]))
    rows = [[groups[place] for place, _ in run] for _, run in runs]
    return ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(row) for row in rows)


# --- options ------------------------------------------------------------------------------------------


def options_of(kind: type[Method]) -> list[OptionEntry]:
    """A method's hyperparameters, described by the comments beside them in the code."""
    hints = typing.get_type_hints(kind, include_extras=True)
    texts: dict[str, str] = {}
    for owner in reversed([each for each in kind.__mro__ if issubclass(each, Method)]):
        texts |= {name: text for name, text in _comments(owner).items() if text or name not in texts}
    return [
        OptionEntry(
            option=field.name,
            default=field.default,
            allowed=allowed(hints[field.name]),
            text=texts.get(field.name, ""),
        )
        for field in fields(kind)
    ]


@cache
def _comments(kind: type) -> dict[str, str]:
    """Field -> the comment on its line, or alone on the line before it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    (written,) = ast.parse(source).body
    assert isinstance(written, ast.ClassDef)
    found: dict[str, str] = {}
    for node in written.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            before = lines[node.lineno - 2].strip()
            alone = before if before.startswith("#") and not before.startswith("# ---") else ""
            found[node.target.id] = (behind.strip() or alone).lstrip("# ")
    return found


# --- for a terminal -----------------------------------------------------------------------------------


def table(entries: list[MethodEntry], model: str, classes: int) -> Lines:
    """One row per method; texts may take several lines."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("method", no_wrap=True)
    drawn.add_column("source, on the device, each round", overflow="fold")
    for heading in ("trained\nM", "down\nMB", "up\nMB"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        drawn.add_row(
            Text(entry.name, style="bold"),
            Lines(Text(entry.source, style="dim"), Text(entry.on_device), Text(entry.travels)),
            _millions(entry.parameters_trained),
            _millions(entry.bytes_down),
            _millions(entry.bytes_up) + ("+" if entry.bytes_up_per_image else ""),
        )
    notes = [f"{model}, {classes} classes. Tensors of one device in a round, without framing."]
    notes += [
        f"+ {entry.name}: {entry.bytes_up_per_image} bytes for each image of which something is uploaded."
        for entry in entries
        if entry.bytes_up_per_image
    ]
    return Lines(drawn, Text(), *(Text(note, style="dim") for note in notes))


def page(entry: MethodEntry, model: str, classes: int) -> Lines:
    """Everything about one method."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (
        ("source", entry.source),
        ("on the device", entry.on_device),
        ("each round", entry.travels),
        ("parameters", f"{entry.parameters:,}, trained {entry.parameters_trained:,}, local {entry.parameters_local:,}"),
        ("bytes down", f"{entry.bytes_down:,} a round, {entry.bytes_once:,} once"),
        ("bytes up", f"{entry.bytes_up:,} a round"),
        *([("", f"and {entry.bytes_up_per_image:,} per chosen image")] if entry.bytes_up_per_image else []),
    ):
        facts.add_row(Text(name, style="dim"), Text(value))
    groups = _grid("group", "role", "tensors", "parameters")
    for group in entry.groups:
        groups.add_row(Text(group.group), group.role.value, str(group.tensors), f"{group.parameters:,}")
    options = _grid("option", "default", "allowed", "")
    for option in entry.options:
        default = "none" if option.default is None else msgspec.json.encode(option.default).decode().strip('"')
        options.add_row(Text(option.option, style="bold"), Text(default), Text(option.allowed), Text(option.text))
    title = Text(f"{entry.name} on {model}, {classes} classes", style="bold")
    parts: list[RenderableType] = [
        title,
        Text(),
        Text(_reflowed(entry.doc)),
        Text(),
        facts,
        Text(),
        groups,
        Text(),
        options,
    ]
    return Lines(*parts)


def _reflowed(doc: str) -> str:
    """A docstring whose lines end where the terminal's do; paragraphs and sources begin a line.

    >>> _reflowed("One\\ntwo.\\n\\nThree.\\nSource: four.")
    'One two.\\n\\nThree.\\nSource: four.'
    """
    return re.sub(r"(?<!\n)\n(?!\n|Source: |Differs )", " ", doc)


def _grid(*headings: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        number = heading in ("tensors", "parameters")
        grid.add_column(heading, justify="right" if number else "left", overflow="fold")
    return grid


def _millions(count: int) -> str:
    """As many digits as tell small from nothing.

    >>> [_millions(count) for count in (0, 7_680, 589_824, 85_798_656)]
    ['0', '0.008', '0.590', '85.8']
    """
    return "0" if not count else f"{count / 1e6:.{1 if count >= 10**7 else 3}f}"
