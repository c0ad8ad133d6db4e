"""`python -m bench fuzz`: throw damaged messages and graphs at both programs, and see whether they bear it."""

import logging
import sys

import click
import msgspec
from rich.console import Console

from bench.fuzz.report import tables
from coordinator.run.display import choose_display
from fedvit.logs import configure_logging


@click.command("fuzz")
@click.option("--messages", type=click.IntRange(min=8), default=20_000, help="Damaged messages in all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="The same seed gives the same damage.")
@click.option(
    "--broker",
    "what",
    flag_value="broker",
    help="Send them over a real broker to a coordinator and an edge-client that are processes of their own.",
)
@click.option(
    "--graphs",
    "what",
    flag_value="graphs",
    help="Graphs in place of messages: what a device accepts must name no file to any of protobuf's own readers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fuzz_command(messages: int, seed: int, what: str | None, as_json: bool) -> None:
    """Throw damaged and hostile messages at both programs; fails when one of them does not bear it."""
    configure_logging(level=logging.CRITICAL)  # every refusal is a line of the log
    if what == "broker":
        from bench.fuzz.over_broker import fuzz_over_broker as fuzz
    elif what == "graphs":
        from bench.fuzz.graphs import fuzz_graphs as fuzz
    else:
        from bench.fuzz.memory import fuzz_in_memory as fuzz

    with choose_display(quiet=as_json) as display:
        report = fuzz(messages, seed, display.line)
    if as_json:
        content = {"messages": report.messages, "findings": report.findings, **msgspec.to_builtins(report)}
        click.echo(msgspec.json.format(msgspec.json.encode(content)).decode())
    else:
        console = Console()
        for table in tables(report):
            console.print(table)
        for finding in report.findings:
            console.print(f"FINDING {finding}", markup=False)
    sys.exit(1 if report.findings else 0)
