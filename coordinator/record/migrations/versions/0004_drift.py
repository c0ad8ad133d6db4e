"""Drift of the pictures that a device's model answers."""

import sqlalchemy
from alembic import op

from coordinator.record.tables import DEVICE_MODELS

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    known = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns(DEVICE_MODELS.name)}
    column = DEVICE_MODELS.c.drifted_since
    if column.name not in known:  # the first migration makes the tables as they are now
        op.add_column(DEVICE_MODELS.name, sqlalchemy.Column(column.name, column.type, nullable=True))
