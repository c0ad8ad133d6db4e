"""The console of tables and live views: its own styles reach the terminal, those of the content do not."""

import sys
from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from fedvit.terminal import escape_controls, remove_guard


class Console(rich.console.Console):
    """A console that escapes control characters before a table lays its cells out, and reads no markup."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, **settings: Any) -> None:
        stream = file or remove_guard(sys.stderr if stderr else sys.stdout)
        super().__init__(stderr=stderr, file=stream, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; of the segments only those that rich made to control the terminal may do so."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))
