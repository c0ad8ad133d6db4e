"""The next batch is prepared while a step works on the one before."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from edge_client.work.batches import Fed, ahead
from edge_client.work.runtime import Stopped
from fedvit.errors import DataError
from tests.support.codes import has_code
from tests.support.waiting import WAIT_S


def fed(number: int) -> Fed:
    """A batch that is known by its epoch."""
    return Fed(number, np.arange(2), np.ones(2, np.bool_), {})


def makers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "batches"]


def test_batches_come_in_their_order() -> None:
    """All of them, once each; the next one is made while one is worked on, and no more than one beyond that."""
    made: list[int] = []
    asked = threading.Semaphore(0)

    def batches() -> Iterator[Fed]:
        for number in range(20):
            made.append(number)
            asked.release()
            yield fed(number)

    seen = []
    for item in ahead(batches()):
        seen.append(item.epoch)
        while len(made) < min(item.epoch + 2, 20):
            assert asked.acquire(timeout=WAIT_S), "the next batch is not made while this one is used"
        assert len(made) <= item.epoch + 3
    assert seen == made == list(range(20))
    assert [*ahead(iter(()))] == makers() == []


def test_what_goes_wrong_with_a_batch_is_raised_where_it_is_used() -> None:
    """After the batches before it; and the thread is over."""

    def batches() -> Iterator[Fed]:
        yield fed(0)
        yield fed(1)
        raise DataError("FV0003", "the third cannot be made")

    seen = []
    with pytest.raises(DataError, check=has_code("FV0003")):  # noqa: PT012 - what came before counts, too
        for item in ahead(batches()):
            seen.append(item.epoch)
    assert seen == [0, 1]
    assert makers() == []


def test_who_leaves_early_leaves_no_thread() -> None:
    """However many batches there would be, and whether one leaves by itself or by an exception."""

    def endless() -> Iterator[Fed]:
        number = 0
        while True:
            yield fed(number)
            number += 1

    leaving = ahead(endless())
    assert next(leaving).epoch == 0
    assert makers() == ["batches"]
    leaving.close()  # type: ignore[attr-defined]
    assert makers() == []
    leaving = ahead(endless())
    with pytest.raises(Stopped):  # noqa: PT012 - as the loop over batches does
        for item in leaving:
            if item.epoch == 3:
                raise Stopped("FV0001", "enough")
    leaving.close()  # type: ignore[attr-defined]
    assert makers() == []
