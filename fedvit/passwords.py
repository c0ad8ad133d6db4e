"""The password of a page: from a file, or from the environment."""

import os
from pathlib import Path

from fedvit.errors import ConfigError

SHORTEST = 8
"""Characters of a password."""


def read_password(file: Path | None, variable: str, page: str, code: str) -> str | None:
    """Read the password of `page` from a file, else from an environment variable; None if there is none.

    Raises ConfigError with this code if it cannot be used.
    """
    if file is None:
        password, source = os.environ.get(variable), variable
    else:
        try:
            password, source = file.read_text().strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(code, f"the {page}'s password cannot be read: {error}") from error
    if password is not None and len(password) < SHORTEST:
        raise ConfigError(code, f"the {page}'s password in {source} has fewer than {SHORTEST} characters")
    return password
