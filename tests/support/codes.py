"""Checks of error codes for `pytest.raises(..., check=has_code(CODE))`."""

from collections.abc import Callable

from fedvit.errors import FedvitError


def has_code(code: str, text: str = "") -> Callable[[FedvitError], bool]:
    """Return a check that an error has this code, and that its message contains `text`, usually a value."""

    def check(error: FedvitError) -> bool:
        assert error.code == code, f"{error.code}: {error}"
        assert text in str(error)
        return True

    return check
