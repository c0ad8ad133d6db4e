"""The key `selection`: which devices a round asks."""

from collections.abc import Callable
from typing import Any

from fedvit import plugins

SELECTIONS = ("uniform", "fair", "power_of_choice", "oort")
READ_NO_ANSWERS = ("uniform", "fair")
"""Selections that do not depend on what devices answered; those of packages may."""


def check_selection(name: str) -> None:
    """Raises ConfigError for an unknown selection. Imports no package."""
    plugins.check_value(plugins.SELECTORS, "selection", name, SELECTIONS)


def load_selector(name: str) -> Callable[..., Any] | None:
    """Load the function of a package's selector; None for fedvit's own.

    Raises ConfigError for an unknown name, as after the package was removed, and if it cannot be used.
    """
    check_selection(name)
    entry = plugins.find_entry(plugins.SELECTORS, name, SELECTIONS)
    return None if entry is None else plugins.load_function(plugins.SELECTORS, entry)
