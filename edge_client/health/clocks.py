"""Finds out which clock is wrong: this device's, or the server's, by which the broker checks certificates."""

import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from edge_client.health.doctor_context import DAY_S, DoctorContext
from fedvit.transport.address import Address, tls_context

ALERT_S = 5.0
EXPIRED = "CERTIFICATE_EXPIRED"
INVALID = "BAD_CERTIFICATE"
"""TLS alerts with which a broker refuses a certificate, as OpenSSL names them; "bad" includes "not valid yet"."""
SET_CLOCK = "sudo timedatectl set-ntp true"
_SYNCHRONISED = "run/systemd/timesync/synchronized"


def read_alert(address: Address) -> str:
    """The TLS alert with which the broker refuses this device's certificate; empty if there is none."""
    try:
        with (
            socket.create_connection((address.host, address.port), ALERT_S) as plain,
            tls_context(address).wrap_socket(plain, server_hostname=address.host) as secured,
        ):
            secured.recv(1)  # TLS 1.3: the client's handshake ends before the server has looked at the certificate
    except ssl.SSLError as error:
        return error.reason or ""
    except OSError:
        pass
    return ""


def explain_refusal(context: DoctorContext) -> tuple[str, str] | None:
    """Explain why the broker refuses this device's certificate, with a hint; None if its dates are not the reason."""
    identity = context.identity
    if identity is None:
        return None
    try:
        certificate, authority = (
            x509.load_pem_x509_certificate(file.read_bytes()) for file in (identity.certificate, identity.authority)
        )
    except (OSError, ValueError):
        return None  # reported by check_identity
    begin_s, end_s = authority.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    alert = read_alert(replace(context.address, cert_file=identity.certificate))
    if alert.endswith(EXPIRED) and context.now_s < end_s:
        what = (
            f"the server finds the certificate expired: its clock is past {_date(end_s)}, this device's clock says "
            f"{_date(context.now_s)}"
        )
        return what, hint_of_wrong_clock(context, begin_s)
    if alert.endswith(INVALID) and certificate.not_valid_before_utc <= authority.not_valid_before_utc:
        what = (
            "the server finds the certificate invalid, most likely not valid yet: then its clock is before "
            f"{_date(begin_s)}, when the deployment began"
        )
        return what, f"set the clock of the server: {SET_CLOCK} there"
    return None


def compare_clocks(context: DoctorContext, server_s: float) -> tuple[str, str] | None:
    """Compare the clocks of device and server; returns the difference and a hint if it exceeds a day."""
    difference_s = context.now_s - server_s
    if abs(difference_s) <= DAY_S:
        return None
    side = "ahead of" if difference_s > 0 else "behind"
    what = (
        f"this device's clock says {_date(context.now_s)}, {abs(difference_s) / DAY_S:.0f} days {side} the server's, "
        f"which says {_date(server_s)}"
    )
    return what, hint_of_wrong_clock(context, context.software_s)


def hint_of_wrong_clock(context: DoctorContext, earliest_s: float) -> str:
    """Name the clock to set. A date before `earliest_s`, or before the installation of this software, is wrong."""
    if context.now_s < max(earliest_s, context.software_s - DAY_S):
        return f"this device's clock is wrong: {SET_CLOCK}"
    if (Path(context.root) / _SYNCHRONISED).exists():
        return f"this device's clock is synchronised with a time server, so set the server's: {SET_CLOCK} there"
    return f"compare both dates with today's, and set the clock that is wrong: {SET_CLOCK}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
