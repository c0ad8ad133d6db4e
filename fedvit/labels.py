"""Labels of devices, as an operator writes them."""

import re

from fedvit.errors import ConfigError

_LABEL = re.compile(r"([A-Za-z0-9._-]{1,64})=([A-Za-z0-9._-]{1,64})")


def parse_label(text: str) -> tuple[str, str]:
    """Name and value of a label. Raises ConfigError.

    >>> parse_label("site=berlin")
    ('site', 'berlin')
    """
    read = _LABEL.fullmatch(text)
    if read is None:
        raise ConfigError(
            "FV1415",
            f"label {text[:200]!r} cannot be used: expected KEY=VALUE, each 1 to 64 letters, digits, '.', '_' or '-'",
        )
    return read[1], read[2]
