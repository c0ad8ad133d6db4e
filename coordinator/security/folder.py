"""A deployment: one folder with everything that a fleet's secured broker needs.

DIR/deployment.json        names, addresses and ports
DIR/authority.pem .key     the authority of all certificates
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
import fcntl
import ipaddress
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from coordinator.security.authority import Authority
from coordinator.security.broker.access import device_rules, enrolment_rules
from coordinator.security.broker.mosquitto import format_secured_configuration, password_line
from coordinator.security.registry import OpenToken, Registry, Rows, now
from coordinator.security.signing import PUBLISHER_KEY, GraphSigner
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write, storage_failed
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
    """An existing deployment. `change` is the only way to alter it."""

    folder: Path
    settings: Settings
    authority: Authority
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
            made = cls(new, settings, authority, _registry_in(new))
            made._write_new(publisher)
            if folder.exists():
                folder.rmdir()
            new.rename(folder)
        except OSError as error:
            raise StorageFailed("FV1701", f"cannot make folder {folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        folder = folder.resolve()
        deployment = cls(folder, settings, authority, _registry_in(folder))
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
            certificate, key = (folder / "authority.pem").read_bytes(), (folder / "authority.key").read_bytes()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError("FV1310", f"the deployment in {folder} cannot be read: {error}") from error
        return cls(folder, settings, Authority.load(certificate, key), _registry_in(folder))

    # --- paths and addresses --------------------------------------------------------------------------

    @property
    def configuration(self) -> Path:
        return self.folder / "mosquitto.conf"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the authority's certificate: a token carries it, so that the device can trust the authority."""
        return sha256(self.authority.der).digest()

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
            ca_file=self.folder / "authority.pem",
            cert_file=self.folder / "coordinator.pem",
            key_file=self.folder / "coordinator.key",
        )

    # --- changes --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self) -> Iterator[Rows]:
        """Change devices or tokens; the files that a broker has to reload are written first."""
        with self.registry.change() as rows:
            yield rows
            if rows.revocations.has_changed:
                self._write_revocations(rows)
            if rows.tokens.has_forgotten:
                self._write_logins(rows)
            elif rows.tokens.new:
                self._add_logins(rows.tokens.new)

    def _write_new(self, publisher: PublicKey) -> None:
        atomic_write(self.folder / "deployment.json", msgspec.json.format(msgspec.json.encode(self.settings)))
        atomic_write(self.folder / "authority.pem", self.authority.pem)
        atomic_write(self.folder / "authority.key", self.authority.key_pem, private=True)
        server, coordinator = self.authority.server(self.settings.hosts), self.authority.client(COORDINATOR)
        for name, issued in (("server", server), ("coordinator", coordinator)):
            atomic_write(self.folder / f"{name}.pem", issued.certificate)
            atomic_write(self.folder / f"{name}.key", issued.key, private=True)
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
            self._write_revocations(rows)
            self._write_logins(rows)

    def _write_revocations(self, rows: Rows) -> None:
        rules = device_rules(self.settings.federation, COORDINATOR, rows.revocations.list_devices())
        atomic_write(self.folder / "devices.acl", rules.encode())
        serials = [int(serial, 16) for serial in rows.revocations.list_serials()]
        revocations = self.authority.revocations(serials, rows.generation() + 1, now())
        atomic_write(self.folder / "revoked.pem", revocations)

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
        try:
            with self._logins.open("ab") as file:
                file.write("".join(map(_login, tokens)).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_failed(f"cannot write {self._logins}", error) from error


def _registry_in(folder: Path) -> Registry:
    return Registry(folder / "registry.db")


def _login(token: OpenToken) -> str:
    return password_line(token.id, login_of(token.secret_bytes))


@contextlib.contextmanager
def exclusively_served(folder: Path) -> Iterator[None]:
    """Hold the lock of the deployment in `folder`. Raises ConfigError, naming the process, if another one holds it."""
    handle = os.open(folder / "run" / "served", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode().strip()
            raise ConfigError("FV1314", f"{folder} is being served by process {owner}") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


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
    check_name(device, "device name")
    secret, settings = secrets.token_bytes(SECRET_BYTES), deployment.settings
    made = OpenToken(
        secrets.token_hex(8), device, base64.b64encode(secret).decode(), now() + valid_s, replaces=replaces
    )
    with deployment.change() as rows:
        if not replaces and rows.find_device(device) is not None:
            raise ConfigError(
                "FV1306",
                f"a device called {device!r} has joined already; choose another name, or let a new device take its "
                f"place: {command('coordinator', 'enroll', device, '--replace', deployment=deployment.folder)}",
            )
        rows.tokens.forget(now())
        rows.tokens.add(made)
        rows.add_audit("enroll", device, "replaces" if replaces else "")
    return Token(
        made.id,
        secret,
        device,
        settings.federation,
        deployment.fingerprint,
        settings.hosts[0],
        settings.port,
        settings.enrolment_port,
        policy,
        deployment.publisher,
    )
