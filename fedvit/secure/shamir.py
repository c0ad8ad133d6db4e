"""Shamir's shares of a secret of 32 bytes: `needed` of them give the secret, fewer give nothing.

Shares are points of a random polynomial over the integers modulo a prime above 2**256.
"""

import hashlib
from collections.abc import Mapping

from fedvit.errors import BadPayload

PRIME = 2**256 + 297
"""The smallest prime above 2**256."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(secret: bytes, holders: int, needed: int, seed: bytes) -> list[bytes]:
    """Return shares for the holders 1, 2, ... of a secret. `seed`: 32 random bytes, the polynomial's coefficients."""
    coefficients = [int.from_bytes(secret, "big")]
    for power in range(1, needed):
        # 512 bits modulo a prime of 257 bits are uniform
        drawn = hashlib.sha512(b"fedvit shamir 1" + seed + power.to_bytes(4, "big") + secret).digest()
        coefficients.append(int.from_bytes(drawn, "big") % PRIME)
    shares = []
    for place in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of shares, by holder (from 1). Raises BadPayload if they are not shares of one secret."""
    secret = 0
    for place, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != place:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - place) % PRIME
        secret = (secret + int.from_bytes(share, "big") * numerator * pow(denominator, -1, PRIME)) % PRIME
    try:
        return secret.to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise BadPayload("FV2312", "shares of a secret do not belong together") from None
