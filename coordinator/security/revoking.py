"""Revokes a device, and waits until its connection has ended."""

import time

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
    with deployment.change() as rows:
        known = rows.find_device(name)
        if known is None and not rows.tokens.read_open(time.time(), name):
            devices = [device.name for device in rows.read_devices()]
            known_names = ", ".join(devices[:MOST_NAMED]) + (", ..." if len(devices) > MOST_NAMED else "")
            raise ConfigError(
                "FV1316", f"no device is called {name!r} in {deployment.folder}; there are: {known_names or 'none'}"
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
                f"{name} is revoked, but the coordinator of the deployment does not apply it: restart the broker",
            )
        time.sleep(TICK_S)
    done = [f"{name} is revoked"]
    if not is_served(deployment):
        done.append("no coordinator serves this deployment now; an external mosquitto must be restarted")
    return done
