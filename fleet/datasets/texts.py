"""Text of several sources, each of which may become a device: plays with "ROLE:" lines, and LEAF's JSON."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from fedvit.data.images import Indices
from fedvit.data.text import TextSettings, character_name
from fedvit.errors import ConfigError, DataError
from fleet.datasets.samples import Annotations

CONTEXT = 80
"""Characters of a sample, by default: LEAF's."""
_ROLE = re.compile(r"(?:\A|\n\s*\n)([^\n:]{1,80}):\n")


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """One text, source after source; a partition deals out its characters."""

    dataset: str  # a name for people and records, no path
    characters: str
    sources: Indices  # of each character: indices into `source_names`
    source_names: tuple[str, ...]
    settings: TextSettings  # how devices cut it into samples

    @property
    def annotations(self) -> Annotations:
        """Every character is a sample, its source the domain."""
        _, labels = np.unique(np.array(list(self.characters)), return_inverse=True)
        return Annotations(labels=labels.astype(np.int64), domains=self.sources)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(map(character_name, set(self.characters))))

    def text(self, rows: Indices) -> str:
        return "".join(self.characters[row] for row in rows)


class _LeafUser(Struct):
    x: list[str]
    y: list[str]


class _Leaf(Struct):
    users: list[str]
    user_data: dict[str, _LeafUser]


def is_texts(path: Path) -> bool:
    """Return True for a text: a .txt file, a .json file, or a folder that holds .json files alone."""
    return bool(_leaf_files(path)) or (path.is_file() and path.suffix == ".txt")


def read_texts(path: Path, context: int | None = None) -> Texts:
    """Read a play or LEAF's files (in which the context is fixed).

    Raises DataError for a file that cannot be used, ConfigError for another context than LEAF's.
    """
    files = _leaf_files(path)
    return _leaf(path, files, context) if files else _play(path, context or CONTEXT)


def _play(path: Path, context: int) -> Texts:
    """Speeches are divided by empty lines, and begin with a line "ROLE:"; a role's speeches are joined in order."""
    try:
        text = path.read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("FV2005", f"cannot read {path} as UTF-8 text: {error}") from error
    _, *pieces = _ROLE.split(text)  # what is before the first role belongs to none
    speeches: dict[str, str] = {}
    for role, speech in zip(pieces[::2], pieces[1::2], strict=True):
        speeches[role] = speeches.get(role, "") + speech.strip("\n") + "\n"
    if not speeches:
        raise DataError("FV2005", f"{path}: no line 'ROLE:' begins a speech; speeches are divided by empty lines")
    # characters that follow one another: each is predicted once
    return _join(path, speeches, TextSettings(context=context, stride=context))


def _leaf(path: Path, files: list[Path], context: int | None) -> Texts:
    """A user's samples one after another, each as its context and the character that follows."""
    samples: dict[str, str] = {}
    lengths: set[int] = set()
    for file in files:
        try:
            content = msgspec.json.decode(file.read_bytes(), type=_Leaf)
        except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
            raise DataError("FV2005", f"{file}: not LEAF's JSON with 'users' and 'user_data': {error}") from error
        for user in content.users:
            data: Any = content.user_data.get(user)
            if data is None or len(data.x) != len(data.y) or any(len(y) != 1 for y in data.y):
                raise DataError("FV2005", f"{file}: user {user!r} has no list of texts x with one character y for each")
            lengths |= {len(x) for x in data.x}
            pairs = zip(data.x, data.y, strict=True)
            samples[user] = samples.get(user, "") + "".join(x + y for x, y in pairs)
    if len(lengths) != 1 or 0 in lengths:
        raise DataError(
            "FV2005", f"{path}: texts x of {sorted(lengths)} characters; expected the same number, at least 1"
        )
    (length,) = lengths
    if context not in (None, length):
        raise ConfigError(
            "FV2005", f"{path}: its samples have a context of {length} characters, {context} are asked for"
        )
    return _join(path, samples, TextSettings(context=length, stride=length + 1))


def _join(path: Path, texts: dict[str, str], settings: TextSettings) -> Texts:
    names = sorted(texts)
    return Texts(
        dataset=path.resolve().name,
        characters="".join(texts[name] for name in names),
        sources=np.repeat(np.arange(len(names)), [len(texts[name]) for name in names]).astype(np.int64),
        source_names=tuple(names),
        settings=settings,
    )


def _leaf_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".json" else []
    files = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else []
    return sorted(files) if all(file.suffix == ".json" for file in files) else []
