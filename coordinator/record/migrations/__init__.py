"""Migrations of the database by Alembic: one file in `versions` for each change."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's settings for one database."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def migrate(connection: Connection) -> None:
    """Create the tables, or bring them up to date, within the caller's transaction."""
    command.upgrade(alembic_config(connection), "head")
