"""The service that `coordinator --server` names."""

import os
from pathlib import Path

from fedvit.client.service import CA, TOKEN, Service
from fedvit.errors import ConfigError


def connect(url: str, token_file: Path | None, ca_file: Path | None) -> Service:
    """Return the service at an address. Raises ConfigError if there is no token, or a file cannot be read."""
    token = os.environ.get(TOKEN, "")
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("FV1815", f"--token-file {token_file} cannot be read: {error}") from error
    if not token:
        raise ConfigError("FV1815", f"a token is missing: name it with --token-file, or set {TOKEN}")
    authority = ca_file or (Path(os.environ[CA]) if os.environ.get(CA) else None)
    return Service(url, token, ca_file=authority)
