"""Start the mosquitto of this machine with our configuration: limits and password."""

import base64
import hashlib
import logging
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from coordinator.security.broker.process import FLEET_USER, START_S, Broker, BrokerProgram
from fedvit.files import atomic_write
from fedvit.transport.address import Address
from fedvit.transport.packets import MAX_PACKET_BYTES

log = logging.getLogger(__name__)

PASSWORD_ITERATIONS = 2_000
"""The broker has one thread and computes this for every connection: a fleet that reconnects must not wait."""

ENROLMENTS_AT_ONCE = 64
DEPLOYED_PACKET_BYTES = 256 * 1024
"""Largest packet at a deployment's broker: twice the size of a chunk's message, the largest that a fleet sends."""
LEAST_MEMORY_BYTES = 2**30
WATCHED_SHARE = 0.75
"""Share of the hard memory limit at which the coordinator restarts its broker, before the broker refuses clients."""
MAX_KEEPALIVE_S = 120
"""A client that is silent for longer counts as gone, whatever keep-alive it announced."""
_COMMON = [
    "# written by the coordinator at each start",
    "set_tcp_nodelay true",
    # retained messages would stay for ever, one per topic that a client invents; clients that retain are disconnected
    "retain_available false",
    # our clients leave no session behind; this is the shortest time that mosquitto supports
    "persistent_client_expiration 1h",
    # beyond these limits mosquitto drops silently; 0 (unlimited) is broken in several versions. 500 devices that send
    # results of 64 kB at the same moment need 32 MB
    "max_queued_messages 4096",
    "max_queued_bytes 67108864",
    "max_inflight_messages 64",
    "persistence false",
    "log_dest stderr",
    # no log_type for subscriptions: a client chooses how their lines begin, and could forge other lines
    "log_timestamp_format %Y-%m-%dT%H:%M:%S",
]


_LISTENER = [
    # unfinished messages of QoS 2 stay in the broker, 64 MiB for each connection; our programs do not use QoS 2
    "max_qos 1",
]


def memory_limit_bytes() -> int:
    """Beyond this limit mosquitto refuses every request that needs memory, which protects the rest of the machine.

    Half of this machine's memory, at least 1 GiB. An honest fleet needs 8 MiB (the window of a transfer, 64 chunks) for
    each device that cannot keep up, and about 100 kB for each connection.
    """
    return max(LEAST_MEMORY_BYTES, int(psutil.virtual_memory().total) // 2)


def choose_watched_bytes() -> int:
    """Resident memory at which our broker is restarted."""
    return int(WATCHED_SHARE * memory_limit_bytes())


def find_mosquitto() -> Path | None:
    """Also looks in the folders of Debian that are not in the PATH of an ordinary user."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    found = shutil.which("mosquitto", path=folders)
    return None if found is None else Path(found)


def start_mosquitto(program: Path, folder: Path, listen: str, address: Address) -> Broker:
    """Raise ConfigError when it does not come up, StorageFailed when `folder` cannot be written."""
    password_file = folder / "mosquitto.passwords"
    if address.password is not None:
        atomic_write(password_file, password_line(FLEET_USER, address.password).encode(), private=True)
    config = folder / "mosquitto.conf"
    atomic_write(config, configuration(listen, address, password_file).encode(), private=True)
    return run_mosquitto(program, config, address, folder / "mosquitto.log")


def run_mosquitto(
    program: Path, config: Path, address: Address, log_file: Path, operator_log: Callable[[str], None] = log.warning
) -> Broker:
    """Raise ConfigError when it does not come up; `operator_log` is called if it is slow."""
    kind = f"mosquitto {_version(program)} ({program})"
    started = BrokerProgram([str(program), "-c", str(config)], os.environ, log_file)
    return Broker(kind, address, started, most_bytes=choose_watched_bytes(), operator_log=operator_log)


def configuration(listen: str, address: Address, password_file: Path) -> str:
    """The text of mosquitto.conf. The limits are far above what the window of a transfer needs."""
    lines = [*_common(MAX_PACKET_BYTES), f"listener {address.port} {listen}", *_LISTENER]
    if address.password is None:
        lines.append("allow_anonymous true")
    else:
        lines += ["allow_anonymous false", f"password_file {password_file}"]
    return _text(lines)


def format_secured_configuration(folder: Path, listen: str, port: int, enrolment_port: int) -> str:
    """The text of a deployment's mosquitto.conf: one listener for certificates, one for tokens, and no other.

    All files that it names are in `folder`. The packet limit holds for the whole broker, not per listener.
    """
    tls = [f"certfile {folder}/server.pem", f"keyfile {folder}/server.key", "tls_version tlsv1.3"]
    return _text(
        [
            *_common(DEPLOYED_PACKET_BYTES),
            f"pid_file {folder}/run/mosquitto.pid",
            "per_listener_settings true",
            f"max_keepalive {MAX_KEEPALIVE_S}",
            "",
            # not a `listener`: mosquitto 2.0.11 forgets max_qos of a listener when it reloads its lists
            f"bind_address {listen}",
            f"port {port}",
            *_LISTENER,
            *tls,
            f"cafile {folder}/authority.pem",
            f"crlfile {folder}/revoked.pem",
            "require_certificate true",
            "use_identity_as_username true",
            "allow_anonymous false",
            f"acl_file {folder}/devices.acl",
            "",
            f"listener {enrolment_port} {listen}",
            *_LISTENER,
            *tls,
            "allow_anonymous false",
            f"password_file {folder}/enrolment.passwords",
            f"acl_file {folder}/enrolment.acl",
            f"max_connections {ENROLMENTS_AT_ONCE}",
        ]
    )


def _common(packet_bytes: int) -> list[str]:
    return [*_COMMON, f"max_packet_size {packet_bytes}", f"memory_limit {memory_limit_bytes()}"]


def _text(lines: list[str]) -> str:
    if os.geteuid() == 0:
        # started as root, it would change to the user mosquitto, which cannot read this folder; the change of user
        # would also clear the signal that ends it together with its parent
        lines = [lines[0], "user root", *lines[1:]]
    return "\n".join(lines) + "\n"


def password_line(user: str, password: str) -> str:
    """A line of mosquitto's password file: PBKDF2 with SHA-512."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, PASSWORD_ITERATIONS)
    return f"{user}:$7${PASSWORD_ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n"


def _version(program: Path) -> str:
    command = [str(program), "-h"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):  # starting it reports what is wrong
        output = ""
    found = re.search(r"mosquitto version (\S+)", output)
    return found[1] if found else "of unknown version"
