"""The address of a broker, its TLS settings, and words for errors of connections."""

import re
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fedvit.errors import ConfigError
from fedvit.hosts import hide_password


@dataclass(frozen=True)
class Address:
    """The address of a broker, with credentials. `ca_file` replaces the system's certificates.

    `cert_file` and `key_file` are this side's own certificate, for a broker that requires one. `next_cert_file` is its
    successor for the same key: if that file exists, it is tried first.
    """

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    next_cert_file: Path | None = None

    @classmethod
    def parse(cls, text: str, ca_file: Path | None = None) -> "Address":
        """Read HOST, HOST:PORT, mqtt://USER:PASSWORD@HOST:PORT or mqtts://... Raises ConfigError.

        >>> str(Address.parse("pi.local")), str(Address.parse("mqtts://fleet:secret@example.org"))
        ('pi.local:1883', 'example.org:8883')
        """
        try:
            parts = urlsplit(text if "://" in text else f"mqtt://{text}")
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError:  # its text may have a part of a password; also for an empty or overlong label of a name
            raise _unusable(text, "host or port is not valid") from None
        if parts.scheme not in ("mqtt", "mqtts"):
            raise _unusable(text, f"{parts.scheme}:// is not supported, only mqtt:// and mqtts://")
        if not host or re.search(r"\s", host) or port == 0:
            raise _unusable(text, "no host" if not host else "host or port is not valid")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise _unusable(text, "nothing may follow the port")
        if parts.password and not parts.username:
            raise _unusable(text, "a password needs a user name")
        tls = parts.scheme == "mqtts"
        user, password = (unquote(part) if part else None for part in (parts.username, parts.password))
        return cls(host, port or (8883 if tls else 1883), user, password, tls, ca_file)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _unusable(text: str, why: str) -> ConfigError:
    return ConfigError(
        "FV1206",
        f"broker address {hide_password(text)!r} cannot be used: {why}; "
        "expected HOST, HOST:PORT, mqtt://USER:PASSWORD@HOST:PORT or mqtts://..., with %2F for a / in a password",
    )


NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def tls_context(address: Address) -> ssl.SSLContext:
    """The TLS settings of an mqtts:// connection. Raises ConfigError when a file of `address` cannot be read.

    A clock before the start of the authority in `ca_file` is wrong, as on every board without a battery until it has
    reached a time server. The validity times of certificates are not checked then; the chain to the authority and the
    broker's name always are.
    """
    ca_file, cert_file = address.ca_file, address.cert_file
    try:
        context = ssl.create_default_context(cafile=ca_file)
        named = context.get_ca_certs() if ca_file is not None else []
        known = [ssl.cert_time_to_seconds(str(authority["notBefore"])) for authority in named]
    except (OSError, ValueError) as error:  # the latter for a date that is none
        raise ConfigError("FV1207", f"the certificates in {ca_file} cannot be used: {describe_error(error)}") from error
    if time.time() < max(known, default=0.0):
        context.verify_flags |= NO_CHECK_TIME
    if cert_file is not None:
        try:
            context.load_cert_chain(cert_file, address.key_file)
        except OSError as error:
            raise ConfigError(
                "FV1207", f"the certificate {cert_file} or its key cannot be used: {describe_error(error)}"
            ) from error
    return context


def describe_error(error: Exception) -> str:
    """The message of an error of sockets or TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    words = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return words[:1].lower() + words[1:]
