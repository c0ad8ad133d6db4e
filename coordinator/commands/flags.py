"""What several commands share in reading their flags."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvit.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.record.store import Store


def key_value(pair: str) -> tuple[str, Any]:
    """The two halves of KEY=VALUE. Raises ConfigError when it is not written so."""
    key, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"option {pair!r} must be written KEY=VALUE")
    return key, literal(value)


def literal(text: str) -> Any:
    """A number or true/false where the text is one, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def existing_store(folder: Path, flag: str = "--out", *, writes: bool = False) -> "Store":
    """The record of all runs in a folder; what is asked of it is checked, the rest is not read.

    To read it needs no permission to write. Raises ConfigError, naming the flag to change, where there is none.
    """
    from coordinator.record.store import Store  # SQLAlchemy: half a second that flags which are wrong need not wait

    if not (folder / "fedvit.db").is_file():
        raise ConfigError(f"no runs in {folder.resolve()}: there is no fedvit.db; use {flag} for another folder")
    return Store.in_folder(folder, check=False) if writes or os.access(folder, os.W_OK) else Store.copy_of(folder)
