import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.health.recent_log import PrivatePaths, RecentLog
from fedvit.wire.messages import MAX_LOG_TEXT

log = logging.getLogger("fedvit.test")
CLASSES = ("cat", "red cat", "7", "in-grown nail", "red cat tail")


@pytest.fixture
def recent() -> Iterator[RecentLog]:
    log.setLevel(logging.INFO)
    handler = RecentLog(PrivatePaths([Path("/home/ann"), Path("/srv/My Pictures")]), CLASSES)
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
    log.setLevel(logging.NOTSET)


def test_recent_log_has_the_newest_lines(recent: RecentLog) -> None:
    for number in range(2000):
        log.info("step", extra={"number": number})
    text = recent.text()
    assert len(text) <= MAX_LOG_TEXT
    numbers = [int(line.partition("number=")[2]) for line in text.splitlines()]
    assert numbers == list(range(numbers[0], 2000))
    assert len(numbers) > 10


def test_recent_log_has_no_paths_and_no_class_names(recent: RecentLog) -> None:
    log.info("image skipped", extra={"file": "/srv/My Pictures/cat/ann smith.jpg", "reason": "cut off"})
    log.warning("class folders without images", extra={"count": 2, "first": "red cat"})
    log.warning("not used: /home/ann/Pictures/a b.jpg")
    log.error("class 7 of 7: cat, concatenated, in-grown nail", extra={"round": 7})
    text = recent.text()
    assert "ann" not in text
    assert "smith" not in text
    assert "jpg" not in text
    assert "reason='cut off'" in text
    assert "first='CLASS'" in text
    assert text.endswith("class 7 of 7: CLASS, concatenated, CLASS  round=7")


def test_class_name_at_the_end_of_a_sentence_is_hidden(recent: RecentLog) -> None:
    log.info("no image of cat. One of red cat tail, none of catalogue...")
    assert recent.text().endswith("no image of CLASS. One of CLASS, none of catalogue...")


def test_recent_log_keeps_the_end_of_a_long_record(recent: RecentLog) -> None:
    try:
        raise ValueError("x" * 100_000 + " the end")
    except ValueError:
        log.exception("task failed")
    assert recent.text().endswith("the end")
    assert len(recent.text()) <= MAX_LOG_TEXT
