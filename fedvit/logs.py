"""Log lines for people and for machines: constant text, values as fields; as one JSON object per line if asked for."""

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from fedvit.task_names import KINDS, TaskName
from fedvit.terminal import escape_controls

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


FILE_BYTES = 10_000_000
OLD_FILES = 5
"""A log file that grows beyond FILE_BYTES is renamed to NAME.1, that one to NAME.2, and so on."""
_LONGEST_LINE_BYTES = 100_000
"""Longer lines may exceed FILE_BYTES."""


FORMAT_VARIABLE = "FEDVIT_LOG_FORMAT"
"""In the environment: `json` or `text`. The option --log-format sets it, so that child processes write the same."""

Fields = Callable[[], Mapping[str, Any]]
_context: ContextVar[tuple[Fields, ...]] = ContextVar("log fields", default=())


class KeyValueFormatter(logging.Formatter):
    """`2026-11-22 12:00:01 I round closed  round=7 received=9`, without control characters of its values"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # the line without the traceback that may follow
        fields = [f"{name}={_short(value)}" for name, value in _fields(record).items()]
        text = super().formatMessage(record)
        return f"{text}  {' '.join(fields)}" if fields else text


class JsonFormatter(logging.Formatter):
    """`{"date": "2026-11-22T12:00:01.000+00:00", "level": "info", "message": "round closed", "round": 7}`

    `fields` are part of every line, also those that are added later, as are those of `thread_log` and `log_fields`. A
    line about a task has the task's name.
    """

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._always = {} if fields is None else fields

    def format(self, record: logging.LogRecord) -> str:
        around: dict[str, Any] = dict(self._always)
        for read in _context.get():
            around |= read()
        fields = _name_task(around, _fields(record))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), record.getMessage(), fields, at=record.created)


def json_line(level: str, message: str, fields: Mapping[str, object], *, at: float | None = None) -> str:
    """One line of a log in JSON; `at` is a Unix time, by default now."""
    date = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    line = {"date": date.isoformat(timespec="milliseconds"), "level": level, "message": message}
    return escape_controls(json.dumps(line | {name: _plain(value) for name, value in fields.items()}))


def as_json() -> bool:
    """Return whether logs are written as JSON."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    # libraries (Ray) add fields of their own to all records
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and not name.startswith("_")}


def _name_task(around: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line with the name of the task that it is about; `around`: those of all lines there."""
    fields = around | own
    if "round" not in own or own.get("kind") not in KINDS or not {"run", "device"} <= fields.keys():
        if own.get("round", around.get("round")) != around.get("round"):
            fields.pop("task", None)  # of the task around it, which it is not about
        return fields
    name = TaskName(fields["run"], own["round"], fields["device"], own["kind"], own.get("attempt", 0))
    known = TaskName.parse(around.get("task", ""))
    if known and not name.attempt and known[:4] == name[:4]:
        name = known
    return fields | name.fields()


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)


class _LogFile(RotatingFileHandler):
    """A log file that is replaced before a line that does not fit.

    The base class formats each line twice, to know its length; this one only the lines near the end of a file.
    """

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        if self.stream and os.fstat(self.stream.fileno()).st_size + _LONGEST_LINE_BYTES < self.maxBytes:
            return False
        return bool(super().shouldRollover(record))


def configure_logging(
    *,
    level: int = logging.INFO,
    file: Path | None = None,
    stderr: bool = True,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Send the program's log to standard error and/or a file. Called once, by a program's command line.

    In JSON every line has the given fields.
    """
    logging.raiseExceptions = False  # on a full disk lines are lost without a traceback
    root = logging.getLogger()
    root.setLevel(level)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if stderr else []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES))
    for handler in handlers:
        handler.setFormatter(JsonFormatter(fields) if as_json() else KeyValueFormatter())
        root.addHandler(handler)


@contextmanager
def log_fields(fields: Fields) -> Iterator[None]:
    """Add fields to the lines in JSON that this thread writes within the block; `fields` is called for each line."""
    token = _context.set((*_context.get(), fields))
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def thread_log(file: Path, fields: Mapping[str, object] | None = None) -> Iterator[None]:
    """Write log lines of the calling thread also to `file` within the block; in JSON they have the fields."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(JsonFormatter() if as_json() else KeyValueFormatter())
    of_thread = dict(fields or {})
    mine = threading.get_ident()
    handler.addFilter(lambda record: record.thread == mine)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with log_fields(lambda: of_thread):
            yield
    finally:
        root.removeHandler(handler)
        handler.close()
