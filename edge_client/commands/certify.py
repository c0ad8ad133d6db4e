"""`edge-client certify`: tries a board, and writes down how it did."""

import secrets
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_client.commands.doctor import make_context
from edge_client.commands.options import DEVICE_OPTIONS, program_options, read_settings
from edge_client.owner.profile import ProfileTarget
from fedvit.command_line import Command, json_flag, print_json
from fedvit.files import atomic_write, make_folder

JSON_FILE, PAGE_FILE = "certificate.json", "certificate.md"


@click.command(
    "certify",
    cls=Command,
    params=program_options(*DEVICE_OPTIONS, "threads"),
    examples=["edge-client certify", "edge-client certify --minutes 30 --memory-budget 512MB --out pi-5"],
)
@click.option(
    "--minutes", type=click.FloatRange(0, 600), default=10.0, help="Time to train without a pause, for the temperature."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("certificate"), help="Folder to write.")
@click.option("--check", type=click.Path(path_type=Path), help="Only check the signature of this certificate.json.")
@json_flag
@click.pass_context
def command(
    context: click.Context, /, *, minutes: float, out: Path, check: Path | None, as_json: bool, **own: Any
) -> None:
    """Try this board: checks, speed, three training programs, a limit of memory, heat, kill -9 and resume.

    Writes certificate.json, signed with this device's key if it has joined, the page certificate.md, and prints a row
    for docs/boards.md. They have no host name, folders, addresses or images; a signature has the device's name. Exit
    code 1: something is wrong.
    """
    from edge_client.owner.certify import certify
    from edge_client.owner.certify_page import (
        describe_signature,
        find_signer_of,
        make_document,
        make_page,
        make_row,
        read_document,
    )

    if check:
        document = read_document(check)
        click.echo(f"{make_row(document)}\n{describe_signature(document)}")
        sys.exit(0 if find_signer_of(document) else 1)
    settings = read_settings(context, own)
    checked = make_context(settings, 0)
    target = ProfileTarget(
        state=checked.state,
        address=checked.address,
        client_id=f"{checked.device}-{secrets.token_hex(4)}",
        probe_topic=checked.topics.probe(checked.device),
        threads=settings.threads,
        policy=settings.policy,
    )
    certificate = certify(checked, target, minutes * 60, lambda part: click.echo(f"certify: {part}", err=True))
    document = make_document(certificate, checked.identity)
    make_folder(out)
    atomic_write(out / JSON_FILE, msgspec.json.format(msgspec.json.encode(document)))
    atomic_write(out / PAGE_FILE, make_page(document).encode())
    if as_json:
        print_json(document)
    else:
        click.echo(make_page(document))
        click.echo(f"a row for docs/boards.md:\n{make_row(document)}")
    click.echo(f"wrote {out / JSON_FILE} and {out / PAGE_FILE}", err=True)
    sys.exit(1 if certificate.faults else 0)
