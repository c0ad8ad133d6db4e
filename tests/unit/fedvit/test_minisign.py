"""Signature files of releases: those of minisign 0.11 itself are understood, and nothing changed or foreign is."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedvit.errors import ConfigError, PeerRefused
from fedvit.minisign import format_minisign_key, parse_any_key, sign, verify
from fedvit.public_keys import format_key
from tests.support.codes import has_code

CONTENT = b'{"a": 1}\n'
THEIR_KEY = "RWSVKOFO/y6iIBoj3LJTOURUDIn3Guk/NUIEeDatGElRiEn/s5RGFXAh"
HASHED = """untrusted comment: signature from minisign secret key
RUSVKOFO/y6iIMfaSMoaq8sfTk2SbltXx7DLKbGP5N8j3plfFN2KYt5lKoJAS/aFSlS2fkjmg8bRzGjmBTAu0Ib7nIsMeKqE4Qo=
trusted comment: hello
hvQZ9T4U2+hiJa3oiDRVs0PeC5eM6Epw6swjmT+DIL1M4lFFopw3G+VtPhs2Px8Q/o7enz9HPQFnmSoxQfzlCw==
"""
WHOLE = """untrusted comment: signature from minisign secret key
RWSVKOFO/y6iIMAruh4U5YyQhRhh9ZPFlNwprAuLFbMYeWymr8I3PlAtmlBC4OLHrxm9CId0MMfK+ctlOs+Wb+URf/WzTMHRBQw=
trusted comment: hello
J+34SlHxVkEUUkHAYYL0ef7fgp7l7VfYdWO4kHZCDy2utvIiWNjYuUMF/cdqqC+Bb1CgyNVszQ78aC9AE4H1Cw==
"""
"""Made by minisign -S and -S -l."""
OWN = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWN_KEY = format_key(OWN.public_key().public_bytes_raw())


@pytest.mark.parametrize("signature", [HASHED, WHOLE])
def test_signatures_of_minisign(signature: str) -> None:
    assert verify(parse_any_key(THEIR_KEY), CONTENT, signature, "a file") == "hello"


def test_own_signature() -> None:
    """minisign -V accepts it as well: tried by hand with 0.11."""
    assert verify(OWN_KEY, CONTENT, sign(OWN, CONTENT, "serial 7"), "a file") == "serial 7"
    assert parse_any_key(format_minisign_key(OWN_KEY)) == parse_any_key(f" {OWN_KEY}\n") == OWN_KEY


@pytest.mark.parametrize("signature", [HASHED, WHOLE, sign(OWN, CONTENT, "serial 7")])
def test_any_flipped_bit_is_noticed(signature: str) -> None:
    """In the content, in the signatures, in the signed comment; the first line is not signed."""
    key = OWN_KEY if "serial" in signature else parse_any_key(THEIR_KEY)
    for place in range(8 * len(CONTENT)):
        changed = bytearray(CONTENT)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(PeerRefused, check=has_code("FV1463", key)):
            verify(key, bytes(changed), signature, "a file")
    first, head, comment, tail = signature.splitlines()
    for changed_lines in (
        (first, head[:20] + ("A" if head[20] != "A" else "B") + head[21:], comment, tail),
        (first, head, comment + ".", tail),
        (first, head, comment, tail[:20] + ("A" if tail[20] != "A" else "B") + tail[21:]),
        (first, head, comment, head),
        (first, tail, comment, tail),
        (first, head, comment),
        (),
    ):
        with pytest.raises(PeerRefused, check=has_code("FV1463", "a file")):
            verify(key, CONTENT, "\n".join(changed_lines), "a file")


@pytest.mark.parametrize("key", ["", "ed25519:AA", "RW", THEIR_KEY[:-4], "Rx" + THEIR_KEY[2:], "é"])
def test_no_key(key: str) -> None:
    with pytest.raises(ConfigError):
        parse_any_key(key)
