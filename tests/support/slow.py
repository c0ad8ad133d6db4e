"""Tests that `make test` leaves out and `make test-slow` runs.

A test is slow if it takes seconds of a processor to show in full, or under a rarer condition, what quicker tests of the
same module, contract or program show in short: chaos, attacks, clusters, browsers, experiments, longer stories.

How often a slow test repeats what it draws: `tests.support.draws`.

It says so with `pytest.mark.slow`. A contract of methods is slow by itself if its parameters name none of the main
methods in its usual form.
"""

from typing import Any

import pytest

MAIN_METHODS = frozenset({"eftvit", "fedperfix", "fedtp", "pfedpg"})
MAIN_CASES = MAIN_METHODS | {"eftvit-coded", "fedtp-coded"}
"""Their usual forms, and those of which a device sends and fetches coded tensors."""


def find_methods(parameters: dict[str, Any], methods: frozenset[str]) -> set[str]:
    """Find the methods that parameters name: as text, or as a case with a `name`, by whose own text it is told apart.

    >>> sorted(find_methods({"name": "fedavg", "seed": 1, "model": "resnet"}, frozenset({"fedavg", "fedtp"})))
    ['fedavg']
    """
    values = (value for value in parameters.values() if isinstance(getattr(value, "name", value), str))
    return {str(value) for value in values if getattr(value, "name", value) in methods}


def mark_other_methods(items: list[pytest.Item], methods: frozenset[str]) -> None:
    """Mark the contracts of methods that are not main ones, and those of other forms of the main ones."""
    for item in items:
        named = find_methods(item.callspec.params, methods) if hasattr(item, "callspec") else set()
        if named and not named & MAIN_CASES:
            item.add_marker(pytest.mark.slow)
