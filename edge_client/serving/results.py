"""Predictions as JSON lines, in a file that stays small, or on standard output."""

import errno
import os
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_client.serving.models import Classification
from edge_client.serving.server import RankedClass, describe_answers
from fedvit.files import name_failure

MAX_RESULTS_BYTES = 10_000_000
"""Size at which a file is renamed to NAME.1, in the place of the one before."""
STDOUT = Path("-")


class ResultLine(Struct, frozen=True, omit_defaults=True):
    """One line: the answer to a picture, or the reason why there is none."""

    time_s: float  # wall clock
    source: str
    picture: str
    model: str = ""
    label: str | None = None  # None: unsure
    confidence: float = 0.0
    answers: list[RankedClass] = []
    error: str = ""


def make_line(source: str, picture: str, prediction: Classification | None, error: str = "") -> ResultLine:
    """Return the line of a picture."""
    # bytes of file names that are not UTF-8 are no text: JSON has them as escapes
    source, picture, error = (text.encode(errors="backslashreplace").decode() for text in (source, picture, error))
    if prediction is None:
        return ResultLine(time.time(), source, picture, error=error)
    label, answers = describe_answers(prediction)
    return ResultLine(time.time(), source, picture, prediction.model, label, round(prediction.confidence, 5), answers)


class ResultFile:
    """Appends lines to a file; `-` is standard output."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, line: ResultLine) -> None:
        """Append a line. Raises StorageFailed."""
        content = msgspec.json.encode(line) + b"\n"
        with name_failure(f"cannot write {self._file}"):
            if self._file == STDOUT:
                sys.stdout.write(content.decode())  # the guarded stream of a program takes text alone
                sys.stdout.flush()
                return
            with self._file.open("ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size + len(content) > MAX_RESULTS_BYTES:
                    self._file.replace(self._file.with_name(f"{self._file.name}.1"))
                    self.write(line)
                    return
                if file.write(content) < len(content):  # the next line must not join the half of this one
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
