"""Laws of plugins: each is a function of a plugin's name that raises if the law does not hold."""

from collections.abc import Callable
from typing import NoReturn

Law = Callable[[str], None]
"""The first line of its docstring states the law."""


class BrokenLaw(Exception):
    """A law does not hold; the text is the reason."""


def require(holds: bool, reason: str) -> None:
    """Raises BrokenLaw unless something holds."""
    if not holds:
        fail(reason)


def fail(reason: str) -> NoReturn:
    raise BrokenLaw(reason)
