"""Log lines of devices that failed, and the version of each device."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("devices", sa.Column("software", sa.String))
    op.create_table(
        "logs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("lines", sa.String, nullable=False),
    )
    op.create_index("logs_by_device", "logs", ["device", "run"])
