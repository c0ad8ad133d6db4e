"""A deployment: one folder with everything that a fleet's secured broker needs.

DIR/deployment.json        names, addresses and ports
DIR/authority.pem .key     the authority of all certificates; during a rotation, authority.pem also has the next one
DIR/server.pem .key        the broker
DIR/coordinator.pem .key   the coordinator, one client among others
DIR/revoked.pem            certificates that are not valid any more
DIR/publisher              the public key of the publisher, which signs graphs that devices run
DIR/publisher.key          its private key, until somebody moves it off this machine
DIR/signatures.txt         its signatures
DIR/registry.db            devices and tokens
DIR/mosquitto.conf         the broker's configuration, and the files that it includes:
DIR/devices.acl, enrolment.acl, enrolment.passwords
DIR/run/                   logs, and the lock of the serving process
"""

import base64
import contextlib
import ipaddress
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from coordinator.security.authority import Authority
from coordinator.security.broker.access import device_rules, enrolment_rules
from coordinator.security.broker.mosquitto import format_secured_configuration, password_line
from coordinator.security.own_certificates import renew_own
from coordinator.security.registry import OpenToken, Registry, Rows, now
from coordinator.security.rotations import RotationRows
from coordinator.security.signing import PUBLISHER_KEY, GraphSigner
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write, name_failure
from fedvit.hints import command
from fedvit.public_keys import PUBLISHER_FILE, PublicKey, format_key, parse_key
from fedvit.publisher import PublisherKey
from fedvit.transport.address import Address
from fedvit.wire.enrolment import SECRET_BYTES, Token, login_of
from fedvit.wire.topics import check_name

COORDINATOR = "fedvit.coordinator"
"""The coordinator's user name at the broker. No device can have it: device names contain no dot."""

_LOGIN = re.compile(r"([0-9a-f]{16}):\$7\$\d+\$[A-Za-z0-9+/=]+\$[A-Za-z0-9+/]{86}==")
"""A complete line of the list of logins; a partial line after a crash does not match."""
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9a-fA-F:]*:[0-9a-fA-F:.]+")


class Settings(Struct, frozen=True, kw_only=True):
    """Settings that were chosen when the deployment was created."""

    federation: str
    listen: str
    port: int  # for devices with a certificate
    enrolment_port: int  # for those without
    hosts: tuple[str, ...]  # names and addresses in the server's certificate; the first goes into tokens


@dataclass(frozen=True)
class Deployment:
    """An existing deployment. `change` and `settle` are the only ways to alter its files."""

    folder: Path
    settings: Settings
    registry: Registry

    @classmethod
    def create(cls, folder: Path, settings: Settings, publisher: PublicKey = "") -> "Deployment":
        """Raise ConfigError if `folder` is not empty, StorageFailed if it cannot be written.

        The folder is created completely or not at all. Without a `publisher`, a new one's key lies in it.
        """
        check_name(settings.federation, "--federation")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("FV1311", f"{folder} exists already and is not changed; choose a new folder")
        authority = Authority.create(f"fedvit {settings.federation} {secrets.token_hex(4)}", now())
        new = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            (new / "run").mkdir(mode=0o700)
            made = cls(new, settings, _registry_in(new))
            made._write_new(authority, publisher)
            if folder.exists():
                folder.rmdir()
            new.rename(folder)
        except OSError as error:
            raise StorageFailed("FV1701", f"cannot make folder {folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        folder = folder.resolve()
        deployment = cls(folder, settings, _registry_in(folder))
        deployment.write_configuration()
        return deployment

    @classmethod
    def open(cls, folder: Path) -> "Deployment":
        """Open an existing deployment. Raises ConfigError if `folder` holds none, or others may read it."""
        folder = folder.resolve()
        file = folder / "deployment.json"
        if not file.is_file():
            raise ConfigError(
                "FV1310", f"there is no deployment in {folder}; make one with: {command('coordinator', 'init', folder)}"
            )
        for private in (folder, *folder.glob("*.key")):
            if private.stat().st_mode & 0o077:
                raise ConfigError("FV1312", f"{private} can be read by others on this machine; chmod go= {private}")
        try:
            settings = msgspec.json.decode(file.read_bytes(), type=Settings)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("FV1310", f"the deployment in {folder} cannot be read: {error}") from error
        deployment = cls(folder, settings, _registry_in(folder))
        deployment.authority  # noqa: B018 - says now what is wrong with it
        return deployment

    @property
    def authority(self) -> Authority:
        """The authority that signs, read anew as another process may rotate it. Raises ConfigError."""
        try:
            certificate, key = self.authority_file.read_bytes(), (self.folder / "authority.key").read_bytes()
        except OSError as error:
            raise ConfigError("FV1310", f"the deployment in {self.folder} cannot be read: {error}") from error
        return Authority.load(certificate, key)

    # --- paths and addresses --------------------------------------------------------------------------

    @property
    def configuration(self) -> Path:
        return self.folder / "mosquitto.conf"

    @property
    def authority_file(self) -> Path:
        """The certificates of all authorities that are trusted now; the first one signs."""
        return self.folder / "authority.pem"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the authority's certificate: a token carries it, so that the device can trust the authority."""
        return self.authority.digest

    @property
    def publisher(self) -> PublicKey:
        """The publisher's public key; "" in a deployment of earlier software. Raises ConfigError."""
        file = self.folder / PUBLISHER_FILE
        return format_key(parse_key(file.read_text())) if file.exists() else ""

    def find_signer(self) -> GraphSigner | None:
        """Return the signatures of this deployment; None if it has no publisher. Raises ConfigError."""
        return GraphSigner(self.folder, self.publisher) if self.publisher else None

    @property
    def address(self) -> Address:
        """The broker's address for the coordinator on this machine, with its certificate."""
        listen = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.listen, self.settings.listen)
        return self.address_at(listen, self.settings.port)

    def address_at(self, host: str, port: int) -> Address:
        """The same for a broker elsewhere that uses this deployment's configuration."""
        return Address(
            host,
            port,
            tls=True,
            ca_file=self.authority_file,
            cert_file=self.folder / "coordinator.pem",
            key_file=self.folder / "coordinator.key",
        )

    # --- changes --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self) -> Iterator[Rows]:
        """Change devices or tokens; the files that a broker has to reload are written first."""
        with self.registry.change() as rows:
            self._settle(rows)
            yield rows
            if rows.revocations.has_changed:
                self._write_revocations(rows)
            if rows.tokens.has_forgotten or (rows.tokens.new and not _has_whole_lines(self._logins)):
                self._write_logins(rows)
            elif rows.tokens.new:
                self._add_logins(rows.tokens.new)

    def settle(self, *, renew: bool = False) -> list[str]:
        """Complete what a rotation has begun, and renew the certificates of broker and coordinator that are due.

        With `renew` both are renewed. Returns the names of the changed files, which a broker has to read again.
        """
        with self.registry.change() as rows:
            changed = self._settle(rows, renew=renew)
            if renew:
                rows.add_audit("renew", ", ".join(changed))
            return changed

    def _settle(self, rows: Rows, *, renew: bool = False) -> list[str]:
        rotation, changed = RotationRows(rows).find_newest(), list[str]()
        if rotation is not None:
            trusted = rotation.certificate.encode()
            if rotation.is_open:
                trusted = self.authority.pem + trusted
            elif (key_file := self.folder / "authority.key").read_bytes() != rotation.key.encode():
                atomic_write(key_file, rotation.key.encode(), private=True)
            if self.authority_file.read_bytes() != trusted:
                self._write_revocations(rows)  # first: a broker refuses all devices of an authority without a list
                atomic_write(self.authority_file, trusted)
                changed.append(self.authority_file.name)
        changed += renew_own(self.folder, self.authority, COORDINATOR, self.settings.hosts, now(), early=renew)
        if changed:
            rows.raise_generation()
        return changed

    def _write_new(self, authority: Authority, publisher: PublicKey) -> None:
        atomic_write(self.folder / "deployment.json", msgspec.json.format(msgspec.json.encode(self.settings)))
        atomic_write(self.authority_file, authority.pem)
        atomic_write(self.folder / "authority.key", authority.key_pem, private=True)
        renew_own(self.folder, authority, COORDINATOR, self.settings.hosts, now())
        publisher = publisher or PublisherKey.create(self.folder / PUBLISHER_KEY).public
        atomic_write(self.folder / PUBLISHER_FILE, f"{publisher}\n".encode())
        self.registry.create()
        self.registry.close()  # the folder is about to be renamed

    def write_configuration(self) -> None:
        """Write mosquitto's files; at each start, since the folder may have been moved."""
        settings = self.settings
        text = format_secured_configuration(self.folder, settings.listen, settings.port, settings.enrolment_port)
        atomic_write(self.configuration, text.encode())
        atomic_write(self.folder / "enrolment.acl", enrolment_rules(settings.federation).encode())
        self.registry.check()
        with self.registry.change() as rows:
            self._settle(rows)
            self._write_revocations(rows)
            self._write_logins(rows)

    def _write_revocations(self, rows: Rows) -> None:
        rules = device_rules(self.settings.federation, COORDINATOR, rows.revocations.list_devices())
        atomic_write(self.folder / "devices.acl", rules.encode())
        serials = [int(serial, 16) for serial in rows.revocations.list_serials()]
        rotation, number = RotationRows(rows).find_newest(), rows.generation() + 1
        authorities = [rotation.authority] if rotation else [self.authority]
        if rotation and rotation.is_open:
            authorities = [self.authority, *authorities]
        lists = [authority.revocations(serials, number, now()) for authority in authorities]
        atomic_write(self.folder / "revoked.pem", *lists)

    @property
    def _logins(self) -> Path:
        return self.folder / "enrolment.passwords"

    def _write_logins(self, rows: Rows) -> None:
        """Write all logins. Existing lines are reused, since each takes milliseconds to compute."""
        existing = self._logins.read_text(errors="replace").splitlines() if self._logins.exists() else []
        known = {found[1]: f"{line}\n" for line in existing if (found := _LOGIN.fullmatch(line))}
        lines = [known.get(token.id) or _login(token) for token in rows.tokens.read_all()]
        atomic_write(self._logins, "".join(lines).encode(), private=True)

    def _add_logins(self, tokens: Sequence[OpenToken]) -> None:
        """Append logins, so that a token's cost does not grow with the fleet; the next start checks all lines."""
        with name_failure(f"cannot write {self._logins}"), self._logins.open("ab") as file:
            file.write("".join(map(_login, tokens)).encode())
            file.flush()
            os.fsync(file.fileno())


def _registry_in(folder: Path) -> Registry:
    return Registry(folder / "registry.db")


def _has_whole_lines(file: Path) -> bool:
    """Return whether a file is there and its last line whole; a full disk may have kept only its beginning."""
    if not file.exists():
        return False
    with name_failure(f"cannot read {file}"), file.open("rb") as lines:
        return lines.seek(0, os.SEEK_END) == 0 or (lines.seek(-1, os.SEEK_END) >= 0 and lines.read() == b"\n")


def _login(token: OpenToken) -> str:
    return password_line(token.id, login_of(token.secret_bytes))


def own_hosts(names: Sequence[str], listen: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """The hosts in the server's certificate: first those of the operator, then all names and addresses of this machine.

    Raises ConfigError if a name is invalid in a certificate.
    """
    for name in names:
        if not _HOST.fullmatch(name):
            raise ConfigError("FV1313", f"--host {name!r} must be a name or an address, without port")
    host = socket.gethostname()
    found = [*names, *addresses, host, f"{host}.local", "localhost", "127.0.0.1", "::1"]
    if listen not in ("0.0.0.0", "::"):
        found.append(listen)
    return tuple(dict.fromkeys(name for name in found if name))


def own_addresses() -> list[str]:
    """IPv4 and then IPv6 addresses of this machine that other machines can reach."""
    addresses = []
    for entry in (entry for entries in psutil.net_if_addrs().values() for entry in entries):
        try:
            address = ipaddress.ip_address(entry.address.partition("%")[0])
        except ValueError:
            continue  # a hardware address
        if not address.is_loopback and not address.is_link_local:
            addresses.append(address)
    return [str(address) for address in sorted(addresses, key=lambda address: address.version)]


def make_token(
    deployment: Deployment, device: str, valid_s: float, *, replaces: bool = False, policy: str = ""
) -> Token:
    """A token that one device can join with, once, within `valid_s` seconds.

    Raises ConfigError if the name is invalid, or is used and not to be replaced.
    """
    return make_tokens(deployment, [device], valid_s, replaces=replaces, policy=policy)[0]


def make_tokens(
    deployment: Deployment, devices: Sequence[str], valid_s: float, *, replaces: bool = False, policy: str = ""
) -> list[Token]:
    """Make a token for each of these devices in one change of the registry, or none. Raises ConfigError."""
    for device in devices:
        check_name(device, "device name")
    settings, fingerprint, publisher = deployment.settings, deployment.fingerprint, deployment.publisher
    tokens = [
        Token(
            secrets.token_hex(8),
            secrets.token_bytes(SECRET_BYTES),
            device,
            settings.federation,
            fingerprint,
            settings.hosts[0],
            settings.port,
            settings.enrolment_port,
            policy,
            publisher,
        )
        for device in dict.fromkeys(devices)
    ]
    expires_at = now() + valid_s
    with deployment.change() as rows:
        for token in tokens:
            if not replaces and rows.find_device(token.device) is not None:
                again = command("coordinator", "enroll", token.device, "--replace", deployment=deployment.folder)
                raise ConfigError(
                    "FV1306",
                    f"a device called {token.device!r} has joined already; choose another name, or let a new device "
                    f"take its place: {again}",
                )
        rows.tokens.forget(now())
        for token in tokens:
            secret = base64.b64encode(token.secret).decode()
            rows.tokens.add(OpenToken(token.id, token.device, secret, expires_at, replaces=replaces))
            rows.add_audit("enroll", token.device, "replaces" if replaces else "")
    return tokens
