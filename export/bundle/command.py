"""The common part of the `export` commands of coordinator and device: two flags, and the writing."""

from pathlib import Path

import click

from export.bundle.assemble import Precision
from export.bundle.card import summary
from export.bundle.write import CARD, Bench, TrainedModel, write_bundle

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
precisions_flag = click.option(
    "--precision",
    "precisions",
    type=click.Choice(("fp32", "fp16", "int8")),
    multiple=True,
    help="Only these files. Repeatable.",
)


def write(out: Path, trained: TrainedModel, bench: Bench, precisions: tuple[str, ...], *, as_json: bool) -> None:
    """Write the bundle `out` and print its summary, or its card as JSON. Raises as `write_bundle` does."""
    chosen = tuple(map(Precision, precisions)) or tuple(Precision)
    card = write_bundle(out, trained, bench, precisions=chosen, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo((out / CARD).read_text(), nl=False)
    else:
        click.echo("\n".join([f"bundle: {out}", *summary(card)]))
