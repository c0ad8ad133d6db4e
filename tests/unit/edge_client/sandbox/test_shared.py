"""Memory with the tensors of a result, which two processes see."""

import os
from collections.abc import Mapping

import numpy as np
import pytest

from edge_client.sandbox.shared import count_bytes, list_forms, make_shared, map_shared, write_tensors
from fedvit.errors import BadPayload
from fedvit.program import LABELS
from tests.support.agents import assert_same_bits
from tests.support.codes import has_code
from tests.support.settings import Setting


def test_tensors_come_out_as_they_went_in(settings: Mapping[str, Setting]) -> None:
    program = settings["eftvit"].program
    [collect] = [phase.collect for phase in program.train if phase.collect]
    forms = list_forms(program, {collect.output: 5, LABELS: 5})
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 9, shape).astype(dtype) for name, shape, dtype in forms}
    assert {collect.output, LABELS} < tensors.keys()
    shared = make_shared(count_bytes(forms))
    write_tensors(shared, forms, tensors)
    mapped = map_shared(shared, forms)
    assert_same_bits(mapped, tensors)
    assert not any(value.flags.writeable for value in mapped.values())
    os.close(shared)


def test_it_keeps_its_size_so_that_reading_never_fails() -> None:
    """A file that got shorter would end the reader with SIGBUS."""
    shared = make_shared(4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(shared, size)
    os.close(shared)


def test_more_rows_than_there_is_room_are_refused(settings: Mapping[str, Setting]) -> None:
    program = settings["eftvit"].program
    [collect] = [phase.collect for phase in program.train if phase.collect]
    shared = make_shared(count_bytes(list_forms(program, {collect.output: 5, LABELS: 5})))
    with pytest.raises(BadPayload, check=has_code("FV1481")):
        map_shared(shared, list_forms(program, {collect.output: 6, LABELS: 6}))
    os.close(shared)
