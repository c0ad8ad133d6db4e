"""`edge-client status`: what this device is doing and did."""

from typing import Any

import click
import msgspec

from edge_client.commands.options import program_options, read_settings
from edge_client.health.status import lines, read_status
from edge_client.storage.ledger import Ledger, describe_sent, midnight_s, sum_lines
from edge_client.storage.pause import OwnerPause
from edge_client.storage.serving import describe_serving, read_serving
from edge_client.storage.state import in_use, state_folder, status_file
from fedvit.command_line import Command, json_flag, print_json
from fedvit.policy import find_narrowness


@click.command(
    "status",
    cls=Command,
    params=program_options("data", "state"),
    examples=["edge-client status --data ~/images"],
)
@json_flag
@click.pass_context
def command(context: click.Context, /, *, as_json: bool, **own: Any) -> None:
    """Show what this device is doing: its last round, images, files that cannot be used, memory, last error.

    Reads a file that the running device writes; needs no network.
    """

    settings = read_settings(context, own)
    folder = state_folder(settings.data, settings.state)
    status, running = read_status(status_file(folder)), in_use(folder)
    paused = OwnerPause(folder).is_on()
    sent, serving = sum_lines(Ledger(folder).read(midnight_s())), read_serving(folder)
    if as_json:
        shown = {**msgspec.to_builtins(status), "running": running, "paused": paused, "sent": msgspec.to_builtins(sent)}
        shown["serving"] = msgspec.to_builtins(serving)
        print_json(shown)
    else:
        policy = find_narrowness(settings.policy) or f"methods: {settings.policy.describe_methods()}"
        more = [("today", describe_sent(sent)), ("policy", policy)]
        more += [("paused", "by its owner: takes no task")] if paused else []
        more += [("serving", describe_serving(serving).removeprefix("serving: "))] if serving and serving.name else []
        click.echo(lines(status, running=running, more=more))
