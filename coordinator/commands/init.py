"""`coordinator init`: makes a deployment."""

from pathlib import Path

import click

from coordinator.commands.flags import DEPLOYMENT
from coordinator.security.broker.process import claim_port
from coordinator.security.folder import Deployment, Settings, own_addresses, own_hosts
from coordinator.security.signing import PUBLISHER_KEY
from fedvit.command_line import Command
from fedvit.hints import command
from fedvit.public_keys import format_key, parse_key


@click.command(cls=Command, examples=["coordinator init --host server.local"])
@click.argument("folder", type=click.Path(path_type=Path), default=DEPLOYMENT)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address at which devices find the broker. Repeatable.",
)
@click.option("--listen", default="0.0.0.0", help="Address that the broker listens on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8883, help="For devices; 0 takes a free one.")
@click.option(
    "--enrolment-port", type=click.IntRange(0, 65535), default=8884, help="For devices that join; 0 takes a free one."
)
@click.option(
    "--publisher",
    default="",
    metavar="KEY",
    help="Public key of who signs graphs for the devices (coordinator sign --new); by default a new one, whose private "
    "key is in FOLDER.",
)
@click.option("--federation", default="home", help="Name under which devices and coordinator meet at the broker.")
def init(
    folder: Path, hosts: tuple[str, ...], listen: str, port: int, enrolment_port: int, publisher: str, federation: str
) -> None:
    """Make a deployment: its authority, certificates, and the configuration of a broker for its devices only."""

    settings = Settings(
        federation=federation,
        listen=listen,
        port=port or claim_port(listen, 0),
        enrolment_port=enrolment_port or claim_port(listen, 0),
        hosts=own_hosts(hosts, listen, own_addresses()),
    )
    given = format_key(parse_key(publisher)) if publisher else ""
    deployment = Deployment.create(folder, settings, given)
    click.echo(f"deployment: {deployment.folder} (keep it secret: its owner can admit devices)")
    click.echo(f"the broker's certificate is for: {', '.join(settings.hosts)}")
    click.echo(f"devices that join run graphs of publisher {deployment.publisher}")
    if not given:
        click.echo(f"its key is {deployment.folder / PUBLISHER_KEY}: move it off this machine to sign graphs elsewhere")
    start = command("coordinator", "start", "--broker.deployment", folder)
    click.echo(f"next: {start}, and for each device: {command('coordinator', 'enroll', 'NAME', deployment=folder)}")
