"""Times in which the device of a task was offline."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for name in ("left_at", "returned_at"):
        op.add_column("tasks", sa.Column(name, sa.String))
