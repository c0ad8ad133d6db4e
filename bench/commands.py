"""The benchmarks of `python -m bench`: costs of devices and of a coordinator on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from rich.console import RenderableType

from bench.cases import CASES, choose
from coordinator.rounds.display import choose_display
from fedvit.errors import ConfigError, FedvitError
from fedvit.files import atomic_write
from profiles.report.console import Console

_NAMES = ", ".join(case.name for case in CASES)

_case_flag = click.option(
    "--case", "names", multiple=True, metavar="NAME", help=f"Only this case. Repeatable. Known: {_NAMES}."
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
out_flag = click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")


@click.group("bench", context_settings={"show_default": True})
def bench_command() -> None:
    """Measure what devices and coordinator cost on this machine, and test their robustness and security."""


def measure(
    run: Callable[[Callable[[str], None]], Any],
    table: Callable[[Any], RenderableType],
    as_json: bool,
    out: Path | None = None,
) -> Any:
    """Call `run` with a function that prints progress; print its report, and write it to `out` as JSON. Returns it."""
    with choose_display() as display:
        report = run(display.line)
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if as_json:
        click.echo(content)
    else:
        Console().print(table(report))
    if out:
        atomic_write(out, content + b"\n")
    return report


@bench_command.command("step")
@_case_flag
@click.option("--steps", type=click.IntRange(min=1), default=5, help="Steps in each process.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="Processes of each side, in turn.")
@click.option(
    "--compute",
    type=click.Choice(["fp32", "fp16", "int8"]),
    help="Products with weights. By default as the case has it.",
)
@click.option("--kernels", is_flag=True, help="Measure onnxruntime with the optional kernels, too.")
@json_flag
@out_flag
def step_command(
    names: tuple[str, ...], steps: int, rounds: int, compute: str | None, kernels: bool, as_json: bool, out: Path | None
) -> None:
    """Compare a training step on onnxruntime with the same step in torch and timm."""
    from bench.step import run_step_bench, step_report

    cases = [case.with_options(compute=compute) if compute else case for case in choose(names)]
    measure(
        lambda log: run_step_bench(cases, steps=steps, rounds=rounds, kernels=kernels, progress=log),
        step_report,
        as_json,
        out,
    )


@bench_command.command("graph")
@_case_flag
@click.option("--graph", default="train", help="Name of one of the case's graphs.")
@click.option("--runs", type=click.IntRange(min=1), default=3, help="Runs that are counted, after one that is not.")
@json_flag
def graph_command(names: tuple[str, ...], graph: str, runs: int, as_json: bool) -> None:
    """Show the time of each operator of a graph, by onnxruntime's own profile."""
    from bench.graph import graph_report, run_graph_bench

    cases = choose(names)
    measure(lambda log: run_graph_bench(cases, graph, runs=runs, progress=log), graph_report, as_json)


@bench_command.command("cap")
@click.option("--limit-mb", type=click.IntRange(min=1), default=512, help="Memory of the device, in 10^6 bytes.")
@click.option("--model", default="vit_base_patch16_224", help="timm Vision Transformer of 224 pixels.")
@click.option("--batch", "batch_size", type=click.IntRange(min=1), default=8, help="Batch size.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=2, help="Images at a time.")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", help="Of weights that are not trained."
)
@click.option("--images", type=click.IntRange(min=4), default=24, help="Images of the device, noise.")
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=1),
    default=1800.0,
    help="Seconds after which the run counts as failed.",
)
@json_flag
def cap_command(limit_mb: int, as_json: bool, **settings: Any) -> None:
    """Run a round of EFTViT with a real device under a hard limit on its memory."""
    from bench.cap import CapSettings, cap_table, run_cap

    chosen = CapSettings(limit_bytes=limit_mb * 10**6, **settings)
    measure(lambda log: run_cap(chosen, log), cap_table, as_json)


@bench_command.command("scrape")
@click.option("--devices", type=click.IntRange(min=1), default=500, help="Devices of the run.")
@click.option("--scrapes", type=click.IntRange(min=1), default=50, help="Scrapes that are measured.")
@json_flag
def scrape_command(devices: int, scrapes: int, as_json: bool) -> None:
    """Measure a scrape of a coordinator's metrics over HTTP, without a run in progress."""
    from bench.scrape import run_scrape, scrape_table

    measure(lambda log: run_scrape(devices=devices, scrapes=scrapes, progress=log), scrape_table, as_json)


@bench_command.command("idle")
@click.option("--starts", type=click.IntRange(min=1), default=3, help="Devices that are started, one after the other.")
@json_flag
def idle_command(starts: int, as_json: bool) -> None:
    """Measure a device that waits for a run: memory, and seconds until it is connected."""
    from bench.idle import idle_table, run_idle

    measure(lambda log: run_idle(starts=starts, progress=log), idle_table, as_json)


@bench_command.command("failover")
@click.option("--faults", type=click.IntRange(min=1), default=20, help="Faults of the leader, one after the other.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Kinds and times of faults follow from it.")
@click.option("--standbys", type=click.IntRange(min=1), default=2, help="Services that stand by.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, help="Rounds of each run.")
@click.option(
    "--fault",
    "kinds",
    multiple=True,
    type=click.Choice(["kill", "stop", "cut", "silence"]),
    help="Only this kind. Repeatable.",
)
@json_flag
@out_flag
def failover_command(
    faults: int, seed: int, standbys: int, rounds: int, kinds: tuple[Any, ...], as_json: bool, out: Path | None
) -> None:
    """Kill, stop or cut off the leader of several services again and again, and measure takeovers.

    Exits with code 1 unless every run has the tensors of a calm one, and no result was lost or counted twice.
    """
    from bench.failover import KINDS, FailoverReport, failover_table, run_failover

    def run(log: Callable[[str], None]) -> FailoverReport:
        settings = {"faults": faults, "seed": seed, "standbys": standbys, "rounds": rounds}
        return run_failover(**settings, kinds=kinds or KINDS, progress=log)

    report: FailoverReport = measure(run, failover_table, as_json, out)
    if not report.ok:
        raise FedvitError("the runs are not those of a single service; see the report")


@bench_command.command("control")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, help="Longest time to measure answers.")
@json_flag
def control_command(seconds: float, as_json: bool) -> None:
    """Measure a waiting coordinator, and its response times while its worker process computes."""
    from bench.control import control_table, run_control

    measure(lambda log: run_control(seconds=seconds, progress=log), control_table, as_json)


@bench_command.command("profile")
@_case_flag
@json_flag
def profile_command(names: tuple[str, ...], as_json: bool) -> None:
    """Compare the predicted cost of a Program with its cost on a real device."""
    from bench.profile import profile_table, run_profile_bench

    cases = choose(names)
    measure(lambda log: run_profile_bench(cases, log), profile_table, as_json)


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
@json_flag
def budget_command(names: tuple[str, ...], budgets: tuple[str, ...], as_json: bool) -> None:
    """Plan Programs for memory budgets, and check whether a real device keeps them."""
    from bench.budget import budget_table, run_budget_bench
    from fedvit.quantities import parse_bytes

    cases, sizes = choose(names), [parse_bytes(text) for text in budgets]
    measure(lambda log: run_budget_bench(cases, sizes, log), budget_table, as_json)


@bench_command.command("rounds")
@click.option("--devices", type=click.IntRange(min=1), default=500, help="Virtual devices.")
@click.option("--rounds", type=click.IntRange(min=2), default=20, help="Rounds; the first is reported separately.")
@click.option("--hosts", type=click.IntRange(min=1), help="Processes of virtual devices; by default one per core.")
@click.option(
    "--cohort",
    "cohorts",
    type=click.IntRange(min=0),
    multiple=True,
    default=(4, 64),
    help="Devices of a round with large uploads, for the coordinator's memory. Repeatable; 0: none.",
)
@click.option("--broker", type=click.Choice(["auto", "mosquitto", "embedded"]), default="auto", help="Which broker.")
@click.option(
    "--watched",
    is_flag=True,
    help="Every second pair of rounds with a page of the dashboard in a browser, and a scrape of metrics each second.",
)
@json_flag
def rounds_command(cohorts: tuple[int, ...], as_json: bool, **settings: Any) -> None:
    """Measure the overhead of rounds with many devices, and the growth of the coordinator's memory."""
    from bench.rounds import rounds_table, run_rounds_bench

    large = [cohort for cohort in cohorts if cohort]
    measure(lambda log: run_rounds_bench(cohorts=large, progress=log, **settings), rounds_table, as_json)


@bench_command.command("server")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("vit_base_patch16_224", "vit_small_images"),
    metavar="NAME",
    help="Vision Transformer that the features are of. Repeatable.",
)
@click.option("--devices", type=click.IntRange(min=1), default=100, help="Devices that uploaded features.")
@click.option("--images", type=click.IntRange(min=1), default=500, help="Images of each device.")
@click.option("--local-blocks", type=click.IntRange(min=1), default=2, help="Blocks that devices compute.")
@click.option("--batch", "batch_size", type=click.IntRange(min=1), default=32, help="Batch size.")
@click.option("--steps", type=click.IntRange(min=1), help="Most steps to measure; by default one pass.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, help="Longest time to measure.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, help="Processes of each side, in turn.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch; by default torch's own choice.")
@click.option("--accelerator", default="cpu", metavar="DEVICE", help="Torch device that trains: cpu, cuda, cuda:1.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16"]), default="fp32", help="Of products in training."
)
@click.option("--files-only", is_flag=True, help="Leave out the side that holds all features in memory.")
@json_flag
def server_command(models: tuple[str, ...], accelerator: str, files_only: bool, as_json: bool, **settings: Any) -> None:
    """Compare the server's training on features in files with all of them in memory: speed and peak memory."""
    from bench.server import ServerSettings, run_server_bench, server_table
    from coordinator.compute.accelerator import choose_accelerator, torch_devices

    chosen = torch_devices(choose_accelerator(accelerator))
    if len(chosen) > 1:
        raise ConfigError(f"--accelerator {accelerator}: one process is measured, on one torch device")
    options = ServerSettings(accelerator=chosen[0], in_memory=not files_only, **settings)
    measure(lambda log: run_server_bench(models, options, log), server_table, as_json)


@bench_command.command("wire")
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    type=click.Choice(["mosquitto", "embedded"]),
    default=("mosquitto", "embedded"),
    help="Only this broker. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Measurements of each transport, in turn.")
@json_flag
@out_flag
def wire_command(brokers: tuple[str, ...], rounds: int, as_json: bool, out: Path | None) -> None:
    """Compare the transfer of blobs with plain TCP, gRPC, and one message per model over the same broker; and through
    an S3 server with a plain GET."""
    from bench.wire import run_wire_bench, wire_table

    measure(lambda log: run_wire_bench(brokers, rounds=rounds, progress=log), wire_table, as_json, out)


@bench_command.command("bytes")
@_case_flag
@json_flag
def bytes_command(names: tuple[str, ...], as_json: bool) -> None:
    """Count the bytes of a round with each codec of updates: states, references and uploads are really written."""
    from bench.traffic import bytes_table, run_bytes_bench

    cases = choose(names or ("fedperfix-vits", "eftvit-vitb"))
    measure(lambda log: run_bytes_bench(cases, log), bytes_table, as_json)


@bench_command.command("attack")
@click.option("--attack", "attacks", multiple=True, metavar="NAME", help="Only this one, as in the table. Repeatable.")
@click.option(
    "--protection",
    "aggregations",
    multiple=True,
    default=("mean", "recommended"),
    metavar="NAME",
    help="With this robust aggregation: mean, recommended, bounded mean, median, trimmed mean, krum, geometric median. "
    "Repeatable.",
)
@click.option("--devices", type=click.IntRange(min=2), default=10, help="Devices, the malicious ones among them.")
@click.option("--malicious", type=click.IntRange(min=1), default=3, help="Devices that attack.")
@click.option("--rounds", type=click.IntRange(min=1), default=8, help="Rounds of each run.")
@click.option(
    "--alpha", type=click.FloatRange(min=0, min_open=True), help="Skewed data: Dirichlet(ALPHA) over classes."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the partition and of the runs.")
@json_flag
def attack_command(
    attacks: tuple[str, ...], aggregations: tuple[str, ...], alpha: float | None, as_json: bool, **settings: Any
) -> None:
    """Show what malicious devices do to a run, with plain averaging and with the recommended robust aggregation."""
    from bench.attack import ATTACKS, AttackSettings, aggregations_of, attack_table, run_attacks

    chosen = AttackSettings(
        partition="iid" if alpha is None else "dirichlet",
        partition_options={} if alpha is None else {"alpha": alpha},
        attacks=attacks or tuple(ATTACKS),
        aggregations=aggregations_of(aggregations),
        **settings,
    )
    measure(lambda log: run_attacks(chosen, log), attack_table, as_json)


@bench_command.command("privacy")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the rebuilt images: FILE.png."
)
@json_flag
def privacy_command(picture: Path | None, as_json: bool) -> None:
    """Rebuild images from the features that EFTViT uploads, by mask ratio and noise."""
    from bench.privacy import PrivacySettings, privacy_table, run_privacy

    measure(lambda log: run_privacy(PrivacySettings(), picture, log), privacy_table, as_json)


@bench_command.command("store")
@click.option("--rounds", type=click.IntRange(min=1), default=10_000, help="Rounds that the record holds.")
@click.option("--devices", type=click.IntRange(min=1), default=100, help="Devices of each round.")
@json_flag
def store_command(rounds: int, devices: int, as_json: bool) -> None:
    """Measure the record of a long run: one more round, a resume, `coordinator runs` and `show`."""
    from bench.store import run_store_bench, store_table

    measure(lambda log: run_store_bench(rounds=rounds, devices=devices, progress=log), store_table, as_json)


@bench_command.command("pool")
@click.option("--devices", type=click.IntRange(min=2), default=10_000, help="Devices in the pool.")
@click.option("--cohort", type=click.IntRange(min=1), default=200, help="Devices asked per round.")
@click.option("--rounds", type=click.IntRange(min=2), default=6, help="The first is not counted.")
@click.option("--engine", type=click.Choice(["onnx", "torch"]), default="torch", help="What computes devices' parts.")
@json_flag
def pool_command(devices: int, cohort: int, rounds: int, engine: Literal["onnx", "torch"], as_json: bool) -> None:
    """Measure what devices cost a simulation that are in its pool and not in a round."""
    from bench.pool import pool_report, run_pool_bench

    if devices <= cohort:
        raise ConfigError(f"--devices {devices}: expected more than --cohort {cohort}")
    measure(
        lambda log: run_pool_bench(devices=devices, cohort=cohort, rounds=rounds, engine=engine, progress=log),
        pool_report,
        as_json,
    )
