"""`edge-client page`: the owner's page of this device in a browser."""

import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.owner.page.access import PageAccess
from edge_client.owner.page.routes import OwnerPage
from edge_client.owner.page.server import PageServer
from edge_client.storage.state import state_folder
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.hosts import is_loopback
from fedvit.logs import configure_logging
from fedvit.passwords import read_password
from fedvit.signals import stop_on_signals
from fedvit.small_server import parse_listen

PORT = 8092
PASSWORD = "FEDVIT_PAGE_PASSWORD"


@click.command(
    "page",
    cls=Command,
    params=program_options("data", "state", "threads", "test_share", "vault_key", "policy"),
    examples=[
        "edge-client page --data ~/images",
        "edge-client page --data ~/images --listen 0.0.0.0:8092 --password-file password",
    ],
)
@click.option(
    "--listen",
    default=str(PORT),
    metavar="[HOST:]PORT|unix:PATH",
    help="Address of the page; one that other machines reach needs a password.",
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File with the password; or set {PASSWORD}.",
)
@click.pass_context
def command(context: click.Context, /, *, listen: str, password_file: Path | None, **own: Any) -> None:
    """Serve the owner's page: what this device does, what left it, labels for its pictures, a pause.

    Without a password the address that it prints contains a token, which opens the page. Pictures are sent to
    that browser alone.
    """
    settings = read_settings(context, own)
    state = state_folder(settings.data_folder, settings.state)
    address, password = (
        parse_listen(listen, "--listen", "FV1426"),
        read_password(password_file, PASSWORD, "page", "FV1427"),
    )
    if password is None and address.socket_path is None and not is_loopback(address.host):
        raise ConfigError(
            "FV1426",
            f"a page on {address.host} can be reached from other machines and needs a password: set {PASSWORD} or "
            "--password-file, or listen on 127.0.0.1",
        )
    configure_logging()
    token = secrets.token_urlsafe(32) if password is None and address.socket_path is None else None
    server = PageServer(address, OwnerPage(settings, state, PageAccess(password, token)))
    stop = stop_on_signals()
    with announce(server.address, token, state / f"page-{urlsplit(server.address).port}.url"):
        threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
        stop.wait()
        server.shutdown()
        server.server_close()


@contextmanager
def announce(address: str, token: str | None, file: Path) -> Iterator[None]:
    """Print the address. With a token write it to a file for its owner only, which is removed at the end.

    Without a terminal, whose output may be logged, the token is only in the file.
    """
    shown = address if address.startswith("unix:") else f"{address}/"
    if token is None:
        click.echo(f"page: {shown} (Ctrl-C ends it)")
        yield
        return
    opens = f"{shown}?token={token}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(file, f"{opens}\n".encode(), private=True)
        at_terminal = sys.stdout.isatty()
        note = "" if at_terminal else f"; {file} has its address with the token that opens it"
        click.echo(f"page: {opens if at_terminal else shown} (Ctrl-C ends it){note}")
        yield
    finally:
        file.unlink(missing_ok=True)
