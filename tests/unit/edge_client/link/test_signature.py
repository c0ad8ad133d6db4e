"""A device's signature."""

from pathlib import Path

import pytest

from edge_client.link.identity import Identity
from edge_client.link.signature import Signature, find_signer, sign
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.deployments import make_deployment
from tests.support.hostile_coordinator import join_without_token

CONTENT = b"20 steps"


def make_identity(folder: Path, name: str) -> Identity:
    (folder / name).mkdir(parents=True)
    join_without_token(make_deployment(folder / f"deployment-{name}"), folder / name, name)
    return Identity(folder / name)


def test_signature_names_the_device(tmp_path: Path) -> None:
    identity = make_identity(tmp_path, "pi-1")
    signature = sign(CONTENT, identity)
    assert find_signer(CONTENT, signature) == "pi-1"
    assert find_signer(CONTENT, signature, identity.authority) == "pi-1"


def test_wrong_signatures_name_nobody(tmp_path: Path) -> None:
    one, other = (make_identity(tmp_path, name) for name in ("pi-1", "pi-2"))
    signature = sign(CONTENT, one)
    assert find_signer(b"21 steps", signature) is None
    assert find_signer(CONTENT, signature, other.authority) is None
    assert find_signer(CONTENT, Signature(other.certificate.read_text(), signature.value)) is None
    assert find_signer(CONTENT, Signature("no certificate", signature.value)) is None
    assert find_signer(CONTENT, Signature(signature.certificate, "no base64")) is None


def test_identity_without_its_key_is_an_error(tmp_path: Path) -> None:
    identity = make_identity(tmp_path, "pi-1")
    identity.key.unlink()
    with pytest.raises(ConfigError, check=has_code("FV1309")):
        sign(CONTENT, identity)
