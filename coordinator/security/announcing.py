"""Announces a coordinator in the local network by mDNS, while it may adopt devices."""

import contextlib
import secrets
from collections.abc import Callable, Iterator

import psutil

from fedvit.errors import ConfigError
from fedvit.wire.adoption import SERVICE

EVERYWHERE = ("", "0.0.0.0")


@contextlib.contextmanager
def announce_listener(name: str, host: str, port: int, report: Callable[[str], None]) -> Iterator[bool]:
    """Announce a listener within the block; False without the package zeroconf or a network, as `report` then says."""
    try:
        from zeroconf import InterfaceChoice, ServiceInfo, Zeroconf
    except ModuleNotFoundError as error:
        report(f"not announced in the network: {error.name} is missing, pip install 'fedvit[discovery]'")
        yield False
        return
    unique = f"{name} #{secrets.token_hex(2)}"  # two of the same name would be one
    zeroconf = None
    try:
        addresses = list_addresses() if host in EVERYWHERE else [host]
        info = ServiceInfo(SERVICE, f"{unique}.{SERVICE}", port=port, parsed_addresses=addresses)
        zeroconf = Zeroconf(interfaces=InterfaceChoice.All if host in EVERYWHERE else [host])
        zeroconf.register_service(info)
    except Exception as error:  # noqa: BLE001 - zeroconf's exceptions share no base of their own
        report(f"not announced in the network: {error or type(error).__name__}")
        if zeroconf:
            zeroconf.close()
        yield False
        return
    try:
        yield True
    finally:
        zeroconf.close()


def list_addresses() -> list[str]:
    """List this machine's IPv4 addresses in networks. Raises ConfigError without one."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith("127.")
    ]
    if not found:
        raise ConfigError("FV1342", "this machine has no network: connect it, or name --listen HOST:PORT")
    return found
