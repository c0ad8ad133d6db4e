"""`coordinator token`: tokens of the HTTP API."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.access import add_token, remove_token
from coordinator.security.api_tokens import LONGEST_DAYS, ROLES, ApiTokens, UserRole
from fedvit.command_line import Command, Group, json_flag, print_json
from fedvit.files import private_files
from profiles.report.console import Console
from profiles.report.tables import Column, Sheet, columns


@click.group(cls=Group, examples=["coordinator token new ci --role operator --days 90", "coordinator token list"])
def token() -> None:
    """Manage tokens of the HTTP API: make, list and remove them."""


@token.command(cls=Command, examples=["coordinator token new ci --role operator --days 90 > ci.token"])
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", help="Rights of the token.")
@click.option("--days", type=click.FloatRange(0, LONGEST_DAYS, min_open=True), help="Days of validity; by default any.")
@runs_flag
@json_flag
@private_files()
def new(name: str, role: UserRole, days: float | None, folder: Path, as_json: bool) -> None:
    """Make a token called NAME, and print it: only its digest is stored."""
    text = add_token(folder, name, role, days)
    click.echo(msgspec.json.encode({"name": name, "role": role, "token": text}).decode() if as_json else text)


@token.command("list", cls=Command, examples=["coordinator token list --json"])
@runs_flag
@json_flag
def list_tokens(folder: Path, as_json: bool) -> None:
    """List the tokens by name, without their texts."""
    tokens = ApiTokens(folder).list_all()
    if as_json:
        shown = [{key: value for key, value in msgspec.to_builtins(each).items() if key != "digest"} for each in tokens]
        print_json(shown)
        return
    console = Console()
    shown_columns = [
        *columns({"name": "token", "role": "role", "made_at": "made, UTC"}),
        Column(
            "expires_at", "valid until", lambda each: "expired" if each.is_expired() else each.expires_at or "any time"
        ),
    ]
    console.print(Sheet(tokens, shown_columns).draw(None, console.width) if tokens else f"no token in {folder}")


@token.command(cls=Command, examples=["coordinator token rm ci"])
@click.argument("name")
@runs_flag
def rm(name: str, folder: Path) -> None:
    """Remove the token NAME: requests with it are refused at once."""
    remove_token(folder, name)
    click.echo(f"token {name} is removed")
