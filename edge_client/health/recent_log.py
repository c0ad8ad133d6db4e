"""The last lines of a device's log, to be sent with the failure of a task: without personal data."""

import logging
import re
from collections import deque
from collections.abc import Collection
from pathlib import Path

from fedvit.logs import KeyValueFormatter
from fedvit.wire.messages import MAX_LOG_TEXT

MOST_LINES = 50
LONGEST_RECORD = 2000
"""Letters of one record that are kept: its end, where a traceback names the error."""


class PrivatePaths:
    """Hides paths in some folders, each with everything that follows it up to the next field or the end of the line.

    >>> PrivatePaths([Path("/home/ann")]).hide("image /home/ann/my pictures/a.png is damaged")
    'image PATH'
    """

    def __init__(self, folders: Collection[Path]) -> None:
        names = {str(form) for folder in folders for form in (folder, folder.absolute(), folder.resolve())}
        names -= {"/", "."}
        paths = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._paths = re.compile(rf"(?:{paths}).*?(?=  | \w+=|$)", re.MULTILINE) if paths else None

    def hide(self, text: str) -> str:
        return self._paths.sub("PATH", text) if self._paths else text


class RecentLog(logging.Handler):
    """Keeps the last records of the program's log.

    `text` leaves out class names and `private` paths. Class names that are numbers stay.
    """

    def __init__(self, private: PrivatePaths, classes: Collection[str]) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(KeyValueFormatter())
        self._kept: deque[str] = deque(maxlen=MOST_LINES)
        self._private = private
        self._words = {name for name in classes if re.fullmatch(r"[\w.-]+", name) and not name.isdigit()}
        phrases = [name for name in classes if not re.fullmatch(r"[\w.-]+", name)]
        self._phrases = sorted(phrases, key=len, reverse=True)  # one may begin with another

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(self.format(record)[-LONGEST_RECORD:])

    def text(self) -> str:
        """The newest lines, as many as fit into one message."""
        text = self._private.hide("\n".join(list(self._kept)))
        for name in self._phrases:
            text = text.replace(name, "CLASS")
        text = re.sub(r"[\w.-]+", self._hide_word, text)
        return text if len(text) <= MAX_LOG_TEXT else text[-MAX_LOG_TEXT:].partition("\n")[2]

    def _hide_word(self, found: re.Match[str]) -> str:
        """Hide a class name, also at the end of a sentence."""
        word = found[0]
        name = word if word in self._words else word.strip(".-")
        return word.replace(name, "CLASS") if name in self._words else word
