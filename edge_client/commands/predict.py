"""`edge-client predict`: classifies images with the model of a bundle."""

import json
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from export.bundle.assemble import Precision
from fedvit.command_line import Command, json_flag
from fedvit.data.images import is_image_name
from fedvit.data.label_file import CLASS_FILE
from fedvit.errors import DataError
from fedvit.files import atomic_write, storage_failed
from fedvit.quantities import format_count
from fedvit.terminal import escape_line


@click.command(
    "predict",
    cls=Command,
    params=program_options("threads"),
    examples=["edge-client predict photo.jpg --bundle bundle --top 3"],
)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--bundle", type=click.Path(path_type=Path), default=Path("bundle"), help="Folder of the bundle.")
@click.option(
    "--precision",
    type=click.Choice([entry.value for entry in Precision]),
    help="Which model file to use; by default fp32.",
)
@click.option("--top", type=click.IntRange(min=1), default=1, help="Number of classes to print, the likeliest first.")
@click.option("--masks", type=click.Path(path_type=Path), help="Folder for masks of a segmentation's answers, as PNG.")
@json_flag
def command(
    *,
    images: tuple[Path, ...],
    bundle: Path,
    precision: str | None,
    top: int,
    masks: Path | None,
    as_json: bool,
    **own: Any,
) -> None:
    """Answer each of IMAGES with the model of a bundle: probabilities, a number, or shares of classes.

    A folder stands for all images in it.
    """

    from export.bundle.read import Bundle, NamedNumber  # onnxruntime takes seconds

    threads = read_settings(click.get_current_context(), own).threads
    model = Bundle.open(bundle, Precision(precision) if precision else None, threads)
    if masks:
        try:
            masks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot make folder {masks}", error) from error
        atomic_write(masks / CLASS_FILE, "".join(f"{label}\n" for label in model.labels).encode())
    listed: list[dict[str, Any]] = []
    failed = 0
    listed_images = [file for path in images for file in _images_of(path)]
    for number, path in enumerate(listed_images):
        try:
            answers = model.answer(path, top)
            if masks:
                atomic_write(masks / f"{number:04d}-{path.stem}.png", model.make_mask(path))
        except DataError as error:
            failed += 1
            listed.append({"image": str(path), "error": str(error)})
            click.echo(f"edge-client: {error}", err=True)
            continue
        listed.append({"image": str(path), "answers": [answer._asdict() for answer in answers]})
        if not as_json:
            figures = (
                f"{one.label} {one.number:.4g}"
                if isinstance(one, NamedNumber)
                else f"{one.label} {one.probability:.3f}"
                for one in answers
            )
            click.echo(escape_line(f"{path}: {', '.join(figures) or 'no class'}"))
    if as_json:
        click.echo(json.dumps(listed, indent=2))
    if failed:
        raise DataError("FV1403", f"{failed} of {format_count(len(listed_images), 'image')} cannot be read")


def _images_of(path: Path) -> list[Path]:
    """The image itself, or all images below a folder, sorted by name. Raises DataError if there is none."""
    if not path.is_dir():
        return [path]

    images = sorted(file for file in path.rglob("*") if file.is_file() and is_image_name(file.name))
    if not images:
        raise DataError("FV1403", f"{path}: this folder holds no image")
    return images
