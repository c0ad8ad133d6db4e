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

from coordinator.security.authority import Authority
from fedvit.errors import BadPayload
from fedvit.secure.keys import Binding, KeyPair, MaskStream, agree, seal, unseal
from fedvit.secure.masks import BLOCK_WORDS, add_masks
from fedvit.secure.shamir import join_shares, split_secret
from fedvit.secure.signing import Credentials
from fedvit.secure.vectors import Vector, pack_vector, unpack_vector
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
    assert "different deployments" in play(devices, make_terms(4)).reason
    devices = _make_devices(dict.fromkeys(["pi-1", "pi-2", "pi-3", "pi-4"], authority))
    devices["pi-4"] = MemoryDevice("pi-4", devices["pi-4"].payload, make_credentials(authority, "pi-9"))
    assert "not signed by a device of this deployment" in play(devices, make_terms(4)).reason


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
