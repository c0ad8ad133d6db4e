"""The tables of the first release."""

from alembic import op

from coordinator.record.tables import TABLES, TASKS, TASKS_AT_WORK

revision = "0001"
down_revision = None


def upgrade() -> None:
    for dialect in ("sqlite", "postgresql"):
        TASKS_AT_WORK.dialect_options[dialect]["where"] = TASKS.c.outcome.is_(None)
    TABLES.create_all(op.get_bind())
