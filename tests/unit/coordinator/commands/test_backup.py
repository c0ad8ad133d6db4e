"""The next commands that backup and restore name can be used as they are; whole stories: tests/e2e/test_backup.py."""

from pathlib import Path

from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.record.record import open_record
from tests.support.deployments import make_deployment


def call(*words: object) -> str:
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


def test_next_commands_are_for_what_was_backed_up(tmp_path: Path) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "backups"
    deployment = make_deployment(tmp_path / "deployment").folder
    with open_record(runs) as store:
        store.runs.create("r", {})
    restore = f"next: coordinator restore {folder}"
    said = call("backup", folder, "--deployment", deployment)
    assert f"{restore} --deployment NEW-DEPLOYMENT\n" in said
    said = call("backup", folder, "--runs", runs, "--deployment", deployment)
    assert f"{restore} --runs NEW-RUNS --deployment NEW-DEPLOYMENT\n" in said
    said = call("backup", folder, "--runs", runs)
    assert f"{restore} --runs NEW-RUNS\n" in said
    new = tmp_path / "new"
    assert f"coordinator start --resume RUN --runs {new}\n" in call("restore", folder, "--runs", new)
