"""Tests that `make test` leaves out and `make test-slow` runs.

Two rules: a contract is slow if its parameters name methods and none of them is a main one; a file or a test is slow if
it says so with `pytest.mark.slow`: chaos, attacks, clusters, and longer forms of a story that a faster test tells.
"""

from typing import Any

import pytest

MAIN_METHODS = frozenset({"eftvit", "fedperfix", "fedtp", "pfedpg"})


def find_methods(parameters: dict[str, Any], methods: frozenset[str]) -> set[str]:
    """Find the methods that parameters name: as text, or as a case with a `name`.

    >>> sorted(find_methods({"name": "fedavg", "seed": 1, "model": "resnet"}, frozenset({"fedavg", "fedtp"})))
    ['fedavg']
    """
    values = (getattr(value, "name", value) for value in parameters.values())
    return {value for value in values if isinstance(value, str) and value in methods}


def mark_other_methods(items: list[pytest.Item], methods: frozenset[str]) -> None:
    """Mark the contracts of methods that are not main ones."""
    for item in items:
        named = find_methods(item.callspec.params, methods) if hasattr(item, "callspec") else set()
        if named and not named & MAIN_METHODS:
            item.add_marker(pytest.mark.slow)
