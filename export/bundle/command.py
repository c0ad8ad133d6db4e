"""The common part of the `export` commands of coordinator and device: two flags, and the writing."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from export.bundle.assemble import USUAL, Precision
from export.bundle.card import summary
from export.bundle.write import CARD, Bench, TrainedModel, write_bundle
from export.formats import FORMATS, ONNX

Command = TypeVar("Command", bound=Callable[..., object])

out_flag = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bundle"), help="New folder for the bundle."
)


class RoundChoice(click.ParamType):  # type: ignore[type-arg]
    """`best`, `last` or the number of a round."""

    name = "round"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        text = str(value)
        if text in ("best", "last"):
            return text
        if text.isascii() and text.isdigit() and int(text):
            return int(text)
        self.fail(f"{text!r} is neither best, last nor the number of a round", param, ctx)


round_flag = click.option(
    "--round",
    "asked_round",
    type=RoundChoice(),
    metavar="best|last|N",
    help="Model after this round; by default the best of a run with accuracy or patience in [stop], else the last.",
)
licence_flag = click.option("--licence", help="Licence of the model for its card, such as apache-2.0.")
precisions_flag = click.option(
    "--precision",
    "precisions",
    type=click.Choice([entry.value for entry in Precision]),
    multiple=True,
    help="Only these files; by default all but int8_static, which is calibrated on images. Repeatable.",
)


def format_flag(*, on_device: bool) -> Callable[[Command], Command]:
    """Return the flag --format with the formats that a coordinator or a device can write."""
    names = [name for name, entry in FORMATS.items() if entry.on_device or not on_device]
    text = "; ".join(f"{name}: {FORMATS[name].description}" for name in names)
    return click.option("--format", "format_name", type=click.Choice(names), default=ONNX, help=f"{text}.")


def check_flags(format_name: str, **flags: object) -> None:
    """Check that flags of a bundle are for one. Raises UsageError."""
    if format_name != ONNX and (unused := [flag for flag, value in flags.items() if value]):
        raise click.UsageError(f"--{unused[0]} is for --format {ONNX}; format {format_name} does not use it")


def write(out: Path, trained: TrainedModel, bench: Bench, precisions: tuple[str, ...], *, as_json: bool) -> None:
    """Write the bundle `out` and print its summary, or its card as JSON. Raises as `write_bundle` does."""
    chosen = tuple(map(Precision, precisions)) or USUAL
    card = write_bundle(out, trained, bench, precisions=chosen, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo((out / CARD).read_text(), nl=False)
    else:
        click.echo("\n".join([f"bundle: {out}", *summary(card)]))
