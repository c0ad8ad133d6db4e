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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import msgspec
import torch

from coordinator.compute.planning.method_entry import (
    STORED,
    STORED_CLASSES,
    GroupEntry,
    MethodEntry,
    OptionEntry,
    StoredEntries,
    digest_of_sources,
)
from fedvit.choices import describe_allowed
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, build_model, make_method, method_class
from fedvit.methods.base import Method, list_patches
from fedvit.methods.hyperparameters import Hyperparameters
from fedvit.methods.novel import phases_of
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.policy import Needs
from fedvit.program import Role, count_kept_patches

_ON_DEVICE = {
    Role.SHARED: "trains and returns {}",
    Role.GENERATED: "trains and returns {}, made for it",
    Role.LOCAL: "trains and keeps {}",
    Role.ASSIGNED: "uses {}, made for it",
    Role.SEEDED: "trains a copy of {}",
    Role.GLOBAL: "uses the server's {}",
    Role.FROZEN: "uses the fixed {}",
}
"""The use of each role's groups on a device, in the order of the sentence."""


def catalogue(
    names: Sequence[str],
    model: str,
    classes: int,
    *,
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> list[MethodEntry]:
    """Compute entries of methods, as in a run's first round.

    Raises ConfigError for an unknown method or model, and for an option that one of the methods does not have.
    """
    models: dict[Any, PatchViT] = {}
    entries = []
    for name in names:
        method = make_method(name, options)
        with torch.device("meta"):
            added = list_patches(method)
            if added not in models:
                models[added] = build_model(method, model, classes, seed=0, options=model_options)
            entries.append(_entry(name, method.in_round(1, 1), models[added]))
    return entries


def usable(names: Iterable[str], warn: Callable[[str], None]) -> list[str]:
    """Return the methods that can be used; `warn` is called with the reason why another one cannot."""
    found = []
    for name in names:
        try:
            method_class(name)
            found.append(name)
        except ConfigError as error:
            warn(str(error))
    return found


def store_entries() -> None:
    """Write the entries of every method of fedvit itself to STORED."""
    entries = catalogue(sorted(METHODS), SMALL, STORED_CLASSES, options={}, model_options={})
    stored = msgspec.json.encode(StoredEntries(digest_of_sources(), entries))
    STORED.write_bytes(stored.replace(b'{"name":', b'\n{"name":') + b"\n")  # a line for each, which a diff can show


def _entry(name: str, method: Method, vit: PatchViT) -> MethodEntry:
    tensors = method.tensors(vit)
    groups = {group: (role, names) for group, (role, names) in method.groups(vit).items() if names}
    collected = [phase.collect for phase in phases_of(method, vit) if phase.collect]

    def list_tensors(*roles: Role) -> list[str]:
        return [tensor for role, names in groups.values() if role in roles for tensor in names]

    def parameters(*roles: Role) -> int:
        return sum(tensors[tensor].numel() for tensor in list_tensors(*roles))

    def size(*roles: Role) -> int:
        return sum(tensors[tensor].nbytes for tensor in list_tensors(*roles))

    return MethodEntry(
        name=name,
        source=method.source,
        on_device=_on_device({group: role for group, (role, _) in groups.items()}),
        travels=_travels({group: role for group, (role, _) in groups.items()}, [each.output for each in collected]),
        parameters=parameters(*Role),
        parameters_trained=parameters(*(role for role in Role if role.is_trained_on_device)),
        parameters_local=parameters(Role.LOCAL),
        bytes_once=size(*(role for role in Role if not role.from_server_each_round)),
        bytes_down=size(*(role for role in Role if role.from_server_each_round)),
        bytes_up=size(*(role for role in Role if role.is_sent_back)),
        bytes_up_per_image=sum(4 * math.prod(each.shape) + 8 for each in collected),
        needs=Needs(
            updates=bool(list_tensors(*(role for role in Role if role.is_sent_back))),
            features=bool(collected),
            mask=1 - count_kept_patches(vit.patches, method.mask) / vit.patches if collected else 1.0,
        ),
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
    return "; ".join(text.format(join_names(groups)) for text, groups in parts if groups)


def _travels(roles: dict[str, Role], collected: list[str]) -> str:
    down = [group for group, role in roles.items() if role.from_server_each_round]
    up = [group for group, role in roles.items() if role.is_sent_back]
    sent = ([f"changes of {join_names(up)}"] if up else []) + [f"{output} of chosen images" for output in collected]
    parts = ([f"down: {join_names(down)}"] if down else []) + ([f"up: {' and '.join(sent)}"] if sent else [])
    return "; ".join(parts) or "nothing"


def join_names(groups: Sequence[str]) -> str:
    """Names in a list; consecutive numbers as a range.

    >>> join_names(["norm", "block.2", "block.3", "block.4", "head"])
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
    owners: list[type] = [each for each in kind.__mro__ if issubclass(each, Hyperparameters)]
    for owner in reversed(owners):
        texts |= {name: text for name, text in _comments(owner).items() if text or name not in texts}
    return [
        OptionEntry(
            option=field.name,
            default=list(field.default) if isinstance(field.default, tuple) else field.default,
            allowed=describe_allowed(hints[field.name]),
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
