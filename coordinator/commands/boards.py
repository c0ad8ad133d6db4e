"""`coordinator boards`: lists boards and their data."""

import click

from coordinator.compute.planning.boards import board_page, boards_table, entries, entry
from fedvit.command_line import Command, json_flag, print_json
from profiles.catalogue import in_mode
from profiles.report.console import Console


@click.command(cls=Command, examples=["coordinator boards", "coordinator boards jetson-orin-nano-8"])
@click.argument("id", required=False, metavar="[ID[@MODE]]")
@json_flag
def boards(id: str | None, as_json: bool) -> None:
    """List the boards that costs can be predicted for; or show all data of the board ID, with sources."""

    board = in_mode(id)[0] if id else None
    if as_json:
        data = entry(board) if board else entries()
        print_json(data)
        return
    console = Console()
    console.print(board_page(board) if board else boards_table(console.width))
