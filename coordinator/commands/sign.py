"""`coordinator sign`: the key of a publisher, and signatures of graphs in files."""

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from fedvit.blobs import digest_of
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from fedvit.files import name_failure, private_files
from fedvit.hints import command
from fedvit.publisher import PublisherKey, add_signatures

PATH = click.Path(path_type=Path, dir_okay=False)


@click.command(
    cls=Command,
    examples=["coordinator sign publisher.key --new", "coordinator sign publisher.key train.onnx update.onnx"],
)
@click.argument("key", type=PATH)
@click.argument("graphs", type=PATH, nargs=-1)
@click.option("--new", is_flag=True, help="Make the key.")
@click.option("--signatures", "file", type=PATH, default="signatures.txt", help="File that the signatures go to.")
@private_files()
def sign(key: Path, graphs: tuple[Path, ...], new: bool, file: Path) -> None:
    """Make a publisher's private KEY, or sign GRAPHS, which are ONNX files, with it.

    Needs no network and no deployment. The signature says that devices may run the graph: coordinator plan --sign
    makes graphs from the source of their method, and signs these.
    """
    if new == bool(graphs):
        raise click.UsageError("name graphs to sign, or --new to make a key")
    if new:
        click.echo(PublisherKey.create(key).public)
        click.echo(f"next: {command('coordinator', 'init', '--publisher', PublisherKey.read(key).public)}", err=True)
        return
    sign_graphs(key, file)(map(_read_digest, graphs))


def sign_graphs(key: Path, file: Path) -> Callable[[Iterable[str]], None]:
    """Return a function that signs graphs by their digests. Raises ConfigError if the key cannot be read."""
    publisher = PublisherKey.read(key)

    def sign_digests(digests: Iterable[str]) -> None:
        new = add_signatures(file, publisher, digests)
        click.echo(f"{file}: {new} new signatures of publisher {publisher.public}", err=True)

    return sign_digests


def _read_digest(graph: Path) -> str:
    with name_failure(f"graph {graph} cannot be read", ConfigError, "FV1320"):
        return digest_of(graph.read_bytes())
