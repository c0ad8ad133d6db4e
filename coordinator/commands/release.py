"""`coordinator release`: offers a version of the device's software to devices that ask for one."""

from pathlib import Path

import click
import msgspec

from coordinator.operations.releasing import publish
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.hints import command
from fedvit.labels import parse_label
from fedvit.publisher import PublisherKey
from fedvit.releases import STABLE, Name

_PATH = click.Path(path_type=Path)


@click.command(
    cls=Command,
    examples=[
        "coordinator release releases dist/fedvit-edge-*.zip --key release.key --label room=kitchen",
        "coordinator release releases dist/fedvit-edge-*.zip --key release.key",
    ],
)
@click.argument("folder", type=_PATH)
@click.argument("packages", type=_PATH, nargs=-1, required=True)
@click.option("--key", required=True, type=_PATH, help="Private key of releases; coordinator sign KEY --new makes one.")
@click.option("--channel", default=STABLE, metavar="NAME", help="List that devices read, e.g. stable or beta.")
@click.option(
    "--label",
    "texts",
    multiple=True,
    metavar="KEY=VALUE",
    help="Offer the version only to devices with this label; repeatable. Without labels it is for all devices.",
)
def release(folder: Path, packages: tuple[Path, ...], key: Path, channel: str, texts: tuple[str, ...]) -> None:
    """Offer PACKAGES of one version in FOLDER, and sign the list that devices read.

    Devices look into FOLDER, or at its URL, whenever their owner's timer runs `edge-client update`. Nothing is pushed.
    Keep the key on a machine of your own: who has it decides which software runs on all devices.
    """
    try:
        msgspec.convert(channel, Name)
    except msgspec.ValidationError:
        raise ConfigError("FV1468", f"--channel {channel[:80]!r}: use letters, digits, '.', '_' and '-'") from None
    publisher = PublisherKey.read(key)
    releases = publish(folder, channel, packages, dict(map(parse_label, texts)), publisher)
    for offer in releases.offers:
        whose = " and ".join(f"{name}={value}" for name, value in offer.labels.items())
        boards = ", ".join(f"Python {package.python} on {package.machine}" for package in offer.packages)
        click.echo(f"{channel}: {offer.version} for {f'devices with {whose}' if whose else 'all devices'} ({boards})")
    first = command("edge-client", "update", folder, "--update-key", publisher.public)
    click.echo(f"next, once on each device, with its own path or URL of the folder: {first}", err=True)
