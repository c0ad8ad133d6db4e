"""Finds coordinators in the local network that may adopt devices, by mDNS."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedvit.errors import ConfigError, LinkDown
from fedvit.wire.adoption import SERVICE

if TYPE_CHECKING:
    from zeroconf import Zeroconf

SEARCH_S = 3.0
"""Time in which coordinators answer."""
LONGEST_SEARCH_S = 20.0
"""The same, while none has answered: mDNS repeats its questions, and a busy machine is slow."""
LOOK_EVERY_S = 0.2
ANSWER_MS = 2000


class Coordinator(NamedTuple):
    """A coordinator that announces itself; anybody in the network can claim to be one, which the code shows."""

    name: str
    host: str
    port: int


def find_coordinators(
    interfaces: Sequence[str] | None = None, longest_s: float = LONGEST_SEARCH_S
) -> list[Coordinator]:
    """Return the coordinators that answer, by name; wait up to `longest_s` seconds for the first one.

    `interfaces` are addresses of this device, None: all.

    Raises ConfigError without the package zeroconf, LinkDown without a network.
    """
    try:
        from zeroconf import InterfaceChoice, ServiceBrowser, Zeroconf
    except ModuleNotFoundError as error:
        raise ConfigError(
            "FV1342",
            f"to look for coordinators needs the package {error.name}: pip install 'fedvit[discovery]', or name one: "
            "`edge-client join --from HOST`",
        ) from None
    names: set[str] = set()
    try:
        zeroconf = Zeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except OSError as error:
        raise LinkDown("FV1342", f"this device has no network: {error.strerror}; connect it and try again") from error
    try:
        handler = lambda name, **_: names.add(name)  # noqa: E731
        browser = ServiceBrowser(zeroconf, SERVICE, handlers=[handler])
        until = time.monotonic() + longest_s
        time.sleep(SEARCH_S)
        while not (found := _resolve(zeroconf, sorted(names))) and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        browser.cancel()
        return found
    finally:
        zeroconf.close()


def _resolve(zeroconf: "Zeroconf", names: Sequence[str]) -> list[Coordinator]:
    found = []
    for name in names:
        info = zeroconf.get_service_info(SERVICE, name, ANSWER_MS)
        if info and info.port and (addresses := info.parsed_addresses()):
            found.append(Coordinator(name.removesuffix(f".{SERVICE}"), addresses[0], info.port))
    return found
