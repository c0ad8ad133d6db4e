"""`coordinator dashboard`: shows runs and devices in a browser."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_to_watch
from coordinator.security.api_tokens import ApiTokens
from coordinator.security.credentials import ApiCredentials
from coordinator.security.folder import Deployment
from coordinator.serving.backup import BackupFolder
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.reader import RecordReader
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.hosts import is_loopback
from fedvit.passwords import read_password

PORT = 8090
PASSWORD = "FEDVIT_DASHBOARD_PASSWORD"


@click.command(
    cls=Command,
    examples=[
        "coordinator dashboard",
        "coordinator dashboard --runs /srv/fedvit/runs --port 8091",
        "coordinator dashboard --api-only --tls --listen 0.0.0.0 --deployment deployment",
    ],
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
@click.option(
    "--backups",
    type=click.Path(path_type=Path),
    help="Folder of `coordinator backup DIR`, in which the API makes and lists backups.",
)
@click.option("--api-only", is_flag=True, help="Serve the HTTP API without pages.")
@click.option(
    "--tls", is_flag=True, help="Encrypt with the certificate of the deployment's server, which its authority signed."
)
def dashboard(
    folder: Path,
    experiments: Path,
    port: int,
    deployment: Path | None,
    password_file: Path | None,
    backups: Path | None,
    **access: Any,
) -> None:
    """Show runs and devices in a browser, as they happen, and serve the HTTP API (docs/api.md).

    Without a password the address that it prints contains a token, which opens the pages. With a password, or with a
    token of `coordinator token new`, people may change what their role allows.
    """
    listen, is_api = access["listen"], access["api_only"]
    server = _import_server(is_api)
    password = read_password(password_file, PASSWORD, "dashboard", "FV1805")
    if password is None and not is_api and not is_loopback(listen):
        raise ConfigError(
            "FV1804",
            f"a dashboard on {listen} can be reached from other machines and needs a password; "
            f"set {PASSWORD} or --password-file, or listen on 127.0.0.1",
        )
    with open_to_watch(folder) as store:
        devices = Deployment.open(deployment) if deployment else None
        tls = _find_certificate(devices) if access["tls"] else None
        with server.listen_on(listen, port) as opened:
            port = opened.getsockname()[1]
            host = f"[{listen}]" if ":" in listen else listen
            address = f"{'https' if tls else 'http'}://{host}:{port}/"
            file = None if is_api or password else folder / f"dashboard-{port}.url"
            with _announce("API" if is_api else "dashboard", address, file) as token:
                site = server.ApiSite(
                    RecordReader(store, folder),
                    folder,
                    ApiCredentials(ApiTokens(folder), password, token),
                    devices,
                    BackupFolder(backups) if backups else None,
                )
                shown = None if is_api else Experiments(experiments)
                server.serve(site, opened, shown, certificate=tls, proxies=access["proxies"])


def _import_server(api_only: bool) -> ModuleType:
    """Import the API's server, and the pages unless they are not wanted. Raises ConfigError if a package is missing."""
    try:  # late: FastAPI and NiceGUI are optional
        if not api_only:
            import_module("coordinator.views.dashboard.server")
        return import_module("coordinator.http_api.server")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "FV1801", f"the dashboard needs the package {error.name}: pip install 'fedvit[dashboard]'"
        ) from error


def _find_certificate(deployment: Deployment | None) -> tuple[Path, Path]:
    """Return the certificate of the deployment's server, and its key. Raises ConfigError without a deployment."""
    if deployment is None:
        raise ConfigError("FV1816", "--tls uses the certificate of a deployment: name it with --deployment")
    return deployment.folder / "server.pem", deployment.folder / "server.key"


@contextmanager
def _announce(what: str, address: str, file: Path | None) -> Iterator[str | None]:
    """Print the address. With a `file` make a token, which opens the pages, too; without a terminal, whose output may
    be logged, the token is only in the file.

    The file is for its owner only, and is removed at the end.
    """
    if file is None:
        click.echo(f"{what}: {address} (Ctrl-C ends it)")
        yield None
        return
    token = secrets.token_urlsafe(32)
    opens = f"{address}?token={token}"
    try:
        atomic_write(file, f"{opens}\n".encode(), private=True)
        click.echo(
            f"{what}: {opens} (Ctrl-C ends it)"
            if sys.stdout.isatty()
            else f"{what}: {address} (Ctrl-C ends it); {file} has its address with the token that opens it"
        )
        yield token
    finally:
        file.unlink(missing_ok=True)
