"""Checks of `edge-client doctor` on keys: that of the vault, and that of the device's certificate."""

from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from edge_client.health.clocks import SET_CLOCK
from edge_client.health.doctor_context import DAY_S, DoctorContext, Finding
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from fedvit.errors import ConfigError, StorageFailed

SOON_DAYS = 10
"""A certificate is renewed when a third of its 90 days is left: with fewer days the device was offline for weeks."""


def check_vault_key(context: DoctorContext) -> Iterator[Finding]:
    """The vault's key exists if personal tensors are encrypted, is private, the right one, and not beside the vault."""
    check, file = "vault key", context.vault_key
    if file is None and context.state is None:
        yield Finding(check=check, level="ok", what="not checked: neither --data nor --state is given")
        return
    vault = None if context.state is None else context.state / "vault"
    try:
        if file is not None and not file.exists():
            if vault:
                Vault(vault).check_key()  # encrypted tensors need an existing key
            what = f"{file} does not exist yet: the first start creates it"
            yield Finding(check=check, level="ok", what=what)
            return
        key = VaultKey.load(file, make=False) if file else None
        if vault:
            Vault(vault, key).check_key()
    except ConfigError as error:
        lost = file is not None and not file.exists()
        what = f"{file} does not exist, but {error}" if lost else str(error)
        yield Finding(check=check, level="error", what=what, hint=_key_hint(file))
        return
    except StorageFailed as error:
        hint = "restore the vault from a backup, or delete the state: personal tensors are lost then"
        yield Finding(check=check, level="error", what=str(error), hint=hint)
        return
    if file is None:
        yield Finding(check=check, level="ok", what="none: personal tensors are not encrypted")
    elif context.state and file.resolve().is_relative_to(context.state.resolve()):
        what = f"{file} lies in the folder that it encrypts: a copy of the state contains both"
        yield Finding(check=check, level="warning", what=what, hint="move it to another medium, and pass its new path")
    else:
        yield Finding(check=check, level="ok", what=f"{file} is valid, and decrypts the tensors in the vault")


def _key_hint(file: Path | None) -> str:
    if file is None:
        return "edge-client --vault-key FILE, with the key of this device"
    return "restore this device's key with mode 600; without it personal tensors are lost: then delete the state"


def check_identity(context: DoctorContext) -> Iterator[Finding]:
    """The files of `join` are complete, the key is private, and the certificate is valid for some time."""
    check, identity = "identity", context.identity
    if identity is None:
        begun = context.identity_folder is not None and any(context.identity_folder.glob("joining-*.key"))
        if begun:
            what = f"a join was started and not finished ({context.identity_folder})"
            hint = "run edge-client join TOKEN again; if the token has expired, with a new one from coordinator enroll"
            yield Finding(check=check, level="warning", what=what, hint=hint)
        else:
            yield Finding(
                check=check, level="ok", what="this device has not joined a deployment, or uses another broker"
            )
        return
    name = identity.membership.device
    again = f"join again: coordinator enroll {name} --replace on the server, edge-client join TOKEN --replace here"
    files = (identity.key, identity.certificate, identity.authority, identity.folder / "request.der")
    if missing := [file.name for file in files if not file.is_file()]:
        what = f"{', '.join(missing)} missing in {identity.folder}"
        yield Finding(check=check, level="error", what=what, hint=again)
        return
    if (mode := identity.key.stat().st_mode & 0o777) & 0o077:
        what = f"{identity.key} can be read by others (mode {mode:o}): they can pose as {name!r}"
        yield Finding(check=check, level="warning", what=what, hint=f"chmod 600 {identity.key}; if in doubt {again}")
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
        key = load_pem_private_key(identity.key.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        what = f"key or certificate in {identity.folder} cannot be read: {error}"
        yield Finding(check=check, level="error", what=what, hint=again)
        return
    names = [entry.value for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name] or certificate.public_key() != key.public_key():
        whose = "another key" if names == [name] else f"{', '.join(map(str, names)) or 'no name'}"
        what = f"{identity.certificate} is for {whose}, this device is {name!r}"
        yield Finding(check=check, level="error", what=what, hint=again)
        return
    if identity.next_certificate.is_file():
        what = f"{identity.next_certificate} waits until the broker has accepted it; the former one stays until then"
        yield Finding(check=check, level="ok", what=what)
    yield _validity(context.now_s, name, certificate, again)


def _validity(now_s: float, name: str, certificate: x509.Certificate, again: str) -> Finding:
    begin, end = (at.timestamp() for at in (certificate.not_valid_before_utc, certificate.not_valid_after_utc))
    until = f"the certificate of {name!r} is valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now_s > end:
        what = f"the certificate of {name!r} expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
        hint = f"if this device's clock is right, {again}"
        return Finding(check="identity", level="error", what=what, hint=hint)
    if now_s < begin:
        began = f"{certificate.not_valid_before_utc:%Y-%m-%d}, when its deployment began"
        what = f"{until}, but this device's clock is before {began}"
        hint = "set the clock, unless the server's clock was ahead when the deployment was made: " + SET_CLOCK
        return Finding(check="identity", level="warning", what=what, hint=hint)
    if end - now_s < SOON_DAYS * DAY_S:
        hint = "let the device connect while the coordinator runs: it gets its next certificate at once"
        return Finding(check="identity", level="warning", what=until, hint=hint)
    return Finding(check="identity", level="ok", what=until)
