"""The audit, and a run's priority and time in the queue."""

import sqlalchemy
from alembic import op

from coordinator.record.tables import AUDIT, RUNS

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    connection = op.get_bind()
    known = {column["name"] for column in sqlalchemy.inspect(connection).get_columns(RUNS.name)}
    for column in (RUNS.c.priority, RUNS.c.starts_at):
        if column.name not in known:  # the first migration makes the tables as they are now
            op.add_column(RUNS.name, sqlalchemy.Column(column.name, column.type, nullable=True))
    AUDIT.create(connection, checkfirst=True)
