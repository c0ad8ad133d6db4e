"""A device's own text: `train.txt`, `test.txt` and `text.json` in one folder, cut into samples of equal length.

A sample is `context` characters and, for each of them, the character that follows. This module uses numpy only, as it
runs on devices.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from fedvit.data.images import Indices
from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import DataError

SETTINGS = "text.json"
"""The file that makes a folder one of text."""
SUFFIX = ".txt"

Length = Annotated[int, Meta(ge=1, le=65_536)]


class TextSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `text.json`: how the folder's texts are cut into samples."""

    context: Length  # characters of a sample, each of which has the following one as its label
    stride: Length  # characters from the start of one sample to the start of the next


class TextWindows(NamedTuple):
    """The text of a folder; windows are (n, context + 1) indices into `classes`."""

    classes: tuple[str, ...]
    train: Indices
    test: Indices


def is_text_folder(folder: Path) -> bool:
    return (folder / SETTINGS).is_file()


def text_file(folder: Path, part: str) -> Path:
    return folder / f"{part}{SUFFIX}"


def character_name(character: str) -> str:
    """The class of a character: itself, or the number of its code point if it cannot be seen.

    >>> [character_name(character) for character in "a \\n"]
    ['a', 'U+0020', 'U+000A']
    """
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"


def read_texts(folder: Path) -> TextWindows:
    """Read and cut the texts of a folder; without `test.txt` nothing is for testing.

    The classes are the characters of both texts. Raises DataError, naming the file, when one cannot be read or is too
    short for one sample.
    """
    settings = read_settings(folder)
    train = _read(text_file(folder, TRAIN))
    test = _read(text_file(folder, TEST)) if text_file(folder, TEST).exists() else ""
    characters = sorted({*train, *test}, key=character_name)
    codes = {character: code for code, character in enumerate(characters)}
    for part, text in ((TRAIN, train), (TEST, test)):
        if len(text) <= settings.context and (text or part == TRAIN):
            raise DataError(
                "FV1405",
                f"{text_file(folder, part)}: {len(text)} characters are too few for one sample:"
                f" {settings.context} of context and the one that follows",
            )
    cut = [
        windows(np.fromiter((codes[character] for character in text), np.int64, len(text)), settings)
        for text in (train, test)
    ]
    return TextWindows(tuple(map(character_name, characters)), *cut)


def read_settings(folder: Path) -> TextSettings:
    """Raises DataError when `text.json` cannot be read."""
    try:
        return msgspec.json.decode((folder / SETTINGS).read_bytes(), type=TextSettings)
    except OSError as error:
        raise DataError("FV1702", f"cannot read {folder / SETTINGS}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError("FV1405", f'{folder / SETTINGS}: {error}; expected {{"context": 80, "stride": 80}}') from error


def windows(codes: Indices, settings: TextSettings) -> Indices:
    """The samples of a text as a view of it: (n, context + 1), none if it is too short.

    >>> windows(np.arange(6), TextSettings(context=2, stride=2))
    array([[0, 1, 2],
           [2, 3, 4]])
    """
    length = settings.context + 1
    if len(codes) < length:
        return np.empty((0, length), np.int64)
    return np.lib.stride_tricks.sliding_window_view(codes, length)[:: settings.stride]


def write_texts(folder: Path, settings: TextSettings, parts: Sequence[tuple[str, str]]) -> None:
    """Write a device folder; `parts` are names of parts and their texts, of which empty ones make no file."""
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_bytes(msgspec.json.encode(settings) + b"\n")
    for part, text in parts:
        if text:
            text_file(folder, part).write_bytes(text.encode())


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise DataError("FV1702", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError("FV1405", f"{file}: byte {error.start} is not UTF-8 text") from error
