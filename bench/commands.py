"""The benchmarks of `python -m bench`: costs of devices and of a coordinator on this machine."""

from pathlib import Path
from typing import Any

import click

from bench.analytic import AnalyticSettings, run_analytic_bench
from bench.api import run_api_bench
from bench.cap import CapSettings, run_cap
from bench.cases import CASES, choose
from bench.failover import KINDS, FailoverSettings, is_intact, run_failover
from bench.isa import ISAS
from bench.profile import run_profile_bench
from bench.reporting import measure
from bench.rounds import run_rounds_bench
from bench.secure import run_secure_bench
from bench.server import ServerSettings, run_server_bench
from bench.step import StepSettings, run_step_bench
from bench.store import run_store_bench
from bench.traffic import run_bytes_bench
from bench.wire import run_wire_bench
from coordinator.compute.accelerator import choose_accelerator, torch_devices
from fedvit.errors import ConfigError, FedvitError

_NAMES = ", ".join(case.name for case in CASES)

_case_flag = click.option(
    "--case", "names", multiple=True, metavar="NAME", help=f"Only this case. Repeatable. Known: {_NAMES}."
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
out_flag = click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")


@click.group("bench", context_settings={"show_default": True})
def bench_command() -> None:
    """Measure what devices and coordinator cost on this machine."""


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
@click.option("--isa", type=click.Choice(ISAS), help="Hide newer instructions of this processor from all sides.")
@json_flag
@out_flag
def step_command(names: tuple[str, ...], compute: str | None, as_json: bool, out: Path | None, **flags: Any) -> None:
    """Compare a training step on onnxruntime with the same step in torch and timm."""
    cases = [case.with_options(compute=compute) if compute else case for case in choose(names)]
    settings = StepSettings(**flags)
    measure(lambda log: run_step_bench(cases, settings, progress=log), as_json, out)


@bench_command.command("analytic")
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True), required=True, help="Data set of images, as cifar10.zip."
)
@click.option(
    "--weights", type=click.Path(path_type=Path, exists=True), required=True, help="Checkpoint of the pretrained model."
)
@click.option("--model", default="deit_tiny_patch16_224", help="Model of the weights.")
@click.option("--image-size", type=click.IntRange(min=1), default=96, help="Side of the images in pixels.")
@click.option("--images", type=click.IntRange(min=1), default=1000, help="Images of all devices together.")
@click.option("--devices", type=click.IntRange(min=1), default=20, help="Devices.")
@click.option("--classes-per-device", type=click.IntRange(min=1), default=2, help="Not of a data set with domains.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, help="Repetitions with other images.")
@click.option("--trained", type=click.IntRange(min=0), default=5, help="Seeds with methods that train it; 0: no fleet.")
@click.option("--keep", type=click.Path(path_type=Path), help="File of figures, from which a stopped bench goes on.")
@json_flag
@out_flag
def analytic_command(as_json: bool, out: Path | None, keep: Path | None, **flags: Any) -> None:
    """Compare the head of one round of sums with the central regression, and with methods of gradients."""
    settings = AnalyticSettings(**flags)
    measure(lambda log: run_analytic_bench(settings, log, keep), as_json, out)


@bench_command.command("cap")
@click.option("--limit-mb", type=click.IntRange(min=1), default=512, help="Memory of the device, in 10^6 bytes.")
@click.option("--model", default="vit_base_patch16_224", help="timm Vision Transformer of 224 pixels.")
@click.option("--batch", "batch_size", type=click.IntRange(min=1), default=8, help="Batch size.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=2, help="Images at a time.")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", help="Of weights that are not trained."
)
@click.option(
    "--optimizer-bits", type=click.Choice([8, 32]), default=32, help="Of each number that the optimizer remembers."
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
    chosen = CapSettings(limit_bytes=limit_mb * 10**6, **settings)
    measure(lambda log: run_cap(chosen, log), as_json)


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
def failover_command(kinds: tuple[Any, ...], as_json: bool, out: Path | None, **flags: Any) -> None:
    """Kill, stop or cut off the leader of several services again and again, and measure takeovers.

    Exits with code 1 unless every run has the tensors of a calm one, and no result was lost or counted twice.
    """
    settings = FailoverSettings(kinds=kinds or KINDS, **flags)
    if not is_intact(measure(lambda log: run_failover(settings, log), as_json, out)):
        raise FedvitError("FV0001", "the runs are not those of a single service; see the report")


@bench_command.command("profile")
@_case_flag
@json_flag
def profile_command(names: tuple[str, ...], as_json: bool) -> None:
    """Compare the predicted cost of a Program with its cost on a real device."""
    cases = choose(names)
    measure(lambda log: run_profile_bench(cases, log), as_json)


@bench_command.command("secure")
@click.option("--devices", type=click.IntRange(min=3), default=100, help="Virtual devices of both runs.")
@click.option("--rounds", type=click.IntRange(min=4), default=6, help="Rounds of both runs.")
@click.option("--schedules", type=click.IntRange(min=0), default=500, help="Sums in memory with devices that drop out.")
@json_flag
def secure_command(as_json: bool, **settings: int) -> None:
    """Measure secure sums: bytes and time beside a plain run, masks of a large update, and drawn sums."""
    measure(lambda log: run_secure_bench(progress=log, **settings), as_json)


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
@json_flag
def rounds_command(cohorts: tuple[int, ...], as_json: bool, **settings: Any) -> None:
    """Measure the overhead of rounds with many devices, and the growth of the coordinator's memory."""
    large = [cohort for cohort in cohorts if cohort]
    measure(lambda log: run_rounds_bench(cohorts=large, progress=log, **settings), as_json)


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
    chosen = torch_devices(choose_accelerator(accelerator))
    if len(chosen) > 1:
        raise ConfigError("FV0002", f"--accelerator {accelerator}: one process is measured, on one torch device")
    options = ServerSettings(accelerator=chosen[0], in_memory=not files_only, **settings)
    measure(lambda log: run_server_bench(models, options, log), as_json)


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
    measure(lambda log: run_wire_bench(brokers, rounds=rounds, progress=log), as_json, out)


@bench_command.command("bytes")
@_case_flag
@json_flag
def bytes_command(names: tuple[str, ...], as_json: bool) -> None:
    """Count the bytes of a round with each codec of updates: states, references and uploads are really written."""
    cases = choose(names or ("fedperfix-vits", "eftvit-vitb"))
    measure(lambda log: run_bytes_bench(cases, log), as_json)


@bench_command.command("api")
@click.option("--runs", type=click.IntRange(min=1), default=500, help="Runs in the record.")
@click.option("--rate", type=click.IntRange(min=1), default=200, help="Requests per second.")
@click.option("--seconds", type=click.IntRange(min=1), default=20, help="Time of each measurement.")
@json_flag
def api_command(runs: int, rate: int, seconds: int, as_json: bool) -> None:
    """Measure the latency of the HTTP API's list of runs, and the processor time of commands."""
    measure(lambda log: run_api_bench(runs=runs, rate=rate, seconds=seconds, progress=log), as_json)


@bench_command.command("store")
@click.option("--rounds", type=click.IntRange(min=1), default=10_000, help="Rounds that the record holds.")
@click.option("--devices", type=click.IntRange(min=1), default=100, help="Devices of each round.")
@json_flag
def store_command(rounds: int, devices: int, as_json: bool) -> None:
    """Measure the record of a long run: one more round, a resume, `coordinator runs` and `show`."""
    measure(lambda log: run_store_bench(rounds=rounds, devices=devices, progress=log), as_json)
