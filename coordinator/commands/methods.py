"""`coordinator methods`: lists all methods, or describes one."""

import click
import msgspec

from coordinator.commands.flags import key_value
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.known_names import check_model, check_model_options
from fedvit.known_values import check_model_values, check_settings


@click.command(
    cls=Command,
    examples=[
        "coordinator methods",
        "coordinator methods fedtp --model vit_base_patch16_224",
    ],
)
@click.argument("name", required=False)
@click.option("--method", "names", multiple=True, metavar="NAME", help="List only this method. Repeatable.")
@click.option("--model", default="vit_small_images", help="Model of the figures.")
@click.option("--model-option", "model_pairs", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Option of the methods. Repeatable.")
@click.option("--classes", default=10, help="Number of classes.")
@json_flag
def methods(
    name: str | None,
    names: tuple[str, ...],
    model: str,
    model_pairs: tuple[str, ...],
    pairs: tuple[str, ...],
    classes: int,
    as_json: bool,
) -> None:
    """List all methods: what each trains and sends; or describe the method NAME."""
    options, model_options = dict(map(key_value, pairs)), dict(map(key_value, model_pairs))
    for each in [name] if name else names:
        check_settings(each, options, model, model_options)
    check_model(model)
    check_model_options(model, model_options)
    check_model_values(model, model_options)
    from rich.console import Console

    from coordinator.planning.catalogue import catalogue, page, table

    if name and names:
        raise ConfigError(f"methods {name} shows that one method; --method {names[0]} is for the list")
    entries = catalogue(
        [name] if name else names,
        model,
        classes,
        options=options,
        model_options=model_options,
        warn=lambda text: click.echo(f"left out: {text}", err=True),
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(entries)).decode())
        return
    console = Console()
    console.print(page(entries[0], model, classes) if name else table(entries, model, classes))
