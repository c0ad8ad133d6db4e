"""`edge-client doctor`: checks whether the device can take part in a run."""

import json
import sys
from typing import Any

import click
import msgspec

from edge_client.commands.options import DEVICE_OPTIONS, program_options, read_settings
from edge_client.health.doctor import lines, run_checks, worst
from edge_client.health.doctor_context import LEVELS, MOST_DECODED, DoctorContext, Finding
from edge_client.link.endpoint import endpoint_of, state_and_name
from edge_client.settings import DeviceSettings
from edge_client.storage.state import identity_folder
from fedvit.command_line import Command, json_flag
from fedvit.wire.topics import Topics


@click.command(
    "doctor",
    cls=Command,
    params=program_options(*DEVICE_OPTIONS, "test_share", "max_temperature", "min_battery", "vault_key"),
    examples=["edge-client doctor --broker SERVER --data ~/images"],
)
@click.option("--deep", is_flag=True, help="Decode every image; by default a sample of 100.")
@json_flag
@click.pass_context
def command(context: click.Context, /, *, deep: bool, as_json: bool, **own: Any) -> None:
    """Check whether this device can take part, with a hint for each problem.

    Exit code 0: all is well; 1: warnings; 2: errors.
    """

    settings = read_settings(context, own)
    checked = make_context(settings, None if deep else MOST_DECODED)
    findings: list[Finding] = []
    for finding in run_checks(checked):
        findings.append(finding)
        if not as_json:
            click.echo(lines(finding))
    level = worst(findings)
    if as_json:
        # not msgspec.json, which refuses names of files that are not UTF-8
        click.echo(json.dumps(msgspec.to_builtins({"worst": level, "findings": findings}), indent=2))
    sys.exit(LEVELS.index(level))


def make_context(settings: DeviceSettings, decoded_images: int | None) -> DoctorContext:
    """Make the input of the checks; so many images are decoded on trial, None: all. Raises FedvitError."""
    endpoint = endpoint_of(settings)
    state, device = state_and_name(settings, endpoint)
    return DoctorContext(
        address=endpoint.address,
        topics=Topics(endpoint.federation),
        device=device,
        state=state,
        data=settings.data,
        test_share=settings.test_share,
        decoded_images=decoded_images,
        policy=settings.policy,
        vault_key=settings.vault_key,
        identity=endpoint.identity,
        identity_folder=identity_folder(settings.state),
    )
