"""The broker of a run; when a run was submitted to a service, and when its end was asked for."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("runs", sa.Column("broker", sa.JSON))
    op.add_column("runs", sa.Column("submitted_at", sa.String))
    op.add_column("runs", sa.Column("cancelled_at", sa.String))
