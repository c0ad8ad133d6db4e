"""Tasks count their attempts; a refusal says whether anything came that could be refused."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("attempt", sa.Integer, nullable=False, server_default="1"))
    op.add_column("refusals", sa.Column("lost", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute("UPDATE refusals SET lost = 1 WHERE reason LIKE 'no result: %'")
