"""`edge-client profile`: measures the device."""

import secrets
from typing import Any

import click
import msgspec

from edge_client.commands.options import OF_DEVICE, given_to, of_program
from edge_client.link.endpoint import endpoint_of, state_and_name
from fedvit.command_line import Command, json_flag
from fedvit.resources import Budget
from fedvit.wire.topics import Topics
from profiles.probes.host import fast_cores


@click.command(
    "profile",
    cls=Command,
    params=of_program(*OF_DEVICE, "threads", "flops_budget", "round_deadline", "upload_budget"),
    examples=["edge-client profile --broker SERVER --data ~/images"],
)
@click.option("--fresh", is_flag=True, help="Measure the compute speed again, even if it is known.")
@json_flag
@click.pass_context
def profile_command(context: click.Context, /, *, fresh: bool, as_json: bool, **own: Any) -> None:
    """Measure this device: speed, memory, disk, temperature, power, the connection to the broker. Takes seconds."""
    from edge_client.owner.profile import Installation, measure_self, table
    from profiles.probes.speed import measure_speed

    given = given_to(context, own)
    endpoint = endpoint_of(given)
    state, device = state_and_name(given, endpoint)
    report = measure_self(
        Installation(
            state=state,
            address=endpoint.address,
            client_id=f"{device}-{secrets.token_hex(4)}",
            probe_topic=Topics(endpoint.federation).probe(device),
        ),
        given["threads"] or fast_cores(),
        measure_speed,
        lambda what: click.echo(f"measuring: {what}", err=True),
        budget=Budget(
            memory_bytes=given["memory_budget"],
            flops_per_round=given["flops_budget"],
            round_deadline_s=given["round_deadline"],
            upload_bytes=given["upload_budget"],
        ),
        temperature_limit_c=given["temperature_limit"],
        fresh=fresh,
    )
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else table(report))
