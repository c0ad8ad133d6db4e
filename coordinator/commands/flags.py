"""Flags that several commands share."""

import json
from pathlib import Path
from typing import Any

import click

from fedvit.errors import ConfigError

DEPLOYMENT = Path("deployment")
"""Default folder of a deployment."""

runs_flag = click.option(
    "--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs."
)
"""The folder of runs, for every command that reads or makes some."""
record_flag = click.option(
    "--record",
    "url",
    metavar="URL",
    envvar="FEDVIT_RECORD",
    default=None,
    help="PostgreSQL database for the record of these runs: postgresql://USER:PASSWORD@HOST:PORT/DATABASE; or set "
    "FEDVIT_RECORD. Needed once: its address is kept in the folder. By default SQLite in the folder.",
)
deployment_flag = click.option(
    "--deployment",
    "folder",
    type=click.Path(path_type=Path),
    default=DEPLOYMENT,
    envvar="FEDVIT_DEPLOYMENT",
    help="Folder that `coordinator init` made; or set FEDVIT_DEPLOYMENT.",
)


def key_value(pair: str) -> tuple[str, Any]:
    """The two halves of KEY=VALUE. Raises ConfigError for another format."""
    key, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError("FV1003", f"option {pair!r} must be written KEY=VALUE")
    return key, literal(value)


def literal(text: str) -> Any:
    """Return a number or true/false if the text is one, otherwise the text. "nan" and "inf" are numbers."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return _number(text)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
