"""`python -m bench fuzz`: send damaged messages and graphs to both programs, and check that they refuse them."""

import logging
import sys

import click
import msgspec

from bench.fuzz.report import tables
from coordinator.rounds.display import choose_display
from fedvit.logs import configure_logging
from profiles.report.console import Console


@click.command("fuzz")
@click.option("--messages", type=click.IntRange(min=8), default=20_000, help="Number of damaged messages.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="The same seed gives the same damage.")
@click.option(
    "--broker",
    "what",
    flag_value="broker",
    help="Send them over a real broker to a coordinator and an edge-client in their own processes.",
)
@click.option(
    "--graphs",
    "what",
    flag_value="graphs",
    help="Graphs instead of messages: no reader of protobuf may find the name of a file in an accepted graph.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fuzz_command(messages: int, seed: int, what: str | None, as_json: bool) -> None:
    """Send damaged and hostile messages to both programs; fails when one of them crashes, hangs or accepts too much."""
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
