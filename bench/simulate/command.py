"""`python -m bench simulate`: rounds per second of simulated federations."""

import tempfile
from pathlib import Path
from typing import Any

import click

from bench.commands import json_flag, out_flag
from bench.reporting import Progress, Report, measure
from bench.simulate.jobs import choose, deal_images
from bench.simulate.measure import SIDES, SimulateSettings, run_simulate_bench
from fedvit.errors import ConfigError


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
@click.option("--parts", type=click.Path(path_type=Path), help="Keep the device folders here, and use them again.")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of torch and loop.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16"]), default="fp32", help="Of products of torch and loop."
)
@click.option("--sides", default="onnx,torch,loop", metavar="NAME,...", help="Only these sides.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    multiple=True,
    help="Threads of the loop. Repeatable: the fastest is reported; by default 1 and one per core.",
)
@json_flag
@out_flag
def simulate_command(
    names: tuple[str, ...], images: int, data: Path, sides: str, as_json: bool, out: Path | None, **settings: Any
) -> None:
    """Compare a simulated federation on both engines with a plain PyTorch loop over clients: rounds per second."""
    parts = settings.pop("parts")
    jobs, wanted = choose(names), tuple(sides.split(","))
    if unknown := [side for side in wanted if side not in SIDES]:
        raise ConfigError("FV0002", f"--sides: no side {unknown[0]!r}, expected some of: {', '.join(SIDES)}")

    def run(log: Progress) -> Report:
        with tempfile.TemporaryDirectory(prefix="bench-simulate-") as folder:
            log(f"dealing out {images} images of {data.name}")
            folders = deal_images(data, images, parts or Path(folder))
            options = SimulateSettings(images=images, sides=wanted, **settings)
            return run_simulate_bench(jobs, folders, options, log)

    measure(run, as_json, out)
