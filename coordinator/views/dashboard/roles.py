"""Roles of those who look at the pages, and what each may do."""

from typing import Literal, get_args

Role = Literal["viewer", "operator", "admin"]
Act = Literal["submit", "pause", "cancel", "label", "release", "revoke", "enrol", "retry", "promote"]
SESSION = "fedvit.session"
"""Key of a request's scope with the session of who asks."""
_ROLES = get_args(Role)
_LEAST: dict[Act, Role] = {"revoke": "admin", "enrol": "admin"}
"""Least role of an act; others need an operator."""


def may(role: Role, act: Act) -> bool:
    """Return whether a role may do something.

    >>> may("viewer", "pause"), may("operator", "pause"), may("operator", "enrol"), may("admin", "enrol")
    (False, True, False, True)
    """
    return _ROLES.index(role) >= _ROLES.index(_LEAST.get(act, "operator"))
