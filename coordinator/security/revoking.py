"""Revokes devices, and waits until their connections have ended."""

import time
from collections.abc import Sequence

from coordinator.security.folder import Deployment
from coordinator.security.service import is_served, read_applied_generation
from fedvit.errors import ConfigError, LinkDown

TICK_S = 0.1
APPLY_S = 10.0
MOST_NAMED = 20
"""Most devices that an error message lists."""


def revoke_device(deployment: Deployment, name: str) -> list[str]:
    """Revoke a device and its unused tokens; returns what happened, and what the operator still has to do.

    Raises ConfigError if there is no such device, LinkDown if the deployment's coordinator does not apply it.
    """
    return [f"{name} is revoked", *revoke_devices(deployment, [name])]


def revoke_devices(deployment: Deployment, names: Sequence[str]) -> list[str]:
    """Revoke all of these devices and their unused tokens, or none; returns what the operator still has to do.

    Raises ConfigError if one of them is unknown, LinkDown if the deployment's coordinator does not apply it.
    """
    with deployment.change() as rows:
        for name in names:
            known = rows.find_device(name)
            if known is None and not rows.tokens.read_open(time.time(), name):
                devices = [device.name for device in rows.read_devices()]
                known_names = ", ".join(devices[:MOST_NAMED]) + (", ..." if len(devices) > MOST_NAMED else "")
                raise ConfigError(
                    "FV1316",
                    f"no device is called {name!r} in {deployment.folder}; there are: {known_names or 'none'}",
                )
            rows.tokens.withdraw(name)
            if known is not None:
                rows.revocations.revoke(name, time.time())
            rows.add_audit("revoke", name)
        generation = rows.generation()
    until = time.monotonic() + APPLY_S
    while is_served(deployment) and read_applied_generation(deployment) < generation:
        if time.monotonic() > until:
            raise LinkDown(
                "FV1317",
                f"{', '.join(names)} is revoked, but the coordinator of the deployment does not apply it: restart the "
                "broker",
            )
        time.sleep(TICK_S)
    if is_served(deployment):
        return []
    return ["no coordinator serves this deployment now; an external mosquitto must be restarted"]
