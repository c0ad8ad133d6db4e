"""The edge of a program: deliberate errors become one line and an exit code."""

import sys

import click

from fedvit.errors import INTERRUPTED, ConfigError, FedvitError


def run(command: click.Command, name: str) -> None:
    """Run a program's command line; `name` begins its error lines. Exit codes: fedvit.errors."""
    try:
        command.main(standalone_mode=False)
    except FedvitError as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ConfigError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
