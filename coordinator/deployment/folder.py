"""A deployment: one folder with everything that makes a fleet's broker safe by default.

DIR/deployment.json        names, addresses and ports
DIR/authority.pem .key     who vouches for everybody
DIR/server.pem .key        the broker
DIR/coordinator.pem .key   the coordinator, one client among others
DIR/revoked.pem            certificates that are not valid any more
DIR/registry.json          devices and tokens
DIR/mosquitto.conf         the broker's configuration, and what it reads beside it:
DIR/devices.acl, enrolment.acl, enrolment.passwords
DIR/run/                   logs, and who serves this deployment now
"""

import base64
import ipaddress
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from coordinator.broker.access import device_rules, enrolment_rules
from coordinator.broker.mosquitto import password_line, secured_configuration
from coordinator.deployment.authority import Authority
from coordinator.deployment.registry import Device, OpenToken, Registry, RegistryFile, now
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write
from fedvit.transport.mqtt import Address
from fedvit.wire.enrolment import SECRET_BYTES, Token, login_of
from fedvit.wire.topics import check_name

COORDINATOR = "fedvit.coordinator"
"""The coordinator's user name at the broker. No device can be called so: names of devices have no dot."""


_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9a-fA-F:]*:[0-9a-fA-F:.]+")


class Settings(Struct, frozen=True, kw_only=True):
    """What was chosen when the deployment was made."""

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

    @classmethod
    def create(cls, folder: Path, settings: Settings) -> "Deployment":
        """Raises ConfigError when there is something in `folder` already, StorageFailed when it cannot be written.

        The folder appears whole or not at all.
        """
        check_name(settings.federation, "--federation")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already and is not touched; choose a new folder")
        authority = Authority.create(f"fedvit {settings.federation} {secrets.token_hex(4)}", now())
        new = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            (new / "run").mkdir(mode=0o700)
            made = cls(new, settings, authority)
            made._write_new()
            if folder.exists():
                folder.rmdir()
            new.rename(folder)
        except OSError as error:
            raise StorageFailed(f"cannot make folder {folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        deployment = cls(folder.resolve(), settings, authority)
        deployment.write_configuration()
        return deployment

    @classmethod
    def open(cls, folder: Path) -> "Deployment":
        """Raises ConfigError when there is no deployment in `folder`, or others may read it."""
        folder = folder.resolve()
        file = folder / "deployment.json"
        if not file.is_file():
            raise ConfigError(f"there is no deployment in {folder}; make one with: coordinator init {folder}")
        for private in (folder, *folder.glob("*.key")):
            if private.stat().st_mode & 0o077:
                raise ConfigError(f"{private} can be read by others on this machine; chmod go= {private}")
        try:
            settings = msgspec.json.decode(file.read_bytes(), type=Settings)
            certificate, key = (folder / "authority.pem").read_bytes(), (folder / "authority.key").read_bytes()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the deployment in {folder} cannot be read: {error}") from error
        return cls(folder, settings, Authority.load(certificate, key))

    # --- where things are -----------------------------------------------------------------------------

    @property
    def registry(self) -> RegistryFile:
        return RegistryFile(self.folder / "registry.json")

    @property
    def configuration(self) -> Path:
        return self.folder / "mosquitto.conf"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the authority's certificate: what a token lets a device trust."""
        return sha256(self.authority.der).digest()

    @property
    def address(self) -> Address:
        """Where this machine's coordinator finds the broker, with its certificate."""
        listen = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.listen, self.settings.listen)
        return self.address_at(listen, self.settings.port)

    def address_at(self, host: str, port: int) -> Address:
        """The same at a broker elsewhere that runs with this deployment's configuration."""
        return Address(
            host,
            port,
            tls=True,
            ca_file=self.folder / "authority.pem",
            cert_file=self.folder / "coordinator.pem",
            key_file=self.folder / "coordinator.key",
        )

    # --- changes --------------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator[Registry]:
        """Alter devices or tokens; what the broker reads follows from them and is written with them."""
        with self.registry.locked() as registry:
            before = registry.generation, registry.cuts
            yield registry
            if (registry.generation, registry.cuts) != before:
                self._write_derived(registry)
            self.registry.write(registry)

    def revoke(self, registry: Registry, device: Device) -> None:
        """Inside `change`: none of the device's certificates is valid any more, and its name may do nothing."""
        device.revoked_at = now()
        self.discard(registry, device)

    def discard(self, registry: Registry, device: Device) -> None:
        """Inside `change`: the certificates that the device has now are not valid any more."""
        serials = [certificate.serial for certificate in device.certificates]
        registry.revoked_serials += [serial for serial in serials if serial not in registry.revoked_serials]
        registry.generation += 1
        registry.cuts += 1

    def _write_new(self) -> None:
        atomic_write(self.folder / "deployment.json", msgspec.json.format(msgspec.json.encode(self.settings)))
        atomic_write(self.folder / "authority.pem", self.authority.pem)
        atomic_write(self.folder / "authority.key", self.authority.key_pem, private=True)
        server, coordinator = self.authority.server(self.settings.hosts), self.authority.client(COORDINATOR)
        for name, issued in (("server", server), ("coordinator", coordinator)):
            atomic_write(self.folder / f"{name}.pem", issued.certificate)
            atomic_write(self.folder / f"{name}.key", issued.key, private=True)
        self.registry.write(Registry())

    def write_configuration(self) -> None:
        """What mosquitto reads; written anew at each start, for the folder may have been moved."""
        settings = self.settings
        text = secured_configuration(self.folder, settings.listen, settings.port, settings.enrolment_port)
        atomic_write(self.configuration, text.encode())
        atomic_write(self.folder / "enrolment.acl", enrolment_rules(settings.federation).encode())
        with self.registry.locked() as registry:
            self._write_derived(registry)

    def _write_derived(self, registry: Registry) -> None:
        revoked = [device.name for device in registry.devices.values() if device.revoked_at is not None]
        rules = device_rules(self.settings.federation, COORDINATOR, revoked)
        atomic_write(self.folder / "devices.acl", rules.encode())
        logins = [password_line(token.id, login_of(token.secret_bytes)) for token in registry.tokens.values()]
        atomic_write(self.folder / "enrolment.passwords", "".join(logins).encode(), private=True)
        serials = [int(serial, 16) for serial in registry.revoked_serials]
        revocations = self.authority.revocations(serials, registry.generation + 1, now())
        atomic_write(self.folder / "revoked.pem", revocations)


def own_hosts(names: Sequence[str], listen: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """What the server's certificate is for: what the operator named first, then whatever this machine is called.

    Raises ConfigError when a name can be in no certificate.
    """
    for name in names:
        if not _HOST.fullmatch(name):
            raise ConfigError(f"--host {name!r} must be a name or an address, without port")
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


def make_token(deployment: Deployment, device: str, valid_s: float, *, replaces: bool = False) -> Token:
    """A token that one device can join with, once, within `valid_s` seconds.

    Raises ConfigError when the name cannot be used, or is used and is not to be replaced.
    """
    check_name(device, "device name")
    secret, settings = secrets.token_bytes(SECRET_BYTES), deployment.settings
    made = OpenToken(
        secrets.token_hex(8), device, base64.b64encode(secret).decode(), now() + valid_s, replaces=replaces
    )
    with deployment.change() as registry:
        if device in registry.devices and not replaces:
            raise ConfigError(
                f"a device called {device!r} has joined already; choose another name, or let a new device take its "
                f"place: coordinator enroll {device} --replace"
            )
        registry.forget_old_tokens(now())
        registry.tokens[made.id] = made
        registry.generation += 1
    return Token(
        made.id,
        secret,
        device,
        settings.federation,
        deployment.fingerprint,
        settings.hosts[0],
        settings.port,
        settings.enrolment_port,
    )
