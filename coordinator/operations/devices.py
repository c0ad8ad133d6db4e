"""The devices of a deployment, as operators look at them and change them."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from coordinator.operations.documents import DeviceList, Done, Invitation, OpenInvitation
from coordinator.record.opening import open_existing_record
from coordinator.record.record import Record
from coordinator.run_view import read_standings
from coordinator.security.clock import find_doubt, format_iso
from coordinator.security.folder import Deployment, make_tokens
from coordinator.security.registry import JoinedDevice
from coordinator.security.revoking import revoke_devices
from coordinator.security.rotating import find_trusted
from coordinator.security.rotations import RotationRows
from fedvit.errors import ConfigError
from fedvit.policy import find_narrowness, make_policy, parse_policy
from fedvit.wire.enrolment import MAX_POLICY_CHARACTERS


class LocalDevices:
    """Operations on a deployment, and on the runs of a folder. They raise ConfigError."""

    def __init__(self, deployment: Deployment, runs: Path | None = None) -> None:
        self._deployment, self._runs = deployment, runs

    def list_all(self, run: str | None = None, *, with_standings: bool = False) -> DeviceList:
        """List the devices; `with_standings` in a run, by default the newest."""
        deployment = self._deployment
        with deployment.registry.read() as rows:
            doubt = find_doubt(deployment, rows.clock_s())
            begin_s, known = deployment.authority.begin_s, RotationRows(rows).read_authorities()
            trusted = find_trusted(rows, deployment)
            listed = [
                _describe(device, begin_s, doubt, known.get(device.name, trusted[0]), trusted)
                for device in rows.read_devices()
            ]
            waiting = rows.tokens.read_open(time.time())
        if with_standings and self._runs is not None:
            with open_existing_record(self._runs) as store:
                run = _add_standings(listed, store, self._runs, run)
        return DeviceList(
            devices=listed,
            waiting=[
                OpenInvitation(device=token.device, expires=format_iso(token.expires_at) or "") for token in waiting
            ],
            doubt=doubt,
            run=run,
        )

    def invite(self, device: str, valid_s: float, *, replaces: bool = False, policy: str = "") -> Invitation:
        """Make a token with which one device can join, once."""
        return self.invite_all([device], valid_s, replaces=replaces, policy=policy)[0]

    def invite_all(
        self, devices: Sequence[str], valid_s: float, *, replaces: bool = False, policy: str = ""
    ) -> list[Invitation]:
        """Make a token for each of these devices, or none."""
        expires = format_iso(time.time() + valid_s) or ""
        tokens = make_tokens(self._deployment, devices, valid_s, replaces=replaces, policy=policy)
        return [
            Invitation(device=token.device, token=token.text(), publisher=token.publisher, expires=expires)
            for token in tokens
        ]

    def revoke(self, device: str) -> Done:
        """Revoke a device, and wait until its connection has ended."""
        return self.revoke_all([device])

    def revoke_all(self, devices: list[str]) -> Done:
        """Revoke devices, or none; the answer has a line for each, and then what the operator still has to do."""
        notes = revoke_devices(self._deployment, devices)
        return Done(lines=[*(f"{device} is revoked" for device in devices), *notes])


def check_policy(text: str, where: str) -> str | None:
    """Return a warning about a policy that a token is to bring; None if there is none.

    Raises ConfigError if no device could use it, or it is too long for a token.
    """
    policy = make_policy(parse_policy(text, where), where)
    if len(text) > MAX_POLICY_CHARACTERS:
        raise ConfigError(
            "FV1431", f"{where} has {len(text)} characters, a token can bring a policy of {MAX_POLICY_CHARACTERS}"
        )
    return find_narrowness(policy)


def _add_standings(listed: list[dict[str, Any]], store: Record, runs: Path, run: str | None) -> str:
    """Add strikes and quarantine in a run, by default the newest; return its name. Raises ConfigError if none."""
    run = run or next((record.id for record in store.runs.read_all()), None)
    if run is None:
        raise ConfigError("FV1318", f"there is no run in {runs}")
    known = {standing.device: standing for standing in read_standings(store, run)}
    records = {record.device: record for record in store.devices.read_all(run)}
    for entry in listed:
        standing, record = known.get(entry["device"]), records.get(entry["device"])
        entry |= {
            "run": run,
            "software": record.software if record else None,
            "denies": list(record.denies) if record else [],
            "battery_percent": record.totals.battery_percent if record else None,
            "charging": record.totals.charging if record else None,
            "strikes": standing.strikes if standing else 0,
            "quarantine": standing.quarantine if standing else None,
            "until_round": standing.until_round if standing else None,
        }
    return run


def _describe(
    device: JoinedDevice, begin_s: float, doubt: str | None, authority: str, trusted: Collection[str]
) -> dict[str, Any]:
    """Describe a device; `begin_s` is where all certificates begin, `doubt` the doubt of the clock.

    `authority` is that of the device, `trusted` are those that are trusted now.
    """
    now_s = time.time()
    state = "expired" if device.expires_at < now_s else "not yet valid" if now_s < begin_s else "valid"
    if authority not in trusted:
        state = "former authority"
    return {
        "device": device.name,
        "state": state if device.revoked_at is None else "revoked",
        "clock_in_doubt": doubt,
        "joined": format_iso(device.joined_at),
        "last_seen": format_iso(device.last_seen),
        "expires": format_iso(device.expires_at),
        "revoked": format_iso(device.revoked_at),
        "misuses": device.misuses,
        "authority": authority,
    }
