"""Endpoints of devices: their certificates, labels and logs."""

from typing import Annotated

import msgspec
from fastapi import Depends
from msgspec import Struct

from coordinator.http_api.answers import read_body
from coordinator.http_api.routes import Routes, Site
from coordinator.http_api.run_routes import Word
from coordinator.operations.devices import check_policy
from coordinator.operations.documents import DeviceLabels, DeviceList, Done, Invitation
from coordinator.record.tables import DeviceLog
from fedvit.wire.enrolment import MAX_POLICY_CHARACTERS

DAY_S = 86_400.0
LONGEST_VALIDITY_S = 30 * DAY_S


class NewLabels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels to set and to remove."""

    set: dict[str, str] = {}
    remove: list[str] = []


class NewInvitation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a token for one device."""

    valid_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_VALIDITY_S)] = 3600.0
    replace: bool = False  # the use of the token revokes the current device of this name
    policy: Annotated[str, msgspec.Meta(max_length=MAX_POLICY_CHARACTERS)] = ""  # policy.toml of the device's owner


routes = Routes()


@routes.add("GET", "/devices", "viewer")
async def list_devices(site: Site, run: Word = "", standings: bool = False) -> DeviceList:
    """List the devices of the deployment; with their standings in a run, by default the newest."""
    return await site.use_devices(lambda devices: devices.list_all(run or None, with_standings=standings or bool(run)))


@routes.add("POST", "/devices/{device}/enroll", "admin")
async def invite_device(
    site: Site, device: str, body: Annotated[NewInvitation, Depends(read_body(NewInvitation))]
) -> Invitation:
    """Make a token with which one device can join, once."""
    if body.policy:
        check_policy(body.policy, "policy")
    return await site.use_devices(
        lambda devices: devices.invite(device, body.valid_s, replaces=body.replace, policy=body.policy)
    )


@routes.add("POST", "/devices/{device}/revoke", "admin")
async def revoke_device(site: Site, device: str) -> Done:
    """Revoke a device: its connection ends, and its certificate becomes invalid."""
    return await site.use_devices(lambda devices: devices.revoke(device))


@routes.add("GET", "/devices/{device}/labels", "viewer")
async def show_labels(site: Site, device: str) -> DeviceLabels:
    """Read the labels of a device that an operator set."""
    return await site.read_run(lambda runs: runs.read_labels(device))


@routes.add("PATCH", "/devices/{device}/labels", "operator")
async def set_labels(
    site: Site, device: str, body: Annotated[NewLabels, Depends(read_body(NewLabels))]
) -> DeviceLabels:
    """Set labels of a device in all runs, and remove others."""
    labels = tuple(f"{name}={value}" for name, value in body.set.items())
    return await site.change(lambda runs: runs.set_labels(device, labels, tuple(body.remove)))


@routes.add("GET", "/devices/{device}/logs", "viewer")
async def list_logs(site: Site, device: str, run: Word = "") -> list[DeviceLog]:
    """List the log lines that a device sent with its failures, the newest last."""
    return await site.read_run(lambda runs: runs.read_logs(device, run or None))
