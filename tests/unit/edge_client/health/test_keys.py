"""What the doctor says of keys: vaults with real keys, and identities as a deployment's authority makes them."""

import ssl
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.security.authority import Authority
from edge_client.health.doctor_context import DAY_S, DoctorContext, Finding
from edge_client.health.keys import SOON_DAYS, check_identity, check_vault_key
from edge_client.link.identity import Identity, Membership
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from fedvit.errors import ConfigError
from fedvit.transport.address import tls_context
from tests.support.deployments import make_request
from tests.support.devices import result

NOW_S = time.time()


# --- of the vault -------------------------------------------------------------------------------------


def seal_vault(tmp_path: Path) -> Path:
    """The key of a vault that holds encrypted tensors."""
    key = VaultKey.load(tmp_path / "key", make=True)
    Vault(tmp_path / "state" / "vault", key).commit(result(1), {"w": np.ones(4, np.float32)})
    return key.file


def vault_key(context: DoctorContext, file: Path | None) -> Finding:
    [found] = check_vault_key(replace(context, vault_key=file))
    assert (found.hint is None) == (found.level == "ok")
    return found


def test_no_key_and_nothing_encrypted(context: DoctorContext) -> None:
    found = vault_key(context, None)
    assert (found.level, found.what) == ("ok", "none: personal tensors are not encrypted")
    [unknown] = check_vault_key(replace(context, state=None))
    assert (unknown.level, unknown.what) == ("ok", "not checked: neither --data nor --state is given")


def test_the_right_key(context: DoctorContext, tmp_path: Path) -> None:
    file = seal_vault(tmp_path)
    found = vault_key(context, file)
    assert (found.level, found.what) == ("ok", f"{file} is valid, and decrypts the tensors in the vault")


def test_a_key_that_the_first_start_makes(context: DoctorContext, tmp_path: Path) -> None:
    found = vault_key(context, tmp_path / "key")
    assert (found.level, found.what) == ("ok", f"{tmp_path / 'key'} does not exist yet: the first start creates it")
    assert not (tmp_path / "key").exists(), "who looks makes none"


def test_encrypted_vault_needs_its_key(context: DoctorContext, tmp_path: Path) -> None:
    file = seal_vault(tmp_path)
    found = vault_key(context, None)
    assert (found.level, found.hint) == ("error", "edge-client --vault-key FILE, with the key of this device")
    assert "local.sealed is encrypted; name the device's key with --vault-key" in found.what
    file.unlink()
    found = vault_key(context, file)
    assert found.level == "error"
    assert found.what.startswith(f"{file} does not exist, but ")
    found = vault_key(context, VaultKey.load(tmp_path / "other", make=True).file)
    assert found.level == "error"
    assert "cannot be decrypted with key" in found.what


@pytest.mark.parametrize(
    ("length", "mode", "words"), [(32, 0o644, "can be read by others (mode 644)"), (5, 0o600, "5 bytes, expected 32")]
)
def test_a_key_that_is_not_used(context: DoctorContext, tmp_path: Path, length: int, mode: int, words: str) -> None:
    file = seal_vault(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    file.chmod(mode)
    found = vault_key(context, file)
    assert (found.level, words in found.what) == ("error", True)


def test_vault_key_inside_of_the_state(context: DoctorContext, tmp_path: Path) -> None:
    VaultKey.load(tmp_path / "state" / "key", make=True)
    found = vault_key(context, tmp_path / "state" / "key")
    assert found.level == "warning"
    assert "lies in the folder that it encrypts" in found.what


# --- of the deployment --------------------------------------------------------------------------------


def join(context: DoctorContext, *, issued_s: float = NOW_S, name: str = "pi") -> DoctorContext:
    """As `join` leaves it, of an authority that was made in time."""
    folder = context.identity_folder
    assert folder is not None
    authority = Authority.create("test", issued_s)
    key, request = make_request()
    certificate = authority.device(name, request, issued_s)
    folder.mkdir(parents=True)
    membership = Membership(device="pi", federation="home", host="127.0.0.1", port=1)
    files = {
        "key.pem": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "certificate.pem": certificate.public_bytes(Encoding.PEM),
        "authority.pem": authority.pem,
        "request.der": request,
        "membership.json": msgspec.json.encode(membership),
    }
    for file, content in files.items():
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o600)
    return replace(context, identity=Identity(folder))


def identity(context: DoctorContext) -> Finding:
    [found] = check_identity(context)
    assert (found.hint is None) == (found.level == "ok")
    return found


def test_identity_of_a_device_that_has_not_joined(context: DoctorContext, tmp_path: Path) -> None:
    assert identity(context).level == "ok"
    (tmp_path / "identity").mkdir()
    (tmp_path / "identity" / "joining-ab12.key").write_text("")
    found = identity(context)
    assert found.level == "warning"
    assert "a join was started and not finished" in found.what


@pytest.mark.parametrize(
    ("age_days", "level", "words"),
    [
        (90 - SOON_DAYS - 1, "ok", "is valid until"),
        (90 - SOON_DAYS + 1, "warning", "is valid until"),
        (91, "error", "expired on"),
        (-3, "warning", "this device's clock is before"),  # the authority begins two days before it is made
    ],
)
def test_how_long_a_certificate_holds(context: DoctorContext, age_days: float, level: str, words: str) -> None:
    found = identity(join(replace(context, now_s=NOW_S), issued_s=NOW_S - age_days * DAY_S))
    assert (found.level, words in found.what) == (level, True)


def test_a_certificate_that_the_broker_has_not_accepted_yet_is_named(context: DoctorContext) -> None:
    here = join(context)
    assert here.identity is not None
    here.identity.keep_next_certificate(ssl.PEM_cert_to_DER_cert(here.identity.certificate.read_text()))
    waiting, certificate = check_identity(here)
    assert (waiting.level, certificate.level) == ("ok", "ok")
    assert "next-certificate.pem" in waiting.what


@pytest.mark.parametrize("file", ["key.pem", "certificate.pem", "authority.pem", "request.der"])
def test_identity_names_missing_files(context: DoctorContext, tmp_path: Path, file: str) -> None:
    here = join(context)
    (tmp_path / "identity" / file).unlink()
    found = identity(here)
    assert (found.level, found.what) == ("error", f"{file} missing in {tmp_path / 'identity'}")
    assert "coordinator enroll pi --replace" in str(found.hint)


def test_identity_key_that_others_can_read_is_reported(context: DoctorContext, tmp_path: Path) -> None:
    here = join(context)
    (tmp_path / "identity" / "key.pem").chmod(0o640)
    key, certificate = check_identity(here)
    assert (key.level, certificate.level) == ("warning", "ok")
    assert "can be read by others (mode 640)" in key.what


def test_identity_certificate_of_another_device(context: DoctorContext, tmp_path: Path) -> None:
    found = identity(join(context, name="mallory"))
    assert (found.level, "is for mallory, this device is 'pi'" in found.what) == ("error", True)
    other = join(replace(context, identity_folder=tmp_path / "other"))
    assert other.identity is not None
    (tmp_path / "identity" / "certificate.pem").write_bytes(other.identity.certificate.read_bytes())
    (tmp_path / "identity" / "membership.json").write_bytes((tmp_path / "other" / "membership.json").read_bytes())
    found = identity(replace(context, identity=Identity(tmp_path / "identity")))
    assert "is for another key" in found.what
    (tmp_path / "identity" / "key.pem").write_text("nonsense")
    assert "cannot be read" in identity(replace(context, identity=Identity(tmp_path / "identity"))).what


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "authority.pem", "membership.json"])
def test_identity_with_a_flipped_bit_is_reported_without_a_crash(context: DoctorContext, name: str) -> None:
    """It connects, or it is refused with the file or the folder that is to blame."""
    here = join(context).identity
    assert here is not None
    file = here.folder / name
    raw = file.read_bytes()
    said = list[str]()
    for place in range(0, len(raw), 7):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            tls_context(Identity(here.folder).address())
        except ConfigError as error:
            said.append(str(error))
    assert said
    assert all(str(here.folder) in what for what in said)
