"""Seals, totals of rounds and devices, what was expected of a task once instead of in every round, and indices."""

import json

import sqlalchemy as sa
from alembic import op

from fedvit.blobs import digest_of

revision = "0002"
down_revision = "0001"

SEALED = ("runs", "rounds", "results", "strikes", "quarantines")


def upgrade() -> None:
    for table in SEALED:
        op.add_column(table, sa.Column("seal", sa.String))
    op.add_column("runs", sa.Column("thinned", sa.Integer))
    op.add_column("rounds", sa.Column("totals", sa.JSON))
    op.add_column("rounds", sa.Column("accuracy", sa.JSON))
    op.add_column("tasks", sa.Column("expected", sa.String))
    op.create_table(
        "expectations",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("content", sa.JSON, nullable=False),
    )
    op.create_table(
        "devices",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("device", sa.String, primary_key=True),
        sa.Column("last_asked", sa.Integer, nullable=False),
        sa.Column("times_asked", sa.Integer, nullable=False),
        sa.Column("totals", sa.JSON),
        sa.Column("seal", sa.String),
    )
    _move_expected()
    op.execute("UPDATE results SET used_in = round WHERE used_in IS NULL OR used_in = 0")
    op.execute("UPDATE tasks SET groups = '{}' WHERE outcome IS NOT NULL")
    with op.batch_alter_table("rounds") as rounds:
        rounds.drop_column("expected")
    with op.batch_alter_table("results") as results:
        results.alter_column("used_in", existing_type=sa.Integer, nullable=False)
    op.create_index("results_by_use", "results", ["run", "used_in", "kind", "device"])
    op.create_index("tasks_at_work", "tasks", ["run", "round"], sqlite_where=sa.text("outcome IS NULL"))
    op.create_index("refusals_by_run", "refusals", ["run"])
    op.create_index("strikes_by_device", "strikes", ["run", "device"])
    op.create_index("quarantines_by_device", "quarantines", ["run", "device"])


def _move_expected() -> None:
    """From the rounds, by device, to the tasks; equal ones are kept once."""
    connection = op.get_bind()
    rounds = sa.table("rounds", sa.column("run"), sa.column("round"), sa.column("expected", sa.JSON))
    tasks = sa.table("tasks", *map(sa.column, ("run", "round", "device", "expected")))
    expectations = sa.table("expectations", sa.column("run"), sa.column("id"), sa.column("content", sa.JSON))
    known: set[tuple[str, str]] = set()
    numbers = connection.execute(sa.select(rounds.c.run, rounds.c.round).order_by(rounds.c.run, rounds.c.round)).all()
    for run, number in numbers:
        this = sa.and_(rounds.c.run == run, rounds.c.round == number)
        for device, content in (connection.execute(sa.select(rounds.c.expected).where(this)).scalar() or {}).items():
            name = digest_of(json.dumps(content, sort_keys=True).encode())
            if (run, name) not in known:
                known.add((run, name))
                connection.execute(sa.insert(expectations).values(run=run, id=name, content=content))
            its = sa.and_(tasks.c.run == run, tasks.c.round == number, tasks.c.device == device)
            connection.execute(sa.update(tasks).where(its).values(expected=name))
