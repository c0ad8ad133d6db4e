"""The only way of text to a terminal: what peers and file names contain is shown, and controls nothing.

Programs replace their standard streams by `guard_streams`, so that no caller has to remember to escape. Styles and
moves of the cursor, which are this software's own, pass beside the guard: `write_styled`, and the `Console` of
profiles.report.console.
"""

import io
import re
import sys
from typing import TextIO

_CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of text
    "\u2028\u2029"  # separate lines and paragraphs
    "\ud800-\udfff"  # bytes of file names that are not UTF-8
)
_CONTROL = re.compile(f"[{_CONTROLS}]")
_CONTROL_OR_BREAK = re.compile(f"[\t\n{_CONTROLS}]")


def escape_controls(text: str) -> str:
    r"""Replace control characters by visible escapes. JSON stays JSON, with the same meaning.

    >>> escape_controls("a\x1b[2J\x9b1m\n") == r"a\u001b[2J\u009b1m" + "\n"
    True
    """
    return text if text.isprintable() else _CONTROL.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""Replace control characters and line breaks: text of a peer that must stay within its line.

    >>> print(escape_line("pi\n2026-11-22 all is well"))
    pi\u000a2026-11-22 all is well
    """
    return text if text.isprintable() else _CONTROL_OR_BREAK.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class GuardedStream(io.TextIOBase):
    """A text stream that escapes control characters. It has no `buffer`, so that bytes cannot pass it by."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str | bytes) -> int:
        """Write a text with its control characters escaped; bytes, as of click's completion scripts, are UTF-8."""
        written = text if isinstance(text, str) else text.decode(errors="backslashreplace")
        self.unguarded.write(escape_controls(written))
        return len(text)

    def flush(self) -> None:
        self.unguarded.flush()

    def fileno(self) -> int:
        return self.unguarded.fileno()

    def isatty(self) -> bool:
        return self.unguarded.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.unguarded.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.unguarded.errors


def guard_streams() -> None:
    """Let standard output and standard error of this process escape control characters from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def remove_guard(stream: TextIO) -> TextIO:
    """Return the stream below the guard, for text whose foreign parts are escaped already."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream


def write_styled(text: str) -> None:
    """Write text with escape sequences of this software's own; the caller escapes every foreign part."""
    stream = remove_guard(sys.stdout)
    stream.write(text)
    stream.flush()
