"""Addresses and names of machines, as clients and the Host header give them."""

import ipaddress
import re


def is_loopback(address: str) -> bool:
    """Return True for an address or name by which only this machine reaches itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def network_of(host: str | None) -> str:
    """Return a client's address; of IPv6 its network, of which one client has all addresses.

    >>> network_of("192.0.2.7"), network_of("2001:db8::7"), network_of(None)
    ('192.0.2.7', '2001:db8::/64', '')
    """
    try:
        client = ipaddress.ip_address(host or "")
    except ValueError:
        return ""
    client = getattr(client, "ipv4_mapped", None) or client  # a socket of both versions writes ::ffff:192.0.2.7
    return str(client if client.version == 4 else ipaddress.ip_network((client, 64), strict=False))


def hide_password(address: str) -> str:
    """Return an address for a message: without anything that may belong to a password, also where it is not one.

    >>> hide_password("mqtt://fleet:se/cret@example.org"), hide_password("example.org:1883")
    ('mqtt://fleet:***@example.org', 'example.org:1883')
    """
    return re.sub(r":(?!//).*@", ":***@", address)
