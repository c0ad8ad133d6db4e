"""`fleet bench`: what a device's part costs on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType

from coordinator.display import choose_display
from fedvit.files import atomic_write
from fleet.bench.cases import CASES, choose

_NAMES = ", ".join(case.name for case in CASES)


@click.group("bench")
def bench_command() -> None:
    """Measure what a device's part costs on this machine."""


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
    from fleet.bench.step import run_step_bench, step_report

    cases = choose(names)
    with choose_display() as display:
        report = run_step_bench(cases, steps=steps, rounds=rounds, progress=display.line)
    content = _print(report, step_report, as_json)
    if out:
        atomic_write(out, content + b"\n")
