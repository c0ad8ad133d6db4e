import json
import logging
import math
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fedvit.logs import JsonFormatter, KeyValueFormatter, log_fields
from fedvit.task_names import TaskName
from tests.support.children import run_child

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def line(message: str, *arguments: object, level: int = logging.INFO, **fields: Any) -> str:
    record = logging.getLogger("test").makeRecord("test", level, __file__, 1, message, arguments, None, extra=fields)
    return KeyValueFormatter().format(record)


def test_text_then_fields() -> None:
    assert re.fullmatch(DATE + " I round closed  round=7 received=9", line("round closed", round=7, received=9))
    assert re.fullmatch(DATE + " W connected to pi-1", line("connected to %s", "pi-1", level=logging.WARNING))


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
    done = run_child([sys.executable, "-c", CONFIGURE, str(file), where], check=True)
    written = file.read_text()
    assert re.fullmatch(DATE + r" W shown  round=1\n", written)
    assert done.stderr == (written if where == "stderr" else "")
    assert done.stdout == ""


FILL = """
import logging, sys
from pathlib import Path
import fedvit.logs
fedvit.logs.FILE_BYTES = 1000
fedvit.logs.configure_logging(file=Path(sys.argv[1]), stderr=False)
for number in range(500):
    logging.getLogger("fedvit.x").info("line", extra={"number": number})
"""


def test_a_log_that_has_grown_is_laid_aside(tmp_path: Path) -> None:
    """The newest lines are in the file, those before in the files beside it, the oldest nowhere."""
    subprocess.run([sys.executable, "-c", FILL, str(tmp_path / "coordinator.log")], check=True)
    files = [tmp_path / f"coordinator.log{end}" for end in (".5", ".4", ".3", ".2", ".1", "")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= 1000 for file in files)
    numbers = [int(line.partition("number=")[2]) for file in files for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 500))


def json_of(message: str, fields: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    record = logging.getLogger("test").makeRecord("test", logging.WARNING, __file__, 1, message, (), None, extra=extra)
    return dict(json.loads(JsonFormatter(fields).format(record)))


def test_json_has_date_level_message_and_fields() -> None:
    line = json_of("refused", {"run": "r", "device": "a"}, device="pi", round=3, share=math.nan, path=Path("x"))
    date = line.pop("date")
    assert datetime.fromisoformat(date).tzinfo is not None
    assert line == {
        "level": "warning", "message": "refused", "run": "r", "device": "pi", "round": 3, "share": None, "path": "x"
    }  # fmt: skip


def test_json_is_one_line_whatever_is_in_it() -> None:
    """Also names of files that are no text, and tracebacks."""
    try:
        raise ValueError("wrong")
    except ValueError:
        info = sys.exc_info()
    record = logging.getLogger("test").makeRecord(
        "test", logging.ERROR, __file__, 1, "a\nb", (), info, extra={"f": "\udcff"}
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "a\nb"
    assert line["f"] == "\udcff"
    assert line["traceback"].endswith("ValueError: wrong")


THREADS = """
import logging, sys, threading
from pathlib import Path
from fedvit.logs import configure_logging, thread_log
folder = Path(sys.argv[1])
configure_logging(file=folder / "service.log", stderr=False)
def serve(run):
    with thread_log(folder / f"{run}.log", {"run": run}):
        logging.getLogger("fedvit.x").info("round closed", extra={"round": 1})
for run in ("a", "b"):
    thread = threading.Thread(target=serve, args=(run,))
    thread.start()
    thread.join()
logging.getLogger("fedvit.x").info("device online", extra={"device": "pi"})
"""


def test_json_of_a_service_names_the_run(tmp_path: Path) -> None:
    environment = {**os.environ, "FEDVIT_LOG_FORMAT": "json"}
    subprocess.run([sys.executable, "-c", THREADS, str(tmp_path)], check=True, env=environment)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (tmp_path / name).read_text().splitlines()]

    assert [(line.get("run"), line.get("device")) for line in lines("service.log")] == [
        ("a", None), ("b", None), (None, "pi")
    ]  # fmt: skip
    assert [(line["run"], line["round"]) for line in lines("b.log")] == [("b", 1)]


def in_task(task: TaskName, **own: Any) -> dict[str, Any]:
    """A line that is written during a task."""
    with log_fields(task.fields):
        return json_of("line", {"run": "r"}, **own)


def test_line_about_a_task_has_its_name() -> None:
    line = json_of("result accepted", {"run": "r"}, device="a", round=3, kind="train", attempt=2)
    assert line["task"] == "r.3.a.train.2"
    line = json_of("refused", {"run": "r"}, device="a", round=3, kind="train")
    assert line["task"] == "r.3.a.train.0", "the attempt is not known"
    assert "task" not in json_of("round closed", {"run": "r"}, round=3)


def test_line_during_a_task_has_its_name_unless_it_is_about_another() -> None:
    task = TaskName("r", 3, "a", "train", 2)
    assert in_task(task)["task"] == "r.3.a.train.2"
    assert in_task(task, round=3, kind="train")["task"] == "r.3.a.train.2"
    assert in_task(task, round=3, kind="blob")["task"] == "r.3.a.train.2"
    assert in_task(task, round=2, kind="train")["task"] == "r.2.a.train.0"
    assert "task" not in in_task(task, round=2)
    assert in_task(task, device="b", round=3, kind="train", attempt=1)["task"] == "r.3.b.train.1"
    assert "task" not in json_of("line", {"run": "r"})
