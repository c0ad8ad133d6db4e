"""The benchmarks of `python -m bench`: what a device's part and a coordinator cost on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType

from bench.cases import CASES, choose
from coordinator.run.display import choose_display
from fedvit.errors import ConfigError
from fedvit.files import atomic_write

_NAMES = ", ".join(case.name for case in CASES)


@click.group("bench", context_settings={"show_default": True})
def bench_command() -> None:
    """Measure what devices and coordinator cost on this machine, and try to break them."""


def _case_flag(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--case", "names", multiple=True, metavar="NAME", help=f"Only this case. Repeatable. Known: {_NAMES}."
    )(command)


def _json_flag(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def _print(report: Any, shown: Callable[[Any], RenderableType], as_json: bool) -> bytes:
    """Show a report on standard output; returns it as JSON."""
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if as_json:
        click.echo(content)
    else:
        Console().print(shown(report))
    return content


@bench_command.command("step")
@_case_flag
@click.option("--steps", type=click.IntRange(min=1), default=5, help="Steps in each process.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Processes of each side, in turn.")
@_json_flag
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")
def step_command(names: tuple[str, ...], steps: int, rounds: int, as_json: bool, out: Path | None) -> None:
    """Compare a training step on onnxruntime with the same step in torch and timm."""
    from bench.step import run_step_bench, step_report

    cases = choose(names)
    with choose_display() as display:
        report = run_step_bench(cases, steps=steps, rounds=rounds, progress=display.line)
    content = _print(report, step_report, as_json)
    if out:
        atomic_write(out, content + b"\n")


@bench_command.command("graph")
@_case_flag
@click.option("--graph", default="train", help="Which of the case's graphs.")
@click.option("--runs", type=click.IntRange(min=1), default=3, help="Runs that are counted; one before is not.")
@_json_flag
def graph_command(names: tuple[str, ...], graph: str, runs: int, as_json: bool) -> None:
    """Show where the time of a graph goes, operator by operator, by onnxruntime's own profile."""
    from bench.graph import graph_report, run_graph_bench

    cases = choose(names)
    with choose_display() as display:
        report = run_graph_bench(cases, graph, runs=runs, progress=display.line)
    _print(report, graph_report, as_json)


@bench_command.command("cap")
@click.option("--limit-mb", type=click.IntRange(min=1), default=512, help="Memory of the device, in 10^6 bytes.")
@click.option("--model", default="vit_base_patch16_224", help="timm Vision Transformer of 224 pixels.")
@click.option("--batch", type=click.IntRange(min=1), default=8, help="Batch size.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=2, help="Images at a time.")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", help="Of weights that nobody trains."
)
@click.option("--images", type=click.IntRange(min=4), default=24, help="Images of the device, made up.")
@click.option(
    "--patience", type=click.FloatRange(min=1), default=1800.0, help="Seconds after which it counts as failed."
)
@_json_flag
def cap_command(
    limit_mb: int, model: str, batch: int, micro_batch: int, precision: str, images: int, patience: float, as_json: bool
) -> None:
    """Run a round of EFTViT with a real device under a hard limit on its memory."""
    from bench.cap import CapSettings, cap_table, run_cap

    settings = CapSettings(
        limit_bytes=limit_mb * 10**6,
        model=model,
        batch_size=batch,
        micro_batch=micro_batch,
        precision=precision,
        images=images,
        patience_s=patience,
    )
    with choose_display() as display:
        report = run_cap(settings, display.line)
    _print(report, cap_table, as_json)


@bench_command.command("idle")
@click.option("--starts", type=click.IntRange(min=1), default=3, help="Devices that are started, one after the other.")
@_json_flag
def idle_command(starts: int, as_json: bool) -> None:
    """Measure a device that waits for a run: memory, and seconds until it is connected."""
    from bench.idle import idle_table, run_idle

    with choose_display() as display:
        report = run_idle(starts=starts, progress=display.line)
    _print(report, idle_table, as_json)


@bench_command.command("control")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, help="How long answers are measured at most.")
@_json_flag
def control_command(seconds: float, as_json: bool) -> None:
    """Measure a coordinator that waits, and how soon it answers while its worker process computes."""
    from bench.control import control_table, run_control

    with choose_display() as display:
        report = run_control(seconds=seconds, progress=display.line)
    _print(report, control_table, as_json)


@bench_command.command("profile")
@_case_flag
@_json_flag
def profile_command(names: tuple[str, ...], as_json: bool) -> None:
    """Compare what is predicted of a Program with what a real device needs for it."""
    from bench.profile import profile_table, run_profile_bench

    cases = choose(names)
    with choose_display() as display:
        report = run_profile_bench(cases, display.line)
    _print(report, profile_table, as_json)


@bench_command.command("budget")
@_case_flag
@click.option(
    "--memory-budget",
    "budgets",
    multiple=True,
    default=("256MB", "512MB", "1GB"),
    metavar="BYTES",
    help="Budget of the device. Repeatable.",
)
@_json_flag
def budget_command(names: tuple[str, ...], budgets: tuple[str, ...], as_json: bool) -> None:
    """Plan Programs for memory budgets, and see whether a real device keeps them."""
    from bench.budget import budget_table, run_budget_bench
    from fedvit.quantities import parse_bytes

    cases = choose(names)
    with choose_display() as display:
        report = run_budget_bench(cases, [parse_bytes(text) for text in budgets], display.line)
    _print(report, budget_table, as_json)


@bench_command.command("rounds")
@click.option("--devices", type=click.IntRange(min=1), default=500, help="Virtual devices.")
@click.option("--rounds", type=click.IntRange(min=2), default=20, help="Rounds of training; the first is set apart.")
@click.option("--hosts", type=click.IntRange(min=1), help="Processes of virtual devices; by default one per core.")
@click.option(
    "--cohort",
    "cohorts",
    type=click.IntRange(min=0),
    multiple=True,
    default=(4, 64),
    help="Devices that send a large upload each in one round, to see the coordinator's memory. Repeatable; 0: none.",
)
@click.option("--broker", type=click.Choice(["auto", "mosquitto", "embedded"]), default="auto", help="Which broker.")
@_json_flag
def rounds_command(
    devices: int, rounds: int, hosts: int | None, cohorts: tuple[int, ...], broker: str, as_json: bool
) -> None:
    """Measure what rounds with many devices cost beside compute, and whether the coordinator grows."""
    from bench.rounds import rounds_table, run_rounds_bench

    with choose_display() as display:
        report = run_rounds_bench(
            devices=devices,
            rounds=rounds,
            hosts=hosts,
            cohorts=[cohort for cohort in cohorts if cohort],
            broker=broker,
            progress=display.line,
        )
    _print(report, rounds_table, as_json)


@bench_command.command("server")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("vit_base_patch16_224", "vit_small_images"),
    metavar="NAME",
    help="Vision Transformer whose features they are. Repeatable.",
)
@click.option("--devices", type=click.IntRange(min=1), default=100, help="Devices that uploaded features.")
@click.option("--images", type=click.IntRange(min=1), default=500, help="Images of each.")
@click.option("--local-blocks", type=click.IntRange(min=1), default=2, help="Blocks that are not the server's.")
@click.option("--batch", type=click.IntRange(min=1), default=32, help="Batch size.")
@click.option("--steps", type=click.IntRange(min=1), help="Measure at most so many steps; by default one pass.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, help="Measure no longer.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="Processes of each side, in turn.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch; by default as many as it takes.")
@click.option("--accelerator", default="cpu", metavar="DEVICE", help="Torch device that trains: cpu, cuda, cuda:1.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16"]), default="fp32", help="Of products in training."
)
@click.option("--files-only", is_flag=True, help="Leave out the side that holds all features in memory.")
@_json_flag
def server_command(
    models: tuple[str, ...],
    devices: int,
    images: int,
    local_blocks: int,
    batch: int,
    steps: int | None,
    seconds: float,
    rounds: int,
    threads: int | None,
    accelerator: str,
    precision: str,
    files_only: bool,
    as_json: bool,
) -> None:
    """Compare the server's training on features in files with all of them in memory: speed and peak of memory."""
    from bench.server import ServerSettings, run_server_bench, server_table
    from coordinator.compute.accelerator import choose_accelerator, torch_devices
    from fedvit.precision import ProductPrecision

    if len(torch_devices(choose_accelerator(accelerator))) > 1:
        raise ConfigError(f"--accelerator {accelerator}: one process is measured, on one torch device")
    settings = ServerSettings(
        devices=devices,
        images=images,
        local_blocks=local_blocks,
        batch_size=batch,
        steps=steps,
        seconds=seconds,
        rounds=rounds,
        threads=threads,
        accelerator=torch_devices(choose_accelerator(accelerator))[0],
        precision=msgspec.convert(precision, ProductPrecision),
        in_memory=not files_only,
    )
    with choose_display() as display:
        report = run_server_bench(models, settings, display.line)
    _print(report, server_table, as_json)


@bench_command.command("wire")
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    type=click.Choice(["mosquitto", "embedded"]),
    default=("mosquitto", "embedded"),
    help="Only this broker. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Times that each way is measured, in turn.")
@_json_flag
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")
def wire_command(brokers: tuple[str, ...], rounds: int, as_json: bool, out: Path | None) -> None:
    """Compare how blobs move with plain TCP, gRPC, and one message per model over the same broker."""
    from bench.wire import run_wire_bench, wire_table

    with choose_display() as display:
        report = run_wire_bench(brokers, rounds=rounds, progress=display.line)
    content = _print(report, wire_table, as_json)
    if out:
        atomic_write(out, content + b"\n")


@bench_command.command("bytes")
@_case_flag
@_json_flag
def bytes_command(names: tuple[str, ...], as_json: bool) -> None:
    """Count what a round moves with each codec of updates: state, references and uploads, really made."""
    from bench.moved import bytes_table, run_bytes_bench

    cases = choose(names or ("fedperfix-vits", "eftvit-vitb"))
    with choose_display() as display:
        rows = run_bytes_bench(cases, display.line)
    _print(rows, bytes_table, as_json)


@bench_command.command("attack")
@click.option("--attack", "attacks", multiple=True, metavar="NAME", help="Only this one, as in the table. Repeatable.")
@click.option(
    "--protection",
    "protections",
    multiple=True,
    default=("mean", "recommended"),
    metavar="NAME",
    help="With this: mean, recommended, bounded mean, median, trimmed mean, krum, geometric median. Repeatable.",
)
@click.option("--devices", type=click.IntRange(min=2), default=10, help="Devices, the malicious ones among them.")
@click.option("--malicious", type=click.IntRange(min=1), default=3, help="Devices that attack.")
@click.option("--rounds", type=click.IntRange(min=1), default=8, help="Rounds of each run.")
@click.option(
    "--alpha", type=click.FloatRange(min=0, min_open=True), help="Skewed data: Dirichlet(ALPHA) over classes."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the deal and of the runs.")
@_json_flag
def attack_command(
    attacks: tuple[str, ...],
    protections: tuple[str, ...],
    devices: int,
    malicious: int,
    rounds: int,
    alpha: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Show what malicious devices do to a run, with plain averaging and with the recommended protection."""
    from bench.attack import ATTACKS, AttackSettings, attack_table, protections_of, run_attacks

    settings = AttackSettings(
        devices=devices,
        malicious=malicious,
        rounds=rounds,
        partition="iid" if alpha is None else "dirichlet",
        partition_options={} if alpha is None else {"alpha": alpha},
        seed=seed,
        attacks=attacks or tuple(ATTACKS),
        protections=protections_of(protections),
    )
    with choose_display() as display:
        report = run_attacks(settings, display.line)
    _print(report, attack_table, as_json)


@bench_command.command("privacy")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Also draw what was rebuilt: FILE.png."
)
@_json_flag
def privacy_command(picture: Path | None, as_json: bool) -> None:
    """Rebuild images from the features that EFTViT uploads, by mask ratio and noise."""
    from bench.privacy import PrivacySettings, privacy_table, run_privacy

    with choose_display() as display:
        report = run_privacy(PrivacySettings(), picture, display.line)
    _print(report, privacy_table, as_json)


@bench_command.command("store")
@click.option("--rounds", type=click.IntRange(min=1), default=10_000, help="Rounds that the record holds.")
@click.option("--devices", type=click.IntRange(min=1), default=100, help="Devices of each round.")
@_json_flag
def store_command(rounds: int, devices: int, as_json: bool) -> None:
    """Measure the record of a long run: one more round, a resume, `coordinator runs` and `show`."""
    from bench.store import run_store_bench, store_table

    with choose_display() as display:
        report = run_store_bench(rounds=rounds, devices=devices, progress=display.line)
    _print(report, store_table, as_json)
