"""`edge-client ledger`: what has left this device."""

import time
from datetime import datetime
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.ledger import Ledger, LedgerLine
from edge_client.storage.state import state_folder
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes, parse_seconds
from fedvit.terminal import escape_line


def _since(_: click.Context, __: click.Parameter, text: str | None) -> float:
    """Seconds since 1970 of a date, or of a time before now. Raises ConfigError."""
    if text is None:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return time.time() - parse_seconds(text)
    except ConfigError:
        raise ConfigError(
            "FV1005", f"--since {text!r} cannot be read: expected a time, as 24h or 7d, or a date, as 2026-11-26"
        ) from None


@click.command(
    "ledger",
    cls=Command,
    params=program_options("data", "state"),
    examples=["edge-client ledger --data ~/images --since 24h", "edge-client ledger --state STATE --json"],
)
@click.option("--since", "since_s", callback=_since, metavar="TIME", help="Newer lines only: 24h, 7d, or 2026-11-26.")
@json_flag
@click.pass_context
def command(context: click.Context, /, *, since_s: float, as_json: bool, **own: Any) -> None:
    """List what has left this device, and the tasks that it refused.

    Reads a file that the device writes before it sends anything; needs no network.
    """

    settings = read_settings(context, own)
    read = Ledger(state_folder(settings.data, settings.state)).read(since_s)
    if as_json:
        print_json(list(read))
        return
    for line in read:
        click.echo(describe_line(line))


def describe_line(line: LedgerLine) -> str:
    """One line as text, without control characters of names that came over the network."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time_s))
    where = f"{line.run} {line.round}" if line.run else "-"
    details = [line.form, line.reason or line.what]
    if line.left_out is not None:
        details.insert(0, f"{line.left_out:.0%} of the patches left out")
    size = format_bytes(line.bytes) if line.bytes else "-"
    described = ", ".join(filter(None, details))
    return escape_line(f"{at}  {line.kind:<17}  {size:>8}  {where:<20}  {described}")
