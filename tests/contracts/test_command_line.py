"""One style of command line for all three programs."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from PIL import Image

import edge_client.cli
import fleet.cli
from coordinator.config import RunConfig
from coordinator.record.record import open_record
from fedvit.command_line import Command
from tests.support.command_lines import PROGRAMS, parse
from tests.support.waiting import WAIT_S


def _commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for program, group in PROGRAMS.items():
        context = click.Context(group, info_name=program)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if not command.hidden:
                found[f"{program} {name}"] = command
    return found


COMMANDS = _commands()

WITH_JSON = {
    *(f"coordinator {name}" for name in (
        "audit", "backup", "boards", "cancel", "devices", "enroll", "explain", "export", "gc", "label", "logs",
        "methods", "models", "pause", "plan", "profile", "quarantine", "renew", "report", "restore", "retry", "revoke",
        "rm", "rotate-authority", "runs", "show", "status", "submit", "trace", "unpause", "wait",
    )),
    *(f"edge-client {name}" for name in (
        "certify", "doctor", "explain", "export", "gc", "ledger", "models", "predict", "profile", "rm", "status",
    )),
    *(f"fleet {name}" for name in ("contracts", "demo", "experiment", "explain", "partition", "results", "run")),
}  # fmt: skip
"""Commands that list or show something."""
WITHOUT_JSON = {
    *(
        f"coordinator {name}"
        for name in (
            "adopt",
            "bugreport",
            "dashboard",
            "evaluate",
            "init",
            "release",
            "serve",
            "sign",
            "start",
            "token",
        )
    ),
    "edge-client bugreport",
    "edge-client home",
    "edge-client join",
    "edge-client label",
    "edge-client page",
    "edge-client serve",
    "edge-client update",
    "fleet bugreport",
    "fleet host",
    "fleet region",
}
"""Commands that do something, and print what they do."""
WITH_RUNS = {
    *(f"coordinator {name}" for name in (
        "audit", "backup", "bugreport", "cancel", "dashboard", "devices", "evaluate", "export", "gc", "label", "logs",
        "models", "pause", "plan", "quarantine", "report", "restore", "retry", "rm", "runs", "serve", "show", "start",
        "status",
        "submit", "trace",
        "unpause", "wait",
    )),
    "fleet bugreport", "fleet region", "fleet run",
}  # fmt: skip
"""Commands that read or make runs of a folder."""
WITH_OUT = {
    "coordinator bugreport", "coordinator export", "coordinator profile", "coordinator report", "edge-client bugreport",
    "edge-client certify", "edge-client export", "fleet bugreport", "fleet demo", "fleet experiment", "fleet partition",
    "fleet results",
}  # fmt: skip
"""Commands that write a file or a folder of their own."""


def _option(command: click.Command, flag: str) -> click.Option | None:
    return next((each for each in command.params if isinstance(each, click.Option) and flag in each.opts), None)


def _with(flag: str) -> set[str]:
    return {name for name, command in COMMANDS.items() if _option(command, flag)}


# --- flags --------------------------------------------------------------------------------------------


def test_commands_with_and_without_json_are_listed_here() -> None:
    # every command is listed here: A new command has to be placed: it prints JSON, or it has nothing to list
    assert COMMANDS.keys() == WITH_JSON | WITHOUT_JSON
    assert not WITH_JSON & WITHOUT_JSON
    assert _with("--json") == WITH_JSON
    texts = {option.help for name in WITH_JSON if (option := _option(COMMANDS[name], "--json"))}
    assert texts == {"Print one JSON document, and nothing else."}


def test_runs_is_where_runs_lie() -> None:
    assert _with("--runs") == WITH_RUNS
    for name in WITH_RUNS:
        option = _option(COMMANDS[name], "--runs")
        assert option is not None
        assert option.help is not None
        assert option.help.startswith("Folder of all runs"), name
        assert isinstance(option.type, click.Path)


def test_out_is_what_is_written() -> None:
    assert _with("--out") == WITH_OUT
    for name in WITH_OUT:
        option = _option(COMMANDS[name], "--out")
        assert option is not None
        assert "all runs" not in (option.help or "")
        assert option.default != Path("runs"), name


def test_a_flag_that_several_commands_have_means_the_same() -> None:
    """Values of one kind, whatever each command does with them."""
    kinds: dict[str, set[str]] = {}
    for command in (*PROGRAMS.values(), *COMMANDS.values()):
        for option in command.params:
            if isinstance(option, click.Option) and option.opts[0] in ("--runs", "--out", "--data", "--state", "--run"):
                kinds.setdefault(option.opts[0], set()).add(type(option.type).__name__)
    assert {flag: len(each) for flag, each in kinds.items()} == dict.fromkeys(kinds, 1)


# --- help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted([*COMMANDS, *PROGRAMS]))
def test_help_says_what_a_command_and_each_option_is_for(name: str) -> None:
    command = COMMANDS.get(name) or PROGRAMS[name]
    assert isinstance(command, Command)
    assert re.match(r"[A-Z][a-z]+ .*[.:]", command.get_short_help_str(1000)), command.help
    for option in command.params:
        if isinstance(option, click.Option):
            assert len(option.help or "") >= 5, option.opts


@pytest.mark.parametrize("name", sorted([*COMMANDS, *PROGRAMS]))
def test_help_ends_with_examples_that_the_program_understands(name: str) -> None:
    command = COMMANDS.get(name) or PROGRAMS[name]
    assert isinstance(command, Command)
    assert command.examples
    shown = command.get_help(click.Context(command, info_name=name))
    for example in command.examples:
        assert shown.splitlines()[-len(command.examples) :].count(f"  {example}") == 1
        assert example.startswith(name)
        parse(shlex.split(example))


@pytest.mark.parametrize(
    ("program", "descriptions"), [("fleet", fleet.cli.COMMANDS), ("edge-client", edge_client.cli.COMMANDS)]
)
def test_lazy_commands_have_the_descriptions_of_their_own_help(program: str, descriptions: dict[str, str]) -> None:
    """A program lists them without importing them."""
    for name, text in descriptions.items():
        assert COMMANDS[f"{program} {name}"].get_short_help_str(1000) == text


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_typing_errors_need_nothing_that_takes_seconds(program: str) -> None:
    module = {"edge-client": "edge_client"}.get(program, program)
    names = [name.split()[1] for name in COMMANDS if name.startswith(f"{program} ")]
    script = (
        f"import sys\nfrom click.testing import CliRunner\nfrom {module}.cli import cli\n"
        f"for given in ['--help'], ['--typo'], *([name, flag] for name in {names} for flag in ('--help', '--typo')):\n"
        "    code = CliRunner().invoke(cli, given).exit_code\n"
        "    assert code == (0 if given[-1] == '--help' else 2), (given, code)\n"
        "print(sorted({'torch', 'timm', 'sklearn', 'onnxruntime', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.EIO])
def test_place_that_cannot_be_used_is_named_without_a_traceback(code: int) -> None:
    """The errors of another user's folder, of a name that is too long, and of a broken disk."""
    why = os.strerror(code)
    script = (
        "import click\nfrom fedvit.command_line import run\n"
        f"def use():\n    raise OSError({code}, {why!r}, '/srv/runs')\n"
        "run(click.Command('use', callback=use), 'coordinator')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (10, f"coordinator: cannot use /srv/runs: {why} [FV0010]\n")


# --- JSON ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands below look at."""
    folder = tmp_path_factory.mktemp("here")
    with open_record(folder / "runs") as store:
        for name in ("done", "other"):
            store.runs.create(name, msgspec.to_builtins(RunConfig(method="fedavg")))
            store.runs.update(name, status="finished")
        store.runs.create("half", msgspec.to_builtins(RunConfig(method="fedavg")))
    (folder / "runs" / "done").mkdir()
    status = {"at": "2026-01-02T03:04:05+00:00", "doing": "x", "waiting_for": [], "resting": [], "online": 0}
    (folder / "runs" / "done" / "status.json").write_text(json.dumps(status))
    (folder / "state" / "vault").mkdir(parents=True)
    made = CliRunner().invoke(PROGRAMS["coordinator"], ["init", str(folder / "deployment"), "--port", "0"])
    assert made.exit_code == 0, made.output
    for label in ("ant", "bee"):
        for number in range(4):
            _picture(folder / "pictures" / label / f"{number}.png", number)
    (folder / "tiny.toml").write_text(
        'dataset = "digits"\nimage_size = 8\ndevices = 2\nrounds = 1\n'
        '[partitions.even]\npartition = "iid"\n[methods.fedavg]\nmethod = "fedavg"\n'
    )
    return folder


def _picture(file: Path, gray: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (gray, gray, gray)).save(file)


@pytest.mark.parametrize(
    "line",
    [
        "coordinator boards",
        "coordinator boards rpi5-8",
        "coordinator methods --method local",
        "coordinator runs --runs runs",
        "coordinator show done --runs runs",
        "coordinator status done --runs runs",
        "coordinator quarantine done --runs runs",
        "coordinator report done --runs runs",
        "coordinator devices --deployment deployment",
        "coordinator devices --deployment deployment --runs runs",
        "coordinator enroll pi-7 pi-8 --no-wait --deployment deployment",
        "coordinator revoke pi-7 --deployment deployment",
        "coordinator renew --deployment deployment",
        "coordinator rotate-authority --deployment deployment",
        "coordinator gc --dry-run --runs runs",
        "coordinator rm other --runs runs",
        "coordinator pause half --runs runs",
        "coordinator label pi-1 site=berlin --runs runs",
        "coordinator cancel half --runs runs",
        "edge-client gc --state state",
        "edge-client ledger --state state",
        "fleet partition --dataset pictures --devices 2 --partition iid --out parts",
        "fleet experiment tiny.toml --dry-run",
    ],
)
def test_json_is_one_document_and_nothing_else(line: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    program, *words = line.split()
    done = CliRunner().invoke(PROGRAMS[program], [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    json.loads(done.stdout)
    assert f"{program} {words[0]}" in WITH_JSON
