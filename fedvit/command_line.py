"""The common style of all command lines: flags, `--help`, errors in one line, and exit codes."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import click
import msgspec

from fedvit.descriptors import raise_limit
from fedvit.errors import INTERRUPTED, ConfigError, FedvitError
from fedvit.files import storage_failed
from fedvit.logs import FORMAT_VARIABLE
from fedvit.terminal import guard_streams


class SectionOption(click.Option):
    """An option that `--help` shows under a heading, which is not always that of the command's own options."""

    OWN = "Options"

    def __init__(self, *arguments: Any, section: str = OWN, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


class Command(click.Command):
    """A command whose `--help` groups its options and ends with examples."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options first, then every section in the order in which it first appears."""
        sections: dict[str, list[tuple[str, str]]] = {SectionOption.OWN: []}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(option, "section", SectionOption.OWN), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Example" if len(self.examples) == 1 else "Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class Group(Command, click.Group):
    """A program, or a part of one, with commands."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        Command.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class LazyGroup(Group):
    """A program whose commands are imported when one of them is used, so that `--help` and usage errors are fast.

    `lazy` has the first sentence of each command's help. The command NAME is in the module NAME of `package`, or in
    the module that `elsewhere` names. Every program also has `explain`.
    """

    def __init__(
        self, *arguments: Any, package: str, lazy: Mapping[str, str], elsewhere: Mapping[str, str] = {}, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._package = package
        self._lazy = {**lazy, "explain": "Explain an error code: what happened, and what to do."}
        self._elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        if cmd_name == "explain":
            explain: click.Command = import_module("fedvit.explanations").make_command(self.examples[0].split()[0])
            return explain
        own = f"{self._package}.{cmd_name.replace('-', '_')}"
        module = import_module(self._elsewhere.get(cmd_name, own))
        commands = (entry for entry in vars(module).values() if isinstance(entry, click.Command))
        return next(command for command in commands if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        described = {name: click.Command(name, help=text) for name, text in self._lazy.items()}
        click.Group(commands=described).format_commands(ctx, formatter)


json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing else.")


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())


def _set_log_format(_: click.Context, __: click.Parameter, chosen: str) -> None:
    os.environ[FORMAT_VARIABLE] = chosen


LOG_FORMAT: dict[str, Any] = {
    "type": click.Choice(["text", "json"]),
    "default": "text",
    "envvar": FORMAT_VARIABLE,
    "callback": _set_log_format,
    "expose_value": False,
    "help": f"Format of log lines: text, or one JSON object per line. Or set {FORMAT_VARIABLE}.",
}
"""Settings of the option `--log-format`, which also holds for child processes."""
log_format_flag = click.option("--log-format", **LOG_FORMAT)


def amount(parse: Callable[[str], float]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """The callback of an option with a unit; `parse` is one of fedvit.quantities.

    Raises ConfigError naming the option.
    """

    def read(_: click.Context, option: click.Parameter, text: str | None) -> float | None:
        try:
            return None if text is None else parse(text)
        except ConfigError as error:
            raise ConfigError(error.code, f"{option.opts[0]}: {error}") from error

    return read


def run(command: click.Command, name: str) -> None:
    """Run a program's command line. Its error lines begin with `name` and end with the error's code."""
    raise_limit()
    guard_streams()
    try:
        try:
            command.main(prog_name=name, standalone_mode=False)
        except OSError as error:  # of the machine; a file that is missing may be one of the program's own
            if error.filename is None or isinstance(error, FileNotFoundError):
                raise
            raise storage_failed(f"cannot use {error.filename}", error) from error
    except FedvitError as error:
        click.echo(f"{name}: {error} [{error.code}]", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ConfigError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
