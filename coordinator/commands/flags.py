"""What several commands share in reading their flags."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvit.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.record.store import Store


DEPLOYMENT = Path("deployment")
"""Where `coordinator init` makes a deployment, and other commands look for it, unless another folder is given."""

runs_flag = click.option(
    "--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs."
)
"""Where runs lie, in every command that reads or makes some."""
deployment_flag = click.option(
    "--deployment",
    "folder",
    type=click.Path(path_type=Path),
    default=DEPLOYMENT,
    envvar="FEDVIT_DEPLOYMENT",
    help="Folder that `coordinator init` made; or set FEDVIT_DEPLOYMENT.",
)


def key_value(pair: str) -> tuple[str, Any]:
    """The two halves of KEY=VALUE. Raises ConfigError when it is not written so."""
    key, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"option {pair!r} must be written KEY=VALUE")
    return key, literal(value)


def literal(text: str) -> Any:
    """A number or true/false where the text is one, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def existing_store(folder: Path, *, writes: bool = False) -> "Store":
    """The record of all runs in a folder; what is asked of it is checked, the rest is not read.

    To read it needs no permission to write. Raises ConfigError where there is none.
    """
    from coordinator.record.store import Store  # SQLAlchemy: half a second that flags which are wrong need not wait

    if not (folder / "fedvit.db").is_file():
        raise ConfigError(f"no runs in {folder.resolve()}: there is no fedvit.db; use --runs for another folder")
    return Store.in_folder(folder, check=False) if writes or os.access(folder, os.W_OK) else Store.copy_of(folder)
