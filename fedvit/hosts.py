"""Addresses and names of machines, as clients and the Host header give them."""

import ipaddress


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
