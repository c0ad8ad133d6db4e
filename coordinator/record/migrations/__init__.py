"""Migrations of the database by Alembic: one file in `versions` for each change."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection


def alembic_config(connection: Connection) -> Config:
    """Alembic's settings for one database."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def migrate(connection: Connection) -> None:
    """Migrate the tables, within the caller's transaction. A database without a version is one of 0.1.0."""
    config = alembic_config(connection)
    if not connection.dialect.has_table(connection, "alembic_version"):
        command.stamp(config, "0001")
    command.upgrade(config, "head")
