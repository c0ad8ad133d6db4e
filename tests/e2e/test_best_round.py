"""A run that stops by its rules, and its best round, with real processes and kill -9."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import coordinator.cli
import edge_client.cli
from edge_client.storage.vault import Vault
from tests.support.federation import COORDINATOR, SCENARIO, Fault, Federation, deal_digits
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DEVICES = ("device-0", "device-1")
VALUES: dict[str, Any] = {
    **SCENARIO, "method": "fedper", "rounds": 9, "options": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "stop": {"patience": 2}, "keep_rounds": 1,
}  # fmt: skip
"""Its second round is its best, with personal tensors; details of earlier rounds are removed."""


def invoke(program: Any, *arguments: object) -> Any:
    done = CliRunner().invoke(program, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done


def show(federation: Federation, run: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(
        invoke(coordinator.cli.cli, "show", run, "--runs", federation.runs, "--json").stdout
    )
    return shown


def finish(federation: Federation) -> None:
    def check_devices() -> None:
        ended = [name for name in DEVICES if federation.processes[name].poll() is not None]
        assert not ended, federation.log(ended[0]).read_text()[-2000:]

    wait_until(lambda: federation.exit_code() is not None, "the run does not end", wait_s=300, meanwhile=check_devices)
    assert federation.exit_code() == 0, federation.log(COORDINATOR).read_text()[-2000:]


def test_run_stops_at_the_same_round_after_kills_and_its_best_round_can_be_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folders = deal_digits(tmp_path / "parts", DEVICES)
    federation = Federation(tmp_path, folders, VALUES, None)
    with federation.links:
        try:
            check_run(federation, tmp_path, folders)
        finally:
            federation.close()


def check_run(federation: Federation, tmp_path: Path, folders: list[Path]) -> None:
    for name in DEVICES:
        federation.start_device(name)
    federation.start_run("calm")
    finish(federation)
    federation.start_run("killed")
    for condition in (
        "round = 2 and closed_at is not null",  # it is being evaluated
        "round = 2 and evaluated = 1",
        "round = 3 and evaluated = 1",
    ):
        sql = f"select 1 from rounds where run = 'killed' and {condition}"
        wait_until(lambda sql=sql: federation.query(sql), f"no round with {condition}", wait_s=300)
        for target in (COORDINATOR, DEVICES[0]):
            federation.inject(Fault("clock", target))
    finish(federation)
    calm, killed = show(federation, "calm"), show(federation, "killed")
    assert calm["reason"] == killed["reason"]
    assert calm["reason"].startswith("stopped: accuracy")
    best, last = killed["best"], killed["rounds"][-1]["round"]
    assert best < last < VALUES["rounds"], "the scenario has a best round before the last one"
    assert [entry["accuracy_mean"] for entry in calm["rounds"]] == [
        entry["accuracy_mean"] for entry in killed["rounds"]
    ]
    removed = invoke(coordinator.cli.cli, "gc", "--runs", federation.runs, "--keep-rounds", 1).output
    assert "killed" in removed, "blobs of other rounds"
    check_scores(federation, tmp_path, best, last)
    check_exports(federation, tmp_path, folders, best, last)


def check_scores(federation: Federation, home: Path, best: int, last: int) -> None:
    """Devices test both kept rounds again, without training: the same scores, and their vaults stay as they are."""
    vault = Vault(home / "state" / DEVICES[0] / "vault")
    before = vault.notes.find_newest("killed")
    rounds = {entry["round"]: entry for entry in show(federation, "killed")["rounds"]}
    for asked, number in (("best", best), ("last", last)):
        federation.evaluate("killed", f"scores-{asked}", "--round", asked)
        finish(federation)
        tested = show(federation, f"scores-{asked}")
        assert tested["tested"] == "killed"
        [entry] = tested["rounds"]
        assert entry["round"] == number
        assert entry["accuracy_mean"] == rounds[number]["accuracy_mean"]
        assert len(entry["accuracy"]) == len(DEVICES)
    assert vault.notes.find_newest("killed") == before
    assert sorted(vault.folders()) == ["calm", "killed"]


def check_exports(federation: Federation, home: Path, folders: list[Path], best: int, last: int) -> None:
    """Bundles of both kept rounds give the scores of these rounds; other rounds are refused."""
    for folder in folders:
        for asked, number in ((None, best), ("best", best), ("last", last), (str(best), best)):
            out = home / f"bundle-{folder.name}-{asked}"
            flags = [] if asked is None else ["--round", asked]
            state = home / "state" / folder.name
            invoke(
                edge_client.cli.cli, "export", "killed", "--data", folder, "--state", state, "--out", out,
                "--precision", "fp32", *flags,
            )  # fmt: skip
            card = json.loads((out / "card.json").read_text())
            assert card["origin"]["round"] == number
            accuracy = card["files"]["fp32"]["accuracy"]
            tested = show(federation, f"scores-{'last' if number == last else 'best'}")["rounds"][0]["accuracy"]
            assert accuracy["correct"] / accuracy["images"] == tested[folder.name]
        flags = ["--data", str(folder), "--state", str(state), "--out", str(home / "none"), "--round", "1"]
        refused = CliRunner().invoke(edge_client.cli.cli, ["export", "killed", *flags])
        assert f"round {best}, its best" in str(refused.exception)
