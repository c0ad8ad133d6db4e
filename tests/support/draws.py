"""Counts of what tests draw: kills, faults, seeds."""

import os

IS_THOROUGH = "FEDVIT_THOROUGH" in os.environ


def choose_count(few: int, many: int) -> int:
    """Return `few`, or `many` under `make test-thorough`."""
    return many if IS_THOROUGH else few
