"""The description of a method for `coordinator methods`, and the stored descriptions of all methods of fedvit.

This module needs no torch. `coordinator.compute.planning.catalogue`, which does, computes what is stored here.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import fedvit
from fedvit.policy import Needs
from fedvit.roles import Role

STORED = Path(__file__).with_name("methods.json")
"""Entries of every method of fedvit itself on STORED_MODEL with STORED_CLASSES; renewed by `make methods`."""
STORED_CLASSES = 10


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
    needs: Needs  # of the policies of devices
    groups: list[GroupEntry]
    options: list[OptionEntry]
    doc: str


class StoredEntries(Struct, frozen=True):
    sources: str  # digest of the files that the entries were computed from
    entries: list[MethodEntry]


def read_stored_entries() -> list[MethodEntry] | None:
    """Return the stored entries; None if methods or models were changed since they were computed."""
    stored = msgspec.json.decode(STORED.read_bytes(), type=StoredEntries)
    return stored.entries if stored.sources == digest_of_sources() else None


def find_stored_needs(method: str, *, secure: bool = False) -> Needs | None:
    """Return what a method of fedvit needs of devices with its default options; None for another method.

    `secure`: whether the run adds up results in secret.
    """
    needs = next((entry.needs for entry in read_stored_entries() or () if entry.name == method), None)
    return msgspec.structs.replace(needs, secure=secure) if needs else None


def digest_of_sources() -> str:
    """Return a digest of the files of all methods and models, and of what computes their entries."""
    package = Path(fedvit.__file__).parent
    files = [*package.glob("methods/**/*.py"), *package.glob("models/*.py"), package / "model_options.py"]
    digest = hashlib.sha256()
    for file in sorted([*files, Path(__file__).with_name("catalogue.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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
        ("needs", f"devices that allow: {entry.needs}"),
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
        Text(_reflow(entry.doc)),
        Text(),
        facts,
        Text(),
        groups,
        Text(),
        options,
    ]
    return Lines(*parts)


def _reflow(doc: str) -> str:
    """A docstring whose lines end where the terminal's do; paragraphs and sources begin a line.

    >>> _reflow("One\\ntwo.\\n\\nThree.\\nSource: four.")
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
    """Return a count in millions, with enough digits to tell a small one from zero.

    >>> [_millions(count) for count in (0, 7_680, 589_824, 85_798_656)]
    ['0', '0.008', '0.590', '85.8']
    """
    return "0" if not count else f"{count / 1e6:.{1 if count >= 10**7 else 3}f}"
