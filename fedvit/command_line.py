"""The edge of a program: deliberate errors become one line and an exit code."""

import sys
from collections.abc import Callable
from typing import Any

import click

from fedvit.descriptors import raise_limit
from fedvit.errors import INTERRUPTED, ConfigError, FedvitError


def amount(parse: Callable[[str], float]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """The callback of an option that people write with a unit; `parse` is one of fedvit.quantities.

    Raises ConfigError naming the option.
    """

    def read(_: click.Context, option: click.Parameter, text: str | None) -> float | None:
        try:
            return None if text is None else parse(text)
        except ConfigError as error:
            raise ConfigError(f"{option.opts[0]}: {error}") from error

    return read


def run(command: click.Command, name: str) -> None:
    """Run a program's command line; `name` begins its error lines. Exit codes: fedvit.errors."""
    raise_limit()
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
