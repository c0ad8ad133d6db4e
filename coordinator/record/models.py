"""Models of a record, their states on devices, and promotions."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import func, select, update

from coordinator.record.database import Database
from coordinator.record.rows import insert, replace, without_zero_bytes
from coordinator.record.tables import (
    DEVICE_MODELS,
    MODELS,
    PROMOTIONS,
    DeviceModelRecord,
    ModelRecord,
    ModelStage,
    Promotion,
    now,
)
from fedvit.errors import ConfigError


class RecordedModels:
    """Models of all runs. They stay when their runs are removed, since devices use them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str) -> ModelRecord:
        """Return a model. Raises ConfigError if there is none of this name."""
        found = self._database.read(ModelRecord, MODELS, select(MODELS).where(MODELS.c.name == name))
        if not found:
            raise ConfigError("FV1651", f"there is no model {name!r} in {self._database.folder}")
        return found[0]

    def has(self, name: str) -> bool:
        """Return whether there is a model of this name."""
        return self._database.fetch_value(select(MODELS.c.name).where(MODELS.c.name == name)) is not None

    def read_all(self, stage: ModelStage | None = None) -> list[ModelRecord]:
        """Return the models, or those of one stage, the newest first."""
        query = select(MODELS).order_by(MODELS.c.created_at.desc(), MODELS.c.name)
        return self._database.read(
            ModelRecord, MODELS, query if stage is None else query.where(MODELS.c.stage == stage)
        )

    def count_stages(self) -> dict[str, int]:
        """Count the models by stage."""
        counted = self._database.fetch(select(MODELS.c.stage, func.count()).group_by(MODELS.c.stage))
        return {str(stage): int(count) for stage, count in counted}

    def count_drifted(self) -> int:
        """Count the devices whose pictures have drifted from those of the model that they use."""
        in_use = DEVICE_MODELS.c.wanted.in_(("canary", "champion"))
        devices = func.count(DEVICE_MODELS.c.device.distinct())
        query = select(devices).where(DEVICE_MODELS.c.drifted_since.is_not(None), in_use)
        return int(self._database.fetch_value(query) or 0)

    def add(self, model: ModelRecord, devices: Iterable[DeviceModelRecord]) -> None:
        """Store a model that devices have compared."""
        with self._database.transaction() as connection:
            replace(connection, MODELS, [msgspec.to_builtins(model)])
        self.write_devices(devices)

    def change(self, name: str, **values: Any) -> None:
        """Change columns of a model, and the time of its change."""
        with self._database.transaction() as connection:
            changed = without_zero_bytes(values) | {"changed_at": now()}
            connection.execute(update(MODELS).where(MODELS.c.name == name).values(**changed))

    def read_devices(
        self, model: str | None = None, device: str | None = None, *, devices: Sequence[str] | None = None
    ) -> list[DeviceModelRecord]:
        """Return the models on devices: of one model, of one device, of some devices, or all."""
        query = select(DEVICE_MODELS).order_by(DEVICE_MODELS.c.model, DEVICE_MODELS.c.device)
        if model is not None:
            query = query.where(DEVICE_MODELS.c.model == model)
        if device is not None:
            query = query.where(DEVICE_MODELS.c.device == device)
        if devices is not None:
            query = query.where(DEVICE_MODELS.c.device.in_(devices))
        return self._database.read(DeviceModelRecord, DEVICE_MODELS, query)

    def write_devices(self, rows: Iterable[DeviceModelRecord]) -> None:
        """Store the states of models on devices."""
        if values := [msgspec.to_builtins(row) for row in rows]:
            with self._database.transaction() as connection:
                replace(connection, DEVICE_MODELS, values)

    def add_promotion(self, promotion: Promotion) -> None:
        """Store an act; it makes services look at all wanted states again."""
        with self._database.transaction() as connection:
            insert(connection, PROMOTIONS, [promotion])

    def read_promotions(self, models: Sequence[str] | None = None) -> list[Promotion]:
        """Return the acts on some models, or all, in order."""
        query = select(PROMOTIONS).order_by(PROMOTIONS.c.id)
        return self._database.read(
            Promotion, PROMOTIONS, query if models is None else query.where(PROMOTIONS.c.model.in_(models))
        )

    def find_newest_act(self) -> int:
        """Return the number of the newest act; 0: there is none."""
        return int(self._database.fetch_value(select(func.max(PROMOTIONS.c.id))) or 0)
