"""Public keys of publishers as text, and the form of their signatures. Needs no library for cryptography."""

import base64
import binascii
from typing import Annotated

from msgspec import Meta

from fedvit.errors import ConfigError

KEY_PREFIX = "ed25519:"
KEY_BYTES = 32
SIGNATURE_BYTES = 64
PUBLISHER_FILE = "publisher"
"""File of a device's state folder with the public key that `join` has pinned."""

PublicKey = Annotated[str, Meta(max_length=64)]
"""A publisher's public key as text, `ed25519:` and 43 characters, which people also compare; "": none."""
Signature = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


def format_key(public: bytes) -> PublicKey:
    """Return a public key as text, without characters that a shell or a path would change.

    >>> format_key(bytes(32))
    'ed25519:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA'
    """
    return KEY_PREFIX + base64.urlsafe_b64encode(public).decode().rstrip("=")


def parse_key(text: str) -> bytes:
    """Undo `format_key`. Raises ConfigError, naming the text."""
    body = text.strip().removeprefix(KEY_PREFIX)
    try:
        public = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        public = b""
    if not text.strip().startswith(KEY_PREFIX) or len(public) != KEY_BYTES:
        raise ConfigError("FV1436", f"{text[:80]!r} is no publisher's key: expected {KEY_PREFIX} and 43 characters")
    return public
