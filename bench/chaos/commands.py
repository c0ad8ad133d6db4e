"""`python -m bench chaos`: does a federation survive the faults that fleets meet?"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec
import numpy as np

from bench.chaos.network import Network
from bench.chaos.schedule import KINDS, draw_schedule
from fedvit.errors import ConfigError, FedvitError
from fedvit.files import atomic_write
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.processes import Fleet, program

IMAGES_PER_DEVICE = 50


@click.command("chaos")
@click.option("--minutes", type=click.FloatRange(min=0), default=5.0, show_default=True, help="How long, about.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The schedule follows from it.")
@click.option("--devices", type=click.IntRange(min=2), default=3, show_default=True, help="Edge processes.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Rounds of each run.")
@click.option("--every", type=click.FloatRange(min=1), default=15.0, show_default=True, help="Seconds between faults.")
@click.option(
    "--longest", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Longest fault, seconds."
)
@click.option(
    "--fault", "kinds", multiple=True, metavar="KIND", help=f"Only this kind; repeatable. Known: {', '.join(KINDS)}."
)
@click.option("--calm", is_flag=True, help="Inject no faults, for instance to see what --network costs.")
@click.option("--network", metavar="SHAPE", help="Each device's link to the broker, e.g. 2mbit,50ms,5% (loss).")
@click.option("--broker", type=click.Choice(["auto", "mosquitto", "embedded"]), default="auto", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("chaos"), show_default=True, help="Folder for everything."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def chaos_command(
    minutes: float,
    seed: int,
    devices: int,
    rounds: int,
    every: float,
    longest: float,
    kinds: tuple[str, ...],
    calm: bool,
    network: str | None,
    broker: str,
    out: Path,
    as_json: bool,
) -> None:
    """Train with real processes while faults are injected: kills, hangs, lost links, full disks, wrong clocks.

    The faults are drawn from the seed and printed. Exits with code 1 unless the federation recovered from every fault,
    no result was counted twice, and the tensors are those of an undisturbed run, bit for bit.
    """
    from bench.chaos.outcome import shown
    from bench.chaos.scenario import SCENARIO, run_scenario, undisturbed_run
    from profiles.report.console import Console

    if sys.platform != "linux":
        raise ConfigError(f"bench chaos needs Linux to limit files of running processes; this is {sys.platform}")
    shape = Network.parse(network) if network else None
    names = [f"device-{number}" for number in range(devices)]
    duration_s = 60 * minutes
    schedule = (
        [] if calm else draw_schedule(seed, names, duration_s=duration_s, every_s=every, kinds=kinds, longest_s=longest)
    )

    report = partial(click.echo, err=True)
    for fault in schedule:
        report(str(fault))
    home = out / f"seed-{seed}"
    if home.exists():
        shutil.rmtree(home)  # of an earlier scenario with this seed
    folders = deal_digits(home / "parts", names)
    values = {**SCENARIO, "rounds": rounds}
    report("undisturbed run, for comparison")
    reference = undisturbed_run(folders, values, home / "calm")
    report("injecting faults")
    with Fleet() as fleet:
        outcome = run_scenario(
            home,
            folders,
            schedule,
            values=values,
            reference=reference,
            duration_s=duration_s,
            seed=seed,
            start=lambda name, module, arguments, log: fleet.start(name, [*program(module), *arguments], log),
            network=shape,
            broker=broker,
            report=report,
        )
    content = msgspec.json.format(msgspec.json.encode(outcome))
    atomic_write(home / "outcome.json", content + b"\n")
    if as_json:
        click.echo(content)
    else:
        Console().print(shown(outcome))
        click.echo(f"logs, state, record and outcome.json: {home}")
    if not outcome.ok:
        raise FedvitError(f"the federation did not recover, or its results differ; see {home}")


def deal_digits(parts: Path, names: Sequence[str]) -> list[Path]:
    """A folder of handwritten digits for each device."""
    digits = read_digits(size=32)
    few = np.arange(IMAGES_PER_DEVICE * len(names))
    samples = replace(digits, images=digits.images[few], labels=digits.labels[few])
    write_device_folders(
        samples, partition("dirichlet", samples.labels, len(names), seed=3, alpha=1.0), parts, test_share=0.2, seed=3
    )
    return [parts / name for name in names]
