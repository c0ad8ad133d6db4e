"""`coordinator dashboard`: shows runs and devices in a browser."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import runs_flag
from coordinator.operations.submitting import Submission, submit
from coordinator.record.opening import open_to_watch
from coordinator.security.broker import is_loopback
from coordinator.security.folder import Deployment
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.reader import RecordReader
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.files import atomic_write

PORT = 8090
PASSWORD = "FEDVIT_DASHBOARD_PASSWORD"
SHORTEST = 8
"""Characters of a password."""


@click.command(
    cls=Command, examples=["coordinator dashboard", "coordinator dashboard --runs /srv/fedvit/runs --port 8091"]
)
@runs_flag
@click.option(
    "--experiments",
    type=click.Path(path_type=Path),
    default=Path("experiments"),
    help="Folder of experiments, each of which `fleet experiment FILE` wrote, to be compared.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port of the pages; 0 takes a free one.")
@click.option(
    "--listen", default="127.0.0.1", help="Address of the pages; one that other machines reach needs a password."
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File with the password, which allows changes; or set {PASSWORD}.",
)
@click.option(
    "--proxy",
    "proxies",
    metavar="ADDRESS[,ADDRESS...]",
    help="Addresses of reverse proxies in front of the pages, whose headers X-Forwarded-For and -Proto are believed.",
)
@click.option(
    "--deployment",
    type=click.Path(path_type=Path),
    envvar="FEDVIT_DEPLOYMENT",
    help="Folder that `coordinator init` made: revoked devices are marked; or set FEDVIT_DEPLOYMENT.",
)
def dashboard(
    folder: Path,
    experiments: Path,
    port: int,
    deployment: Path | None,
    password_file: Path | None,
    **access: Any,
) -> None:
    """Show runs and devices in a browser, as they happen; a process of its own that only reads.

    Without a password the address that it prints contains a token, which opens the pages. With a password
    operators can cancel runs, release devices from quarantine and revoke them.
    """
    listen = access["listen"]
    try:  # late: NiceGUI is optional
        pages, frame = (import_module(f"coordinator.views.dashboard.{name}") for name in ("server", "frame"))
    except ModuleNotFoundError as error:
        raise ConfigError(
            "FV1801", f"the dashboard needs the package {error.name}: pip install 'fedvit[dashboard]'"
        ) from error
    password = _password(password_file)
    if password is None and not is_loopback(listen):
        raise ConfigError(
            "FV1804",
            f"a dashboard on {listen} can be reached from other machines and needs a password; "
            f"set {PASSWORD} or --password-file, or listen on 127.0.0.1",
        )
    store = open_to_watch(folder)
    try:
        devices = Deployment.open(deployment) if deployment else None
        with pages.listen_on(listen, port) as opened:
            port = opened.getsockname()[1]
            address = f"http://{f'[{listen}]' if ':' in listen else listen}:{port}/"
            site = frame.Site(
                RecordReader(store, folder),
                folder,
                Experiments(experiments),
                devices,
                acts=password is not None,
                submit=lambda values, name: submit(folder, Submission(values, "run.toml", name)),
            )
            with _announce(address, folder / f"dashboard-{port}.url", needs_token=password is None) as token:
                pages.serve(site, opened, password or token, by_address=password is None, proxies=access["proxies"])
    finally:
        store.close()


@contextmanager
def _announce(address: str, file: Path, *, needs_token: bool) -> Iterator[str]:
    """Make a token, and say how the pages are opened; without a terminal, whose output may be logged, only in a file.

    The file is for its owner only, and is removed at the end.
    """
    token = secrets.token_urlsafe(32) if needs_token else ""
    if not token:
        click.echo(f"dashboard: {address} (Ctrl-C ends it)")
        yield token
        return
    opens = f"{address}?token={token}"
    try:
        atomic_write(file, f"{opens}\n".encode(), private=True)
        click.echo(
            f"dashboard: {opens} (Ctrl-C ends it)"
            if sys.stdout.isatty()
            else f"dashboard: {address} (Ctrl-C ends it); {file} has its address with the token that opens it"
        )
        yield token
    finally:
        file.unlink(missing_ok=True)


def _password(file: Path | None) -> str | None:
    """From the file, else from the environment; None if there is none. Raises ConfigError if it cannot be used."""
    if file is None:
        password, source = os.environ.get(PASSWORD), PASSWORD
    else:
        try:
            password, source = file.read_text().strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("FV1805", f"the dashboard's password cannot be read: {error}") from error
    if password is not None and len(password) < SHORTEST:
        raise ConfigError("FV1805", f"the dashboard's password in {source} has fewer than {SHORTEST} characters")
    return password
