"""Log lines for people and for machines: constant text, values as fields."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


FILE_BYTES = 10_000_000
OLD_FILES = 5
"""A log file that grows beyond FILE_BYTES is renamed to NAME.1, that one to NAME.2, and so on."""


class KeyValueFormatter(logging.Formatter):
    """`2026-11-22 12:00:01 I round closed  round=7 received=9`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the line without the traceback that may follow
        fields = [
            f"{name}={_short(value)}"
            for name, value in vars(record).items()
            if name not in _STANDARD
            and not name.startswith("_")  # libraries (Ray) add some of their own to all records
        ]
        text = super().formatMessage(record)
        return f"{text}  {' '.join(fields)}" if fields else text


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)


def configure_logging(*, level: int = logging.INFO, file: Path | None = None, stderr: bool = True) -> None:
    """Send the program's log to standard error and/or a file. Called once, by a program's command line."""
    logging.raiseExceptions = False  # on a full disk lines are lost without a traceback
    root = logging.getLogger()
    root.setLevel(level)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if stderr else []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES))
    for handler in handlers:
        handler.setFormatter(KeyValueFormatter())
        root.addHandler(handler)


@contextmanager
def thread_log(file: Path) -> Iterator[None]:
    """Within the block, log lines of the calling thread are also written to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(KeyValueFormatter())
    mine = threading.get_ident()
    handler.addFilter(lambda record: record.thread == mine)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
