"""The rows of a registry about rotations of the authority: the next authority, and which authority each device has.

The new authority is kept here, with its key, and files of the deployment follow from it: so a copy of the registry and
of the files that was made in the middle of a rotation can be completed. The tables are made by the first rotation.
"""

import base64

import msgspec
from msgspec import Struct
from sqlalchemy import Column, Float, Integer, MetaData, String, Table, inspect, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection

from coordinator.security.authority import Authority
from coordinator.security.registry import Rows

_TABLES = MetaData()

_ROTATIONS = Table(
    "rotations",
    _TABLES,
    Column("number", Integer, primary_key=True),
    Column("begun_at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("certificate", String, nullable=False),
    Column("key", String, nullable=False),
    Column("endorsement", String, nullable=False),
    Column("ended_at", Float),
)

_DEVICE_AUTHORITIES = Table(
    "device_authorities",
    _TABLES,
    Column("device", String, primary_key=True),
    Column("authority", String, nullable=False),
)


class Rotation(Struct, frozen=True):
    """A change of the authority; times are seconds since 1970 by this machine's clock."""

    number: int
    begun_at: float
    until: float  # the latest end
    certificate: str  # of the new authority, PEM, and its key
    key: str
    endorsement: str  # DER in base64: the former authority signs the new one's key
    ended_at: float | None = None  # only the new authority is trusted from then on

    @property
    def authority(self) -> Authority:
        return Authority.load(self.certificate.encode(), self.key.encode())

    @property
    def is_open(self) -> bool:
        """True while the rotation is under way."""
        return self.ended_at is None

    @property
    def endorsement_der(self) -> bytes:
        return base64.b64decode(self.endorsement)


class RotationRows:
    """The rotations of a registry, within one transaction."""

    def __init__(self, rows: Rows) -> None:
        self._connection: Connection = rows.connection

    def find_newest(self) -> Rotation | None:
        if not inspect(self._connection).has_table(_ROTATIONS.name):
            return None
        row = self._connection.execute(select(_ROTATIONS).order_by(_ROTATIONS.c.number.desc()).limit(1)).mappings()
        return next((Rotation(**entry) for entry in row), None)

    def find_open(self) -> Rotation | None:
        """Return the rotation that is under way."""
        newest = self.find_newest()
        return newest if newest and newest.is_open else None

    def begin(self, former: Authority, new: Authority, now_s: float, until: float) -> None:
        _TABLES.create_all(self._connection)
        newest = self.find_newest()
        begun = Rotation(
            newest.number + 1 if newest else 1,
            now_s,
            until,
            new.pem.decode(),
            new.key_pem.decode(),
            base64.b64encode(former.endorse(new)).decode(),
        )
        self._connection.execute(insert(_ROTATIONS).values(**msgspec.structs.asdict(begun)))

    def end(self, number: int, now_s: float) -> None:
        """End a rotation; the keys of authorities before it are forgotten."""
        self._connection.execute(update(_ROTATIONS).where(_ROTATIONS.c.number == number).values(ended_at=now_s))
        self._connection.execute(_ROTATIONS.delete().where(_ROTATIONS.c.number < number))

    def read_authorities(self) -> dict[str, str]:
        """Return the digests of the authorities of devices (hexadecimal), by device.

        A device that is not listed has the authority that is in use, or during a rotation the former one.
        """
        if not inspect(self._connection).has_table(_DEVICE_AUTHORITIES.name):
            return {}
        return {row.device: row.authority for row in self._connection.execute(select(_DEVICE_AUTHORITIES))}

    def find_authority(self, device: str) -> str | None:
        if not inspect(self._connection).has_table(_DEVICE_AUTHORITIES.name):
            return None
        query = select(_DEVICE_AUTHORITIES.c.authority).where(_DEVICE_AUTHORITIES.c.device == device)
        return self._connection.execute(query).scalar_one_or_none()

    def note_authority(self, device: str, authority: str) -> None:
        added = insert(_DEVICE_AUTHORITIES).values(device=device, authority=authority)
        self._connection.execute(added.on_conflict_do_update(index_elements=["device"], set_={"authority": authority}))

    def forget_device(self, device: str) -> None:
        """Forget the authority of a device that has joined anew."""
        if inspect(self._connection).has_table(_DEVICE_AUTHORITIES.name):
            where = _DEVICE_AUTHORITIES.c.device == device
            self._connection.execute(_DEVICE_AUTHORITIES.delete().where(where))
