"""What `edge-client doctor` says of keys: that of the vault, and that with which the device joined a deployment."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.patient import DAY_S, Finding, Patient
from edge_client.vault import Vault
from edge_client.vault_key import VaultKey
from fedvit.errors import ConfigError, StorageFailed

if TYPE_CHECKING:
    from cryptography import x509

SOON_DAYS = 10
"""A certificate is renewed when a third of its 90 days is left; who still has it then was not connected for weeks."""


def check_vault_key(patient: Patient) -> Iterator[Finding]:
    """Present where personal tensors are encrypted, for its owner alone, the right one, and not beside the vault."""
    check, file = "vault key", patient.vault_key
    if file is None and patient.state is None:
        yield Finding(check=check, level="ok", what="not checked: neither --data nor --state is given")
        return
    vault = None if patient.state is None else patient.state / "vault"
    try:
        if file is not None and not file.exists():
            if vault:
                Vault(vault).check_key()  # encrypted tensors want a key that is there
            what = f"{file} is not there yet: the first start makes it"
            yield Finding(check=check, level="ok", what=what)
            return
        key = VaultKey.load(file, make=False) if file else None
        if vault:
            Vault(vault, key).check_key()
    except ConfigError as error:
        lost = file is not None and not file.exists()
        what = f"{file} is not there, but {error}" if lost else str(error)
        yield Finding(check=check, level="error", what=what, remedy=_key_remedy(file))
        return
    except StorageFailed as error:
        remedy = "bring the vault back from a backup, or delete the state: personal tensors begin anew then"
        yield Finding(check=check, level="error", what=str(error), remedy=remedy)
        return
    if file is None:
        yield Finding(check=check, level="ok", what="none: personal tensors are not encrypted")
    elif patient.state and file.resolve().is_relative_to(patient.state.resolve()):
        what = f"{file} lies beside what it encrypts: who copies the state has both"
        yield Finding(check=check, level="warning", what=what, remedy="move it to another medium, and name it there")
    else:
        yield Finding(check=check, level="ok", what=f"{file} can be used, and opens what is encrypted here")


def _key_remedy(file: Path | None) -> str:
    if file is None:
        return "edge-client --vault-key FILE, with the key of this device"
    return "bring back this device's key with mode 600; without it personal tensors are lost: then delete the state"


def check_identity(patient: Patient) -> Iterator[Finding]:
    """What `join` left: that nothing is missing, that the key is secret, and how long the certificate holds."""
    check, identity = "identity", patient.identity
    if identity is None:
        begun = patient.identity_folder is not None and any(patient.identity_folder.glob("joining-*.key"))
        if begun:
            what = f"a join was begun and not finished ({patient.identity_folder})"
            remedy = "type edge-client join TOKEN again; if the token has expired, with a new one of coordinator enroll"
            yield Finding(check=check, level="warning", what=what, remedy=remedy)
        else:
            yield Finding(check=check, level="ok", what="this device has joined no deployment, or goes elsewhere")
        return
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    name = identity.membership.device
    again = f"join anew: coordinator enroll {name} --replace on the server, edge-client join TOKEN --replace here"
    files = (identity.key, identity.certificate, identity.authority, identity.folder / "request.der")
    if missing := [file.name for file in files if not file.is_file()]:
        what = f"{', '.join(missing)} missing in {identity.folder}"
        yield Finding(check=check, level="error", what=what, remedy=again)
        return
    if (mode := identity.key.stat().st_mode & 0o777) & 0o077:
        what = f"{identity.key} can be read by others (mode {mode:o}): they can pose as {name!r}"
        yield Finding(check=check, level="warning", what=what, remedy=f"chmod 600 {identity.key}; if in doubt {again}")
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
        key = load_pem_private_key(identity.key.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        what = f"key or certificate in {identity.folder} cannot be read: {error}"
        yield Finding(check=check, level="error", what=what, remedy=again)
        return
    names = [entry.value for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name] or certificate.public_key() != key.public_key():
        whose = "another key" if names == [name] else f"{', '.join(map(str, names)) or 'nobody'}"
        what = f"{identity.certificate} is for {whose}, this device is {name!r}"
        yield Finding(check=check, level="error", what=what, remedy=again)
        return
    yield _validity(patient.now_s, name, certificate, again)


def _validity(now_s: float, name: str, certificate: "x509.Certificate", again: str) -> Finding:
    begin, end = (at.timestamp() for at in (certificate.not_valid_before_utc, certificate.not_valid_after_utc))
    until = f"the certificate of {name!r} is valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now_s > end:
        what = f"the certificate of {name!r} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
        return Finding(check="identity", level="error", what=what, remedy=f"if the clock is right, {again}")
    if now_s < begin:
        what = f"by this device's clock {until}, but not before {certificate.not_valid_before_utc:%Y-%m-%d}"
        return Finding(
            check="identity", level="warning", what=what, remedy="set the clock: sudo timedatectl set-ntp true"
        )
    if end - now_s < SOON_DAYS * DAY_S:
        remedy = "let the device connect while the coordinator runs: it gets its next certificate at once"
        return Finding(check="identity", level="warning", what=until, remedy=remedy)
    return Finding(check="identity", level="ok", what=until)
