"""Keys, shares and signatures: fixed values, and what is refused."""

import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import CertificateSigningRequestBuilder, Name, NameAttribute
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.security.authority import Authority
from fedvit.errors import BadPayload, NotAllowed
from fedvit.secure.keys import Binding, KeyPair, MaskStream, agree, seal, unseal
from fedvit.secure.masks import BLOCK_WORDS, add_masks
from fedvit.secure.neighbours import pack_devices
from fedvit.secure.shamir import join_shares, split_secret
from fedvit.secure.signing import Credentials
from fedvit.secure.vectors import Vector, pack_vector, unpack_vector
from fedvit.wire.messages import SumAnswer, SumAsk, SumQuestion, SumSigned, SumSurvivors
from tests.support.codes import has_code
from tests.support.sums import SUM, MemoryDevice, make_terms, make_vector, play


def test_keys_of_fixed_secrets() -> None:
    """The stream is that of RFC 8439, appendix A.1."""
    one, other = bytes(range(32)), bytes(range(32, 64))
    assert agree(one, KeyPair(other).public) == agree(other, KeyPair(one).public)
    zeros = MaskStream(bytes(32)).read(64)
    assert zeros.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


def test_bindings_differ_in_each_part() -> None:
    terms = make_terms(4)
    bindings = [
        Binding.of(b"a", SUM, terms, b"r"),
        Binding.of(b"b", SUM, terms, b"r"),
        Binding.of(b"a", SUM, terms, b"s"),
    ]
    bindings += [
        Binding.of(b"a", type(SUM)(*changed), terms, b"r")
        for changed in (
            ("other", 1, "train", 1), ("run", 2, "train", 1), ("run", 1, "evaluate", 1), ("run", 1, "train", 2)
        )
    ]  # fmt: skip
    assert len({binding.derive(bytes(32), "mask", "a", "b") for binding in bindings}) == len(bindings)


@given(st.binary(min_size=32, max_size=32), st.integers(2, 25), st.data())
def test_shares_join_to_their_secret(secret: bytes, holders: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(2, holders))
    shares = dict(enumerate(split_secret(secret, holders, needed, bytes(32)), 1))
    chosen = data.draw(st.permutations(sorted(shares)))[:needed]
    assert join_shares({place: shares[place] for place in chosen}) == secret


def test_shares_are_fixed_by_their_seed() -> None:
    shares = split_secret(bytes(range(32)), 3, 2, bytes(32))
    assert [share.hex()[:10] for share in shares] == ["005c9852b2", "00b92fa362", "0015c6f412"]


def test_sealed_shares_are_for_one_key() -> None:
    sealed = seal(bytes(32), b"shares")
    assert unseal(bytes(32), sealed, "pi") == b"shares"
    for key, content in ((bytes(31) + b"1", sealed), (bytes(32), sealed[:-1] + b"1")):
        with pytest.raises(BadPayload, check=has_code("FV2312", "pi")):
            unseal(key, content, "pi")
    with pytest.raises(BadPayload, check=has_code("FV2312")):
        agree(bytes(range(32)), bytes(32))  # a point of small order


@given(st.sampled_from([16, 24, 32]), st.integers(0, 50), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_masks_cancel_and_vectors_keep_their_numbers(bits: int, words: int, exact: int, seed: int) -> None:
    vector = make_vector(np.random.default_rng(seed), words, exact, bits)
    packed = pack_vector(vector, bits)
    copy = unpack_vector(packed, words, exact, bits)
    assert all(map(np.array_equal, copy, vector))
    add_masks(copy, [(bytes(32), False)], bits)
    add_masks(copy, [(bytes(31) + b"1", False), (bytes(32), True), (bytes(31) + b"1", True)], bits)
    assert pack_vector(copy, bits) == packed
    with pytest.raises(BadPayload, check=has_code("FV2312")):
        unpack_vector(packed + b"0", words, exact, bits)


def test_masks_over_several_blocks_are_those_of_one_stream() -> None:
    words = 2 * BLOCK_WORDS + 5
    for bits in (16, 24, 32):
        vector = Vector.zeros(words, 2)
        add_masks(vector, [(bytes(32), False)], bits)
        assert pack_vector(vector, bits) == MaskStream(bytes(32)).read(words * bits // 8 + 16)


# --- certificates -----------------------------------------------------------------------------------------


def make_credentials(authority: Authority, device: str) -> Credentials:
    key = ec.generate_private_key(ec.SECP256R1())
    request = CertificateSigningRequestBuilder().subject_name(Name([NameAttribute(NameOID.COMMON_NAME, "x")]))
    certificate = authority.device(device, request.sign(key, SHA256()).public_bytes(Encoding.DER), time.time())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Credentials(certificate.public_bytes(Encoding.PEM), pem, authority.pem)


def _make_devices(authorities: dict[str, Authority], min_cohort: int = 1) -> dict[str, MemoryDevice]:
    draw = np.random.default_rng(1)
    return {
        name: MemoryDevice(name, make_vector(draw, 10, 1, 32), make_credentials(authority, name), min_cohort)
        for name, authority in authorities.items()
    }


def test_devices_of_one_deployment_add_up() -> None:
    authority = Authority.create("home", time.time())
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority))
    played = play(devices, make_terms(4), drops=lambda device, step: (device, step) == ("pi-4", "masked"))
    assert played.total is not None
    assert len(played.server.state.masked) == 3


def test_device_refuses_a_neighbour_of_another_deployment_or_name() -> None:
    authority, other = (Authority.create(name, time.time()) for name in ("home", "other"))
    devices = _make_devices({"pi-1": authority, "pi-2": authority, "pi-3": authority, "pi-4": other})
    played = play(devices, make_terms(4))
    assert played.total is not None
    assert (played.server.state.masked, played.server.refused) == (
        ["pi-1", "pi-2", "pi-3"],
        {"pi-4": "it belongs to another deployment"},
    )
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority))
    devices["pi-4"] = MemoryDevice("pi-4", devices["pi-4"].payload, make_credentials(authority, "pi-9"))
    played = play(devices, make_terms(4))
    assert played.total is not None
    assert "it is the certificate of ['pi-9']" in played.server.refused["pi-4"]


def test_coordinator_that_lies_about_who_left_gets_no_sum_of_fewer_than_the_devices_agreed_to() -> None:
    """Six devices are to be alone in the sum: each device is told that it is, with these and one more at the most."""
    authority, names = Authority.create("home", time.time()), [f"pi-{number}" for number in range(10)]
    devices = _make_devices(dict.fromkeys(names, authority), min_cohort=7)
    server = play(devices, make_terms(10, 9), drops=lambda device, step: step == "agree").server
    alone, others = names[:6], names[6:]
    told = {name: SumSurvivors(SUM, pack_devices(server._roster, [*alone, name])) for name in others}
    told |= {name: told[others[number % len(others)]] for number, name in enumerate(alone)}
    signed = {name: devices[name].answer(told[name]).signature for name in names}  # type: ignore[union-attr]
    reasons = set()
    for name in names:
        same = {peer: signed[peer] for peer in names if peer != name and told[peer] == told[name]}
        listed = {peer: signed[peer] for peer in alone if peer != name}  # with signatures of other lists
        for signatures in (same, listed | same):
            with pytest.raises((NotAllowed, BadPayload)) as refused:
                devices[name].answer(SumAsk(SUM, signatures))
            reasons.add(str(refused.value).rpartition(": ")[2])
    assert not any(device.revealed for device in devices.values())
    assert {"wrong signature"} < reasons
    assert {reason for reason in reasons if "of 7 devices have signed" in reason} == reasons - {"wrong signature"}


def test_device_whose_signature_is_wrong_leaves_and_ends_no_sum() -> None:
    authority = Authority.create("home", time.time())
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority))
    answer = devices["pi-4"].answer

    def spoil(question: SumQuestion) -> SumAnswer | bytes:
        given = answer(question)
        return replace(given, signature=b"0") if isinstance(given, SumSigned) else given

    devices["pi-4"].answer = spoil  # type: ignore[method-assign]
    played = play(devices, make_terms(4))
    assert played.total is not None
    assert "wrong signature" in played.server.refused["pi-4"]


def test_certificates_of_coordinator_and_broker_are_not_those_of_devices() -> None:
    authority = Authority.create("home", time.time())
    [(_, device)] = _make_devices({"pi-1": authority}).items()
    own = device._credentials
    assert own is not None
    for issued, name in (
        (authority.client("fedvit.coordinator", time.time()), "fedvit.coordinator"),
        (authority.server(["x"], time.time()), "broker"),
    ):
        other = Credentials(issued.certificate, issued.key, authority.pem)
        with pytest.raises(BadPayload, check=has_code("FV2312", "not the certificate of a device")):
            own.check_peer(name, other.certificate, b"keys", other.sign(b"keys"))


def test_device_refuses_a_cohort_below_its_policy() -> None:
    authority = Authority.create("home", time.time())
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority), min_cohort=5)
    assert "5 are needed" in play(devices, make_terms(4)).reason
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority), min_cohort=5)
    assert "min_cohort = 5" in play(devices, make_terms(4, 2)).reason
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority), min_cohort=4)
    played = play(devices, make_terms(4), drops=lambda device, step: (device, step) == ("pi-4", "masked"))
    assert played.total is None  # three are left, and none of them reveals anything
    assert not any(device.revealed for device in devices.values())
