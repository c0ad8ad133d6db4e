"""Every command line in `deploy/` and in docs/deploy.md is one that the programs understand."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import edge_client.cli
from tests.support.command_lines import parse, shown_in

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
ENVIRONMENT = dict(
    line.split("=", 1)
    for line in (DEPLOY / "systemd" / "edge.env.example").read_text().splitlines()
    if line and not line.startswith("#")
)


CAMERA = "fedvit-camera.service"
"""The only unit that starts no program of the project, but a script of `deploy/`."""
UPDATE = "fedvit-update.service"
"""The only unit that runs as root, since versions of the software belong to root."""
UNITS = [unit for unit in sorted(DEPLOY.glob("systemd/*.service")) if unit.name != CAMERA]


def of_services() -> dict[str, list[str]]:
    """ExecStart of each unit."""
    lines: dict[str, list[str]] = {}
    for unit in UNITS:
        [start] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        for name, value in ENVIRONMENT.items():
            start = start.replace(f"${{{name}}}", value).replace(f"${name}", value)
        lines[unit.name] = shlex.split(start)
    return lines


def of_containers() -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for name, service in COMPOSE["services"].items():
        if "entrypoint" not in service:
            lines[f"compose {name}"] = ["coordinator", *map(str, service["command"])]
            continue
        # a script of the shell: each line that calls a program
        [script] = service["command"]
        calls = re.findall(r"(?:^ *|\|\| |exec |\()((?:coordinator|edge-client) [^|>)\n]*)", script, re.MULTILINE)
        assert calls, name
        lines |= {f"compose {name} {number}": shlex.split(call) for number, call in enumerate(calls)}
    for file in sorted(DEPLOY.glob("docker/Dockerfile.*")):
        if file.suffix == ".dockerignore":
            continue
        text = file.read_text()
        first = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
        rest = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
        assert first, file
        assert rest, file
        lines[file.name] = [*yaml.safe_load(first[1]), *yaml.safe_load(rest[1])]
    return lines


def of_the_page() -> dict[str, list[str]]:
    return {f"docs/deploy.md {number}": words for number, words in enumerate(shown_in(ROOT / "docs" / "deploy.md"))}


LINES = {**of_services(), **of_containers(), **of_the_page()}


@pytest.mark.parametrize("where", LINES)
def test_the_programs_know_every_option(where: str) -> None:
    parse(LINES[where])


@pytest.mark.parametrize("where", LINES)
def test_no_command_line_holds_a_password(where: str) -> None:
    """Every user of a machine can read command lines; environments only their own user."""
    # @FILE is the name of a file
    words = [word for word in LINES[where] if not word.startswith("@")]
    assert not [word for word in words if "@" in word or "password" in word.lower()]


def test_service_gets_its_broker_by_environment() -> None:
    unit = (DEPLOY / "systemd" / "fedvit-edge.service").read_text()
    assert "EnvironmentFile=/etc/fedvit/edge.env" in unit.splitlines()
    [broker] = [option for option in edge_client.cli.cli.params if option.name == "broker"]
    assert isinstance(broker, click.Option)
    assert broker.envvar in ENVIRONMENT


def test_an_option_that_is_not_there_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["coordinator", "start", "--no-such-option"])
    with pytest.raises(click.UsageError):
        parse(["edge-client", "--no-such-option"])


def test_all_files_were_looked_into() -> None:
    assert len(of_services()) == 5
    assert len(of_containers()) == 11
    assert len(of_the_page()) >= 5


def test_camera_starts_a_script_that_is_there_and_writes_where_pictures_wait() -> None:
    text = (DEPLOY / "systemd" / CAMERA).read_text()
    [start] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    script, folder = shlex.split(start)
    assert (DEPLOY / Path(script).relative_to("/opt/fedvit")).is_file()
    assert folder == "${FEDVIT_DATA}/unlabelled"
    assert {"NoNewPrivileges=yes", "ProtectSystem=full", "CapabilityBoundingSet="} <= set(text.splitlines())


def test_update_changes_nothing_but_versions() -> None:
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", (DEPLOY / "systemd" / UPDATE).read_text(), re.MULTILINE))
    assert (settings["ProtectSystem"], settings["ReadWritePaths"]) == ("strict", "/opt/fedvit")
    assert settings["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.name != UPDATE], ids=lambda unit: unit.stem)
def test_services_give_up_what_they_do_not_need(unit: Path) -> None:
    given = re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE)
    settings = dict(given)
    wanted = {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "SystemCallArchitectures": "native",
        "KillSignal": "SIGTERM",
    }
    assert {name: settings.get(name) for name in wanted} == wanted
    assert "MemoryMax" in settings
    assert "StateDirectory" in settings
    [start] = [value for name, value in given if name == "ExecStart"]
    written = set(re.findall(r"(?:--state|--runs) (/\S+)", start))
    assert written, "it names where it writes"
    assert all(path.startswith(f"/var/lib/{settings['StateDirectory']}") for path in written)


def test_the_memory_line_is_behind_the_budget() -> None:
    """The process stops its task by itself; the system's limit is for when that fails."""
    unit = (DEPLOY / "systemd" / "fedvit-edge.service").read_text()
    [limit] = re.findall(r"^MemoryMax=(\d+)M$", unit, re.MULTILINE)
    [budget_mb] = re.findall(r"--memory-budget (\d+)MB", ENVIRONMENT["FEDVIT_OPTIONS"])
    budget = int(budget_mb) * 10**6
    assert 1.1 * budget < int(limit) * 2**20 < 1.5 * budget


def test_containers_run_as_nobody_special() -> None:
    for file in (DEPLOY / "docker" / "Dockerfile.server", DEPLOY / "docker" / "Dockerfile.edge"):
        text = file.read_text()
        last = text[text.rindex("\nFROM ") :]
        assert re.search(r"^USER (?!root|0)\w+$", last, re.MULTILINE), file
        for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            assert all((ROOT / name).exists() for name in copied.split()), copied
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert set(service) <= {
            "build", "command", "environment", "volumes", "restart", "read_only", "tmpfs", "cap_drop", "security_opt",
            "stop_grace_period", "depends_on", "mem_limit", "pids_limit", "entrypoint", "healthcheck",
        }, name  # fmt: skip
        assert (DEPLOY / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        named = [volume.partition(":")[0] for volume in service["volumes"] if not volume.startswith(".")]
        assert set(named) <= COMPOSE["volumes"].keys(), name


def test_the_packages_of_the_image_are_those_of_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in patterns}
    for file in DEPLOY.glob("docker/Dockerfile.*"):
        if file.suffix != ".dockerignore":
            copied = set(re.findall(r"^COPY (\w+) \w+$", file.read_text(), re.MULTILINE))
            assert copied == packages, file


def test_the_image_of_the_server_can_show_its_metrics() -> None:
    """Its containers are healthy only if they answer at the address of `--prometheus`."""
    [line] = re.findall(r'"\$1\[(.*)\]"', (DEPLOY / "docker" / "Dockerfile.server").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {requirement for extra in line.split(",") for requirement in extras[extra]}
    assert any(package.startswith("prometheus-client") for package in packages)


def test_playbook_names_files_that_exist() -> None:
    [play] = yaml.safe_load((DEPLOY / "ansible" / "devices.yaml").read_text())
    sources = [task["ansible.builtin.copy"].get("src") for task in play["tasks"] if "ansible.builtin.copy" in task]
    for source in sources:
        assert source is None or "{{" in source or (DEPLOY / "ansible" / source).is_file(), source
    for task in play["tasks"]:  # an inventory says true as a text, which is no condition
        assert re.search(r"\| bool$|^enrolled is defined", task.get("when", "x | bool")), task["name"]
    notified = {task["notify"] for task in play["tasks"] if "notify" in task}
    assert notified == {handler["name"] for handler in play["handlers"]}
    settings = next(task for task in play["tasks"] if task["name"] == "Settings")["ansible.builtin.copy"]["content"]
    assert {line.split("=")[0] for line in settings.splitlines()} >= ENVIRONMENT.keys()
