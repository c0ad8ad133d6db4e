"""The real program as an operator meets it."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from coordinator.cli import choose_accelerator, cli
from coordinator.config import RunConfig
from coordinator.store import SavedState, Store
from fedvit.errors import ConfigError, StorageFailed
from fedvit.resources import ResourceUse
from fedvit.wire import messages

PROGRAM = [sys.executable, "-c", "from coordinator.cli import main; main()"]
WAIT_S = 120


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder with a finished run `done`, one evaluated round of two devices, and an interrupted run `half`."""
    folder = tmp_path / "runs"
    store = Store.in_folder(folder)
    for name, status in (("done", "finished"), ("half", "interrupted")):
        store.create_run(name, msgspec.to_builtins(RunConfig(method="fedavg", rounds=3, seed=5)))
        store.update_run(name, status=status, classes=["ant", "bee"])
    store.open_round("done", 1, ["pi-1", "pi-2"])
    for device, right in (("pi-1", 4.0), ("pi-2", 3.0)):
        use = ResourceUse(step_s=0.01, flops=10**9, peak_rss_bytes=10**8, received_bytes=10**6, sent_bytes=10**5)
        store.add_result(device, messages.Result("done", 1, "train", 10, {"loss": 0.5}, use))
        store.add_result(device, messages.Result("done", 1, "evaluate", 5, {"correct": right}, ResourceUse()))
    store.close_round("done", 1, SavedState({}, None, {}), {})
    store.add_refusal("done", 1, "pi-3", "train", "'head.bias' holds [3] values that are NaN")
    yield folder
    store.close()


def said(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def refused(*arguments: object) -> str:
    result = said(*arguments)
    assert isinstance(result.exception, ConfigError), (result.output, result.exception)
    assert result.output == ""
    return str(result.exception)


def as_process(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=WAIT_S, check=False)


def one_line(done: "subprocess.CompletedProcess[str]", code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("coordinator: ")
    return line


# --- runs and show ------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(out: Path) -> None:
    lines = said("runs", "--out", out).output.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["half", "done"]
    assert lines[2].split()[-2:] == ["0/3", "-"]
    assert lines[3].split()[-2:] == ["1/3", "0.700"]  # (4/5 + 3/5) / 2


def test_runs_as_json(out: Path) -> None:
    listed = json.loads(said("runs", "--out", out, "--json").output)
    assert [entry["run"] for entry in listed] == ["half", "done"]
    assert listed[1] == {
        "run": "done",
        "created_at": listed[1]["created_at"],
        "status": "finished",
        "method": "fedavg",
        "model": "vit_small_images",
        "rounds": 1,
        "rounds_planned": 3,
        "mean_accuracy": pytest.approx(0.7),
    }


def test_show_prints_the_tables(out: Path) -> None:
    output = said("show", "done", "--out", out).output
    for text in (
        "run done: fedavg on vit_small_images, finished, 1 of 3 rounds, seed 5",
        "accuracy by round",
        "pi-1",
        "0.800",
        "0.600",
        "0.700",
        "each device's own",
        "devices",
        "refused or lost",
        "'head.bias' holds [3] values that are NaN",
    ):
        assert text in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_show_as_json(out: Path) -> None:
    shown: dict[str, Any] = json.loads(said("show", "done", "--out", out, "--json").output)
    assert (shown["run"], shown["status"], shown["classes"]) == ("done", "finished", ["ant", "bee"])
    assert shown["mean_accuracy"] == pytest.approx(0.7)
    assert (shown["bytes_down"], shown["bytes_up"], shown["max_edge_rss_bytes"]) == (2 * 10**6, 2 * 10**5, 10**8)
    assert [entry["device"] for entry in shown["devices"]] == ["pi-1", "pi-2"]
    assert shown["rounds"][0]["accuracy"] == {"pi-1": 0.8, "pi-2": 0.6}
    assert shown["refusals"][0]["device"] == "pi-3"


def test_an_unknown_run_is_one_line(out: Path) -> None:
    line = one_line(as_process("show", "yesterday", "--out", out), ConfigError.exit_code)
    assert "'yesterday'" in line


def test_a_folder_without_runs_is_named_and_left_alone(tmp_path: Path) -> None:
    for command in (("runs",), ("show", "r")):
        assert str(tmp_path / "none") in refused(*command, "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_record_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fedvit.db").write_bytes(b"something else entirely " * 100)
    line = one_line(as_process("runs", "--out", tmp_path), StorageFailed.exit_code)
    assert "fedvit.db" in line
    assert "not a database" in line


# --- start --------------------------------------------------------------------------------------------


def test_a_typing_error_in_the_file_is_one_line(tmp_path: Path) -> None:
    """And nothing is made."""
    file = tmp_path / "run.toml"
    file.write_text("rounds = 3\nquorun = 0.5\n")
    line = one_line(as_process("start", "--config", file, "--out", tmp_path / "runs"), ConfigError.exit_code)
    assert line == f"coordinator: {file}: unknown key 'quorun'; did you mean 'quorum'?"
    assert not (tmp_path / "runs").exists()


def test_an_unknown_flag_is_named() -> None:
    result = said("start", "--quorun", "0.5")
    assert result.exit_code == 2
    assert "--quorun" in result.output
    assert "--quorum" in result.output


def test_there_may_be_nothing_to_resume(tmp_path: Path, out: Path) -> None:
    assert "no run to resume" in refused("start", "--resume", "--out", tmp_path / "fresh")
    assert refused("start", "--resume", "done", "--out", out) == "run 'done' is finished; there is nothing to resume"
    assert "'other'" in refused("start", "--resume", "other", "--out", out)


def test_a_resumed_run_keeps_its_configuration(out: Path) -> None:
    said = refused("start", "--resume", "half", "--rounds", "9", "--out", out)
    assert said == "--resume goes on with the run's own configuration; 'rounds' cannot be changed"


@pytest.mark.parametrize("how", [("--resume",), ("--resume", "half")])
def test_a_run_is_served_once(out: Path, how: tuple[str, ...]) -> None:
    """Without a name the newest unfinished run is meant."""
    (out / "half").mkdir()
    with open(out / "half" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refused("start", *how, "--out", out) == "run 'half' is being served by another coordinator"


def test_a_new_run_needs_a_new_name(out: Path) -> None:
    assert "run 'half' exists already; go on with it by --resume half" in refused(
        "start", "--run", "half", "--out", out
    )
    assert "--run 'a b' must be" in refused("start", "--run", "a b", "--out", out)


def test_an_accelerator_that_is_not_there_is_named_and_no_run_is_made(out: Path) -> None:
    said = refused("start", "--accelerator", "warp", "--run", "new", "--out", out)
    assert said.startswith("accelerator = 'warp' cannot be used: ")
    assert "\n" not in said
    assert "new" not in [record.id for record in Store.in_folder(out).runs()]
    assert choose_accelerator("cpu") == "cpu"
    assert choose_accelerator("auto") in ("cpu", "cuda")
