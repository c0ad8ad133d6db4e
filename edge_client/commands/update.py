"""`edge-client update`: installs a newer version of this software."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_client.commands.options import BROKER_VARIABLE, DEVICE_OPTIONS, OPTIONS, program_options
from edge_client.owner.update import Updater, UpdateSettings
from edge_client.storage.installed import Installation
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.minisign import parse_any_key
from fedvit.public_keys import PublicKey
from fedvit.releases import Name


@click.command(
    "update",
    cls=Command,
    params=program_options(*DEVICE_OPTIONS, "labels"),
    examples=[
        "edge-client update https://server/releases --update-key ed25519:...",
        "edge-client update",
        "edge-client update --back",
    ],
)
@click.argument("source", required=False)
@click.option("--update-key", "key", metavar="KEY", help="Public key of the releases that are installed; it is stored.")
@click.option("--replace-key", is_flag=True, help="Trust --update-key in place of the stored one.")
@click.option("--channel", metavar="NAME", help="List of versions to follow, e.g. beta; it is stored. At first stable.")
@click.option("--check", is_flag=True, help="Only say which version would be installed.")
@click.option("--back", is_flag=True, help="Go back to the version before this one.")
@click.option("--retry", is_flag=True, help="Try versions again that did not work here.")
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    source: str | None,
    key: str | None,
    replace_key: bool,
    channel: str | None,
    check: bool,
    back: bool,
    retry: bool,
    **own: Any,
) -> None:
    """Install a newer version from SOURCE, a folder or URL of coordinator release, if its signature is right.

    The new version is tried with `edge-client doctor` first. The running service switches to it when it has no task,
    and returns to the present version by itself if three starts or the first task fail. SOURCE, key and channel are
    stored for the next time.
    """
    public = parse_any_key(key) if key else ""
    if (installation := Installation.find()) is None:
        raise ConfigError(
            "FV1461",
            "this edge-client was not installed by its package or by install.sh: update it as you installed it",
        )
    before = context.parent.params if context.parent else {}
    values = {**before, **{name: value for name, value in own.items() if value}}
    updater = Updater(installation, _list_options(values), values["labels"], click.echo)
    with updater.hold():
        if back:
            click.echo(f"back to {updater.go_back()}; the service switches when it has no task")
            return
        settings = _change_settings(updater.settings, source, public, channel, replace=replace_key)
        if settings != updater.settings:
            updater.store(settings)
        if retry:
            updater.forget_refusals()
        found = updater.find_offer()
        if found is None:
            return
        offer, package = found
        if check:
            click.echo(f"{offer.version} would be installed ({package.size / 1e6:.1f} MB)")
            return
        updater.install(offer, package)
    click.echo(f"{offer.version} is installed; the service switches to it when it has no task")


def _change_settings(
    settings: UpdateSettings, source: str | None, key: PublicKey, channel: str | None, *, replace: bool
) -> UpdateSettings:
    """Return the settings with what the command line names. Raises ConfigError."""
    if key and settings.key not in ("", key) and not replace:
        raise ConfigError(
            "FV1467",
            f"--update-key {key} is another key than the stored {settings.key}; if the publisher told you so, add "
            "--replace-key",
        )
    if source and "://" not in source:
        source = str(Path(source).absolute())
    elif source and not source.startswith(("http://", "https://")):
        raise ConfigError("FV1467", f"{source[:200]!r} is neither a folder nor an http:// or https:// address")
    try:
        msgspec.convert(channel or settings.channel, Name)
    except msgspec.ValidationError:
        raise ConfigError("FV1467", f"--channel {str(channel)[:80]!r} is no name of a channel") from None
    return msgspec.structs.replace(
        settings, source=source or settings.source, key=key or settings.key, channel=channel or settings.channel
    )


def _list_options(values: Mapping[str, Any]) -> list[str]:
    """Return the options of this device for `edge-client doctor`; a broker of the environment stays there."""
    options = []
    for option in OPTIONS:
        value = values.get(str(option.name))
        is_hidden = option.name == "broker" and value == os.environ.get(BROKER_VARIABLE)
        if option.name in DEVICE_OPTIONS and value is not None and not is_hidden:
            options += [option.opts[0], str(value)]
    return options
