"""Rotation of a deployment's authority.

While a rotation is under way, broker, coordinator and devices trust the former and the new authority. The broker keeps
its former certificate until the end, so that devices without the new authority still connect. Each step is one
transaction of the registry, and files follow from it (`Deployment.settle`): a process that is killed at any moment
leaves a rotation that the next one completes.
"""

import secrets
from typing import NamedTuple

from coordinator.security.authority import Authority
from coordinator.security.clock import find_doubt, format_date
from coordinator.security.folder import Deployment
from coordinator.security.registry import JoinedDevice, Rows, now
from coordinator.security.rotations import RotationRows
from fedvit.errors import ConfigError
from fedvit.hints import command
from fedvit.quantities import format_count

MOST_NAMED = 20
"""Most devices that a message names."""


class RotationView(NamedTuple):
    """A deployment's authorities, and the devices that have them; revoked devices are left out.

    Authorities are SHA-256 digests of their certificates, hexadecimal. Without a rotation, `former` are devices that
    the last one left behind, and `next` is None.
    """

    authority: str  # which signs now
    next: str | None
    begun_at: float | None
    until: float | None
    updated: list[str]  # that have moved to the next one
    former: list[str]
    awaited: list[str]  # those of `former` that can still connect
    tokens: list[str]  # devices that can still join with a token of the former authority

    def describe(self, deployment: Deployment) -> list[str]:
        """Return lines for the operator."""
        if self.next is None or self.until is None:
            lines = [f"authority {self.authority[:16]}: {format_count(len(self.updated), 'device')}"]
        else:
            total = len(self.updated) + len(self.former)
            lines = [
                f"authority {self.authority[:16]} is being replaced by {self.next[:16]}, at the latest until "
                f"{format_date(self.until)}: {len(self.updated)} of {format_count(total, 'device')} have moved"
            ]
            lines += [f"waiting for {_name(self.awaited)}"] if self.awaited else []
            lines += [f"waiting for the tokens of {_name(self.tokens)}"] if self.tokens else []
        if self.next is None:
            lines += describe_left(deployment, self.former)
        return lines


def read_rotation(deployment: Deployment) -> RotationView:
    with deployment.registry.read() as rows:
        return _view(rows, deployment)


def begin_rotation(deployment: Deployment, within_s: float) -> None:
    """Make a new authority, and trust it beside the present one for at most `within_s` seconds.

    Raises ConfigError if a rotation is under way, or this machine's clock is in doubt.
    """
    deployment.settle()
    with deployment.registry.change() as rows:
        if doubt := find_doubt(deployment, rows.clock_s()):
            raise ConfigError("FV1303", f"the authority cannot be rotated: {doubt}")
        rotations, now_s = RotationRows(rows), now()
        if rotation := rotations.find_open():
            raise ConfigError(
                "FV1321",
                f"a rotation of {deployment.folder} is under way since {format_date(rotation.begun_at)}; it ends by "
                f"itself, or with: {_rotate(deployment, '--finish')}",
            )
        new = Authority.create(f"fedvit {deployment.settings.federation} {secrets.token_hex(4)}", now_s)
        rotations.begin(deployment.authority, new, now_s, now_s + within_s)
        rows.raise_generation()
        rows.add_audit("rotate-authority", new.digest.hex(), f"at the latest until {format_date(now_s + within_s)}")
    deployment.settle()


def finish_rotation(deployment: Deployment) -> list[str]:
    """Trust the new authority only; return the devices that are left behind.

    Raises ConfigError if no rotation is under way, or the clock is in doubt.
    """
    deployment.settle()
    with deployment.registry.change() as rows:
        rotations = RotationRows(rows)
        rotation = rotations.find_open()
        if rotation is None:
            raise ConfigError(
                "FV1322",
                f"no rotation of {deployment.folder} is under way; begin one with: {_rotate(deployment)}",
            )
        if doubt := find_doubt(deployment, rows.clock_s()):
            raise ConfigError("FV1303", f"the rotation cannot be finished: {doubt}")
        view = _view(rows, deployment)
        for device in view.former:
            rotations.note_authority(device, view.authority)
        rotations.end(rotation.number, now())
        rows.tokens.withdraw_all()
        rows.raise_generation()
        rows.add_audit(
            "finish rotation", rotation.authority.digest.hex(), f"left behind: {', '.join(view.former) or 'none'}"
        )
    deployment.settle()
    return view.former


def describe_left(deployment: Deployment, devices: list[str]) -> list[str]:
    """Say what to do with devices that a rotation has left behind."""
    if not devices:
        return []
    enroll = command("coordinator", "enroll", devices[0], "--replace", deployment=deployment.folder)
    return [
        f"{_name(devices)} {'has' if len(devices) == 1 else 'have'} the former authority, and cannot connect: let each "
        f"join again, with a token of: {enroll}"
    ]


def find_trusted(rows: Rows, deployment: Deployment) -> tuple[str, ...]:
    """Return the digests of the authorities that are trusted now, hexadecimal; the first one signs."""
    rotation = RotationRows(rows).find_open()
    return tuple(one.digest.hex() for one in (deployment.authority, *([rotation.authority] if rotation else [])))


def _view(rows: Rows, deployment: Deployment) -> RotationView:
    rotations = RotationRows(rows)
    rotation, current = rotations.find_open(), deployment.authority.digest.hex()
    wanted = rotation.authority.digest.hex() if rotation else current
    known = rotations.read_authorities()
    devices = [device for device in rows.read_devices() if device.revoked_at is None]
    former = [device for device in devices if known.get(device.name, current) != wanted]
    names = [device.name for device in former]

    def can_move(device: JoinedDevice) -> bool:
        return device.expires_at > now() and known.get(device.name, current) == current

    return RotationView(
        current,
        wanted if rotation else None,
        rotation.begun_at if rotation else None,
        rotation.until if rotation else None,
        [device.name for device in devices if device.name not in names],
        names,
        [device.name for device in former if rotation and can_move(device)],
        [token.device for token in rows.tokens.read_open(now()) if rotation],
    )


def _name(devices: list[str]) -> str:
    return ", ".join(devices[:MOST_NAMED]) + (", ..." if len(devices) > MOST_NAMED else "")


def _rotate(deployment: Deployment, *flags: str) -> str:
    return command("coordinator", "rotate-authority", *flags, deployment=deployment.folder)
