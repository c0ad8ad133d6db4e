"""Figures of a long benchmark, stored as they come: the same command goes on where it was stopped."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from fedvit.errors import ConfigError
from fedvit.files import atomic_write

Figures = dict[str, float]
"""Values by name."""


class _Content(Struct, frozen=True):
    """The file: settings that all figures share, and the figures of each part."""

    settings: dict[str, object]
    parts: dict[str, Figures] = {}


class KeptFigures:
    """Figures by the part of a benchmark. Without a file they are in memory only.

    Raises ConfigError if the file is damaged, or has figures of other settings.
    """

    def __init__(self, file: Path | None, settings: dict[str, object]) -> None:
        self._file = file
        self._content = _Content(settings)
        if file is None or not file.exists():
            return
        try:
            kept = msgspec.json.decode(file.read_bytes(), type=_Content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("FV0002", f"{file}: {error}") from error
        if kept.settings != settings:
            raise ConfigError("FV0002", f"{file} has figures of other settings; name another file")
        self._content = kept

    def measure(self, part: str, measure: Callable[[], Figures]) -> Figures:
        """Return the figures of a part, which are measured if the file does not have them."""
        parts = self._content.parts
        if part not in parts:
            parts[part] = measure()
            if self._file:
                atomic_write(self._file, msgspec.json.encode(self._content))
        return parts[part]
