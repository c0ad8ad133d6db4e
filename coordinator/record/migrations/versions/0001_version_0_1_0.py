"""The tables as version 0.1.0 made them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("created_at", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("classes", sa.JSON),
        sa.Column("program", sa.String),
        sa.Column("protocol", sa.String),
        sa.Column("reason", sa.String),
        sa.Column("corrections", sa.JSON),
    )
    op.create_table(
        "rounds",
        sa.Column("run", sa.String, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
        sa.Column("cohort", sa.JSON, nullable=False),
        sa.Column("opened_at", sa.String, nullable=False),
        sa.Column("closed_at", sa.String),
        sa.Column("evaluated", sa.Boolean, nullable=False),
        sa.Column("state", sa.JSON),
        sa.Column("figures", sa.JSON),
        sa.Column("expected", sa.JSON),
        sa.Column("needed", sa.Integer),
    )
    op.create_table(
        "results",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
        sa.Column("device", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("use", sa.JSON, nullable=False),
        sa.Column("upload", sa.String),
        sa.Column("received_at", sa.String, nullable=False),
        sa.Column("used_in", sa.Integer),
    )
    op.create_table(
        "tasks",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("round", sa.Integer, primary_key=True),
        sa.Column("device", sa.String, primary_key=True),
        sa.Column("program", sa.String, nullable=False),
        sa.Column("groups", sa.JSON, nullable=False),
        sa.Column("asked_at", sa.String, nullable=False),
        sa.Column("outcome", sa.String),
    )
    op.create_table(
        "refusals",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("round", sa.Integer),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("broke", sa.String),
    )
    op.create_table(
        "strikes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("spent", sa.Boolean, nullable=False),
    )
    op.create_table(
        "quarantines",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("until_round", sa.Integer),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("released_at", sa.String),
    )
