"""Output of the commands that change one run."""

import click
import msgspec

from coordinator.operations.documents import ChangedRun


def print_change(changed: ChangedRun, field: str, *, as_json: bool) -> None:
    """Print what happens to a run; as JSON its name and one field of the document."""
    if as_json:
        click.echo(msgspec.json.encode({"run": changed.run, field: getattr(changed, field)}).decode())
    else:
        click.echo(f"run {changed.run}: {changed.done}")
