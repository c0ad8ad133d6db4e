"""`coordinator methods`: lists all methods, or describes one."""

from importlib import import_module
from typing import Any

import click

from coordinator.commands.flags import key_value
from coordinator.compute.planning.method_entry import STORED_CLASSES, page, read_stored_entries, table
from fedvit import plugins
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.known_names import check_model, check_model_options, method_classes
from fedvit.known_values import check_model_values, check_settings
from fedvit.model_options import SMALL
from profiles.report.console import Console

HINT = "; --method lists some methods alone"


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
@click.option("--model-option", "model_options", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option(
    "--option", "-o", "options", multiple=True, metavar="KEY=VALUE", help="Option of the methods. Repeatable."
)
@click.option("--classes", default=10, help="Number of classes.")
@json_flag
def methods(name: str | None, names: tuple[str, ...], model: str, classes: int, as_json: bool, **pairs: Any) -> None:
    """List all methods: what each trains and sends; or describe the method NAME."""
    options, model_options = (dict(map(key_value, pairs[key])) for key in ("options", "model_options"))
    if name and names:
        raise ConfigError("FV1903", f"methods {name} shows that one method; --method {names[0]} is for the list")
    if classes < 1:
        raise ConfigError("FV1903", f"--classes {classes} must be at least 1")
    chosen = [name] if name else names
    packaged = plugins.read_entries(plugins.METHODS).keys()
    check_model(model)
    check_model_options(model, model_options)
    check_model_values(model, model_options)
    for each in chosen or sorted({*method_classes()} - packaged):
        try:
            check_settings(each, options, model, model_options)
        except ConfigError as error:
            raise ConfigError(error.code, f"{error}{'' if chosen else HINT}") from None
    own = (
        read_stored_entries()
        if (model, classes) == (SMALL, STORED_CLASSES) and not options and not model_options
        else None
    )
    entries = {entry.name: entry for entry in own or ()}
    wanted = chosen or sorted({*method_classes(), *packaged})
    if missing := [each for each in wanted if each not in entries or each in packaged]:
        planning = import_module("coordinator.compute.planning.catalogue")  # late: it imports torch
        if not chosen:
            missing = planning.usable(missing, lambda text: click.echo(f"left out: {text}", err=True))
            wanted = sorted({*entries} - packaged | {*missing})
        computed = planning.catalogue(missing, model, classes, options=options, model_options=model_options)
        entries |= {entry.name: entry for entry in computed}
    shown = [entries[each] for each in wanted]
    if as_json:
        print_json(shown)
        return
    Console().print(page(shown[0], model, classes) if name else table(shown, model, classes))
