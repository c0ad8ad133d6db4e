"""Messages about certificates, byte by byte, and the token that people copy. As in test_messages.py: what is kept in
`golden/enrolment-v1` is never changed; `python tests/contracts/test_enrolment.py` writes what is missing."""

import contextlib
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.errors import BadPayload, ConfigError, PeerRefused
from fedvit.wire import enrolment
from fedvit.wire.enrolment import (
    ENROLMENT_VERSION,
    FROM_COORDINATOR,
    FROM_DEVICE,
    MAX_ENROLMENT_BYTES,
    AnyEnrolment,
    Enrolment,
    JoinGranted,
    JoinRefused,
    JoinRequest,
    Renewed,
    RenewRequest,
    Token,
    decode_enrolment,
    encode_enrolment,
    login_of,
    seal,
    unseal,
)
from tests.support.codes import has_code

GOLDEN = Path(__file__).parent / "golden" / f"enrolment-v{ENROLMENT_VERSION}"
SECRET = bytes(range(16))
TOKEN = Token("0123456789abcdef", SECRET, "pi-1", "home", bytes(range(32)), "pi-server.local", 8883, 8884)
WITH_POLICY = msgspec.structs.replace(TOKEN, policy='[send]\nfeatures = "none"\n')
EXAMPLES: dict[str, AnyEnrolment] = {
    "join": JoinRequest(bytes(16), "pi-1", b"request"),
    "granted": JoinGranted(bytes(16), "pi-1", b"certificate", b"authority"),
    "denied": JoinRefused(bytes(16), "this token has expired"),
    "renew": RenewRequest(b"request"),
    "renewed": Renewed(b"certificate"),
    "renew-2": RenewRequest(b"request", (bytes(range(32)), bytes(32))),
    "renewed-2": Renewed(b"certificate", b"authority", b"endorsement"),
}
DIRECTIONS = {"join": FROM_DEVICE, "granted": FROM_COORDINATOR, "denied": FROM_COORDINATOR}


def write(name: str) -> bytes:
    message = EXAMPLES[name]
    if isinstance(message, RenewRequest | Renewed):
        return encode_enrolment(message)
    return seal(message, SECRET, DIRECTIONS[name])


def read(name: str, raw: bytes) -> AnyEnrolment:
    return unseal(raw, SECRET, DIRECTIONS[name]) if name in DIRECTIONS else decode_enrolment(raw)


def test_every_message_has_an_example() -> None:
    defined = {kind for kind in vars(enrolment).values() if isinstance(kind, type) and issubclass(kind, Enrolment)}
    assert set(typing.get_args(AnyEnrolment)) == defined - {Enrolment}
    assert {type(message) for message in EXAMPLES.values()} == defined - {Enrolment}
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {*EXAMPLES, "token", "token-2", "login"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_are_kept(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert read(name, golden) == EXAMPLES[name]
    if name in DIRECTIONS:
        assert write(name) == golden
    else:  # fields were added at the end since
        now, then = (msgspec.msgpack.decode(raw[1:]) for raw in (write(name), golden))
        assert now[: len(then)] == then
        assert len(now) == len(then) or f"{name}-2" in EXAMPLES


def test_the_token_and_its_login_are_kept() -> None:
    """A token outlives an update of the coordinator; mosquitto keeps the login."""
    for name, token in (("token", TOKEN), ("token-2", WITH_POLICY)):
        golden = (GOLDEN / f"{name}.bin").read_text()
        assert Token.parse(golden) == token
        assert token.text() == golden
    assert TOKEN.login == login_of(SECRET) == (GOLDEN / "login.bin").read_text()
    assert SECRET.hex() not in TOKEN.login


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_seal_holds_for_one_secret_and_one_direction(name: str) -> None:
    """An answer cannot be made of a question, and nothing without the secret."""
    raw = write(name)
    other = FROM_DEVICE if DIRECTIONS[name] is FROM_COORDINATOR else FROM_COORDINATOR
    with pytest.raises(BadPayload, check=has_code("FV1307")):
        unseal(raw, SECRET, other)
    with pytest.raises(BadPayload, check=has_code("FV1307")):
        unseal(raw, bytes(16), DIRECTIONS[name])


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_any_changed_byte_is_noticed(name: str, data: st.DataObject) -> None:
    """Of sealed messages; others are read as something else, or refused."""
    raw = bytearray(write(name))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    if name in DIRECTIONS:
        with pytest.raises((BadPayload, PeerRefused)):
            read(name, bytes(raw))
    else:
        with contextlib.suppress(BadPayload, PeerRefused):
            read(name, bytes(raw))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(raw: bytes) -> None:
    for name in EXAMPLES:
        with contextlib.suppress(BadPayload, PeerRefused):
            read(name, raw)
    with contextlib.suppress(BadPayload):
        decode_enrolment(bytes([ENROLMENT_VERSION]) + raw)


def test_another_version_is_refused_by_name() -> None:
    for name in EXAMPLES:
        with pytest.raises(PeerRefused, check=has_code("FV1513", "2")):
            read(name, b"\x02" + write(name)[1:])


def test_what_is_too_large_is_neither_written_nor_read() -> None:
    with pytest.raises(BadPayload, check=has_code("FV2301", str(MAX_ENROLMENT_BYTES))):
        encode_enrolment(Renewed(bytes(MAX_ENROLMENT_BYTES)))
    with pytest.raises(BadPayload, check=has_code("FV2301", str(MAX_ENROLMENT_BYTES))):
        decode_enrolment(bytes([1]) + bytes(MAX_ENROLMENT_BYTES))


@given(st.text(alphabet="ABCDEFabcdef0123456789-_=+/ \n", max_size=200))
def test_no_text_is_taken_for_a_token(text: str) -> None:
    for whole in (text, enrolment.TOKEN_PREFIX + text):
        with pytest.raises(ConfigError):
            Token.parse(whole)


def write_missing_golden_files() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    files = {name: write(name) for name in EXAMPLES}
    files |= {"token": TOKEN.text().encode(), "token-2": WITH_POLICY.text().encode(), "login": TOKEN.login.encode()}
    for name, raw in files.items():
        path = GOLDEN / f"{name}.bin"
        if not path.exists():
            path.write_bytes(raw)
            print(f"written: {path}")


if __name__ == "__main__":
    write_missing_golden_files()
