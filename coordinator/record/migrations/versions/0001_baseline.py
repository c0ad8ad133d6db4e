"""The tables of the first release."""

from alembic import op

from coordinator.record.tables import TABLES

revision = "0001"
down_revision = None


def upgrade() -> None:
    TABLES.create_all(op.get_bind())
