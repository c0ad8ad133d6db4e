"""Labels of each task."""

import pytest

from fedvit.label_forms import LabelForm
from fedvit.program import Batch, Text


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        (Batch(batch_size=2), ((), "int64")),
        (Batch(batch_size=2, text=Text(context=7)), ((7,), "int64")),
        (Batch(batch_size=2, labels=LabelForm(task="multi_label")), ((3,), "float32")),
    ],
)
def test_a_batch_says_what_a_label_is(batch: Batch, form: tuple[tuple[int, ...], str]) -> None:
    assert batch.describe_label(3) == form
