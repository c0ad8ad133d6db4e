"""`fleet contracts`: checks the plugins of an installed package."""

import click

from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError


@click.command(cls=Command, examples=["fleet contracts fedvit-example-extras"])
@click.argument("package")
@json_flag
def contracts(package: str, as_json: bool) -> None:
    """Check the plugins of an installed package: every law that fedvit's own parts of each kind obey.

    A method or a model is exported and trained on a few images, which takes a few seconds.
    """
    from fleet.contracts import check_plugin, find_plugins

    results = []
    for kind, name in find_plugins(package):
        if not as_json:
            click.echo(f"{kind.noun} {name}")
        for result in check_plugin(kind, name):
            results.append(result)
            if not as_json:
                click.echo(f"  {'ok    ' if result.broken is None else 'BROKEN'}  {result.law}")
                if result.broken is not None:
                    click.echo(f"          {result.broken}")
    if as_json:
        print_json(results)
    if broken := sum(result.broken is not None for result in results):
        raise ConfigError("FV2486", f"{package} breaks {broken} of {len(results)} laws of its plugins")
