"""Which tests go to one process where several test: those that share what takes seconds to make.

By text, as the process that hands them out knows no more of a test than its id. Groups are handed out in the order in
which their first tests were collected.
"""

import os
import re
import time
from collections.abc import Sequence
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

SHARING = "bundles|dashboard|debian_packages|pages|pentest|plugins|ray|tasks"
ALONE = re.compile(rf"tests/(arm/|e2e/test_(?!{SHARING}))")
"""Tests of processes, which mostly wait or are emulated: each goes to the first free worker, but for files whose tests
share what takes long to make."""
CASE = re.compile(r"(tests/contracts/test_methods\.py::)\w+\[(.+?)(-coded|-full batch|-\d of 8)?\]")
"""Tests of one method share its graphs and runs."""


def group_of(test: str) -> str:
    """
    >>> group_of("tests/contracts/test_methods.py::test_the_graph_trains_what_torch_trains[fedtp-head-rod-1 of 8]")
    'tests/contracts/test_methods.py::fedtp-head-rod'
    >>> group_of("tests/contracts/test_fuzz.py::test_a"), group_of("tests/e2e/test_run.py::test_b[c]")
    ('tests/contracts/test_fuzz.py', 'tests/e2e/test_run.py::test_b[c]')
    >>> group_of("tests/arm/checks.py::test_a[cortex-a72]")
    'tests/arm/checks.py::test_a[cortex-a72]'
    """
    if ALONE.match(test):
        return test
    if case := CASE.fullmatch(test):
        return case[1] + case[2]
    return test.partition("::")[0]


UNTIL = "FEDVIT_TESTS_UNTIL"
"""A time in seconds since 1970: no group begins after it (CI on a machine that is slower than it should be)."""


class Groups(LoadScopeScheduling):
    """A group goes to one process as a whole."""

    left_out: Sequence[str] = ()
    """Groups that were not begun, as it was too late."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        """Leave out a worker that replaces a dead one and still collects: xdist 3.8 ends the session there."""
        if node in self.registered_collections:
            if self.workqueue and time.time() > float(os.environ.get(UNTIL, "inf")):
                self.left_out = [*self.left_out, *self.workqueue]
                self.workqueue.clear()
            super()._reschedule(node)
