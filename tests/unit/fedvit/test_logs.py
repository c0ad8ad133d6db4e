import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedvit.logs import KeyValueFormatter


def line(message: str, *arguments: object, level: int = logging.INFO, **fields: Any) -> str:
    record = logging.getLogger("test").makeRecord("test", level, __file__, 1, message, arguments, None, extra=fields)
    return KeyValueFormatter().format(record)


def test_text_then_fields() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d I round closed  round=7 received=9", line("round closed", round=7, received=9))


def test_without_fields_there_is_only_the_text() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d W connected to pi-1", line("connected to %s", "pi-1", level=logging.WARNING))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.23456, "1.235"),  # four digits
        (1234567.0, "1.235e+06"),
        (12, "12"),
        (None, "None"),
        ("plain", "plain"),
        ("two words", "'two words'"),
        ("", "''"),
        ("one\nline", r"'one\nline'"),  # what a device says must not look like a line of ours
        ("\x1b[31m", r"'\x1b[31m'"),
        (["a", "b"], "\"['a', 'b']\""),
    ],
)
def test_values(value: object, shown: str) -> None:
    assert line("event", field=value).endswith(f"event  field={shown}")


def test_fields_stand_before_a_traceback() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.getLogger("test").makeRecord(
            "test", logging.ERROR, __file__, 1, "failed", (), sys.exc_info(), extra={"round": 3}
        )
    first, *rest = KeyValueFormatter().format(record).splitlines()
    assert first.endswith("E failed  round=3")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: wrong"


CONFIGURE = """
import logging, sys
from pathlib import Path
from fedvit.logs import configure_logging
configure_logging(level=logging.WARNING, file=Path(sys.argv[1]), stderr=sys.argv[2] == "stderr")
logging.getLogger("fedvit.x").info("not shown")
logging.getLogger("fedvit.x").warning("shown", extra={"round": 1})
"""


@pytest.mark.parametrize("where", ["stderr", "file only"])
def test_logging_goes_to_a_file_and_to_standard_error(tmp_path: Path, where: str) -> None:
    """In a process of its own: the root logger is one for all. The folder of the file is made."""
    file = tmp_path / "logs" / "device.log"
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE, str(file), where], capture_output=True, text=True, check=True
    )
    written = file.read_text()
    assert re.fullmatch(r"\d\d:\d\d:\d\d W shown  round=1\n", written)
    assert done.stderr == (written if where == "stderr" else "")
    assert done.stdout == ""
