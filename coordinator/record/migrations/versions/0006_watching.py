"""Times of tasks, answers by class, paused runs, and labels that the coordinator's operator sets."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for name in ("fetching_at", "working_at", "arrived_at", "ended_at"):
        op.add_column("tasks", sa.Column(name, sa.String))
    op.add_column("results", sa.Column("by_class", sa.JSON().with_variant(sa.Text, "postgresql")))
    op.add_column("runs", sa.Column("paused_at", sa.String))
    op.create_table(
        "labels",
        sa.Column("device", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
    )
