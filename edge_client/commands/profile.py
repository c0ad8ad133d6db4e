"""`edge-client profile`: measures the device."""

import secrets
from typing import Any

import click

from edge_client.commands.options import DEVICE_OPTIONS, program_options, read_settings
from edge_client.link.endpoint import endpoint_of, state_and_name
from edge_client.owner.profile import ProfileTarget, measure_self, table
from fedvit.command_line import Command, json_flag, print_json
from fedvit.wire.topics import Topics
from profiles.probes.speed import measure_speed


@click.command(
    "profile",
    cls=Command,
    params=program_options(*DEVICE_OPTIONS, "threads", "flops_budget", "round_deadline", "upload_budget"),
    examples=["edge-client profile --broker SERVER --data ~/images"],
)
@click.option("--fresh", is_flag=True, help="Measure the compute speed again, even if it is known.")
@json_flag
@click.pass_context
def command(context: click.Context, /, *, fresh: bool, as_json: bool, **own: Any) -> None:
    """Measure this device: speed, memory, disk, temperature, power, the connection to the broker. Takes seconds."""

    settings = read_settings(context, own)
    endpoint = endpoint_of(settings)
    state, device = state_and_name(settings, endpoint)
    report = measure_self(
        ProfileTarget(
            state=state,
            address=endpoint.address,
            client_id=f"{device}-{secrets.token_hex(4)}",
            probe_topic=Topics(endpoint.federation).probe(device),
            threads=settings.threads,
            policy=settings.policy,
        ),
        measure_speed,
        lambda what: click.echo(f"measuring: {what}", err=True),
        fresh=fresh,
    )
    if as_json:
        print_json(report)
    else:
        click.echo(table(report))
