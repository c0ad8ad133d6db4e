"""The command `simulate`."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec
from rich.console import Console

from coordinator.run.display import choose_display
from fedvit.errors import ConfigError
from fedvit.files import atomic_write


@click.command("simulate")
@click.option("--case", "names", multiple=True, metavar="NAME", help="Only this case. Repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Rounds that are counted in each process.")
@click.option("--turns", type=click.IntRange(min=1), default=3, help="Processes of each side, in turn.")
@click.option("--images", type=click.IntRange(min=1), default=10_000, help="Images of all devices together.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    required=True,
    help="CIFAR-10 as class folders, also as .zip: cifar10.zip.",
)
@click.option("--parts", type=click.Path(path_type=Path), help="Keep the device folders here, and use those of before.")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of torch and loop.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16"]), default="fp32", help="Of products of torch and loop."
)
@click.option("--sides", default="onnx,torch,loop", metavar="NAME,...", help="Only these sides.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    multiple=True,
    help="Threads of the loop. Repeatable, the fastest counts; by default 1 and one per core.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")
def simulate_command(
    names: tuple[str, ...],
    rounds: int,
    turns: int,
    images: int,
    data: Path,
    parts: Path | None,
    accelerator: str,
    precision: str,
    sides: str,
    threads: tuple[int, ...],
    as_json: bool,
    out: Path | None,
) -> None:
    """Compare a simulated federation on both engines with a plain PyTorch loop over clients: rounds per second."""
    from bench.simulate.jobs import choose, deal_images  # with torch: seconds that --help need not wait
    from bench.simulate.measure import SIDES, run_simulate_bench, simulate_report

    jobs, wanted = choose(names), sides.split(",")
    if unknown := [side for side in wanted if side not in SIDES]:
        raise ConfigError(f"--sides: no side {unknown[0]!r}, expected some of: {', '.join(SIDES)}")
    with ExitStack() as stack:
        display = stack.enter_context(choose_display())
        if parts is None:
            parts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-simulate-")))
        display.line(f"dealing out {images} images of {data.name}")
        folders = deal_images(data, images, parts)
        report = run_simulate_bench(
            jobs,
            folders,
            images=images,
            rounds=rounds,
            turns=turns,
            accelerator=accelerator,
            precision=precision,
            sides=wanted,
            threads=threads,
            progress=display.line,
        )
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if as_json:
        click.echo(content)
    else:
        Console().print(simulate_report(report))
    if out:
        atomic_write(out, content + b"\n")
