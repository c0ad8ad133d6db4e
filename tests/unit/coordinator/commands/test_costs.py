"""`coordinator boards`, `profile` and `report` as an operator meets them."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cli
from coordinator.compute.planning.forecast import read_forecast
from coordinator.compute.planning.prediction_request import BoardMode
from coordinator.record.record import open_record
from coordinator.record.tables import SavedState
from fedvit.errors import ConfigError, FedvitError, OverBudget
from fedvit.resources import ResourceUse
from fedvit.wire import messages
from profiles.report.document import ProfileDocument
from tests.support.records import add_result
from tests.unit.coordinator.conftest import MODEL

TINY = [f"--model-option={key}={value}" for key, value in MODEL.items()]


def said(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": "120"})


def refused(kind: type[FedvitError], *arguments: object) -> str:
    result = said(*arguments)
    assert isinstance(result.exception, kind), (result.output, result.exception)
    return str(result.exception)


# --- boards -------------------------------------------------------------------------------------------


def test_boards_are_listed() -> None:
    lines = said("boards").stdout.splitlines()
    [row] = [line for line in lines if line.startswith("rpi5-8 ")]
    assert row.split()[-7:] == ["8", "4", "154", "72", "10.6", "13", "yes"]
    names = [name for line in lines if "@" in (name := line.split(" ")[0])]
    assert {"agx-orin-64@MAXN", "agx-orin-64@15W"} <= set(names)
    assert all(BoardMode.parse(name).mode == name.partition("@")[2] for name in names)
    listed = json.loads(said("boards", "--json").stdout)
    assert {entry["id"] for entry in listed} >= {"rpi-zero2w", "thor-t5000"}
    assert next(entry for entry in listed if entry["id"] == "thor-t5000")["power_w"] is None


def test_one_board_with_its_sources() -> None:
    text = said("boards", "agx-orin-64").stdout
    assert "LineageOS/android_device_nvidia_concord" in text
    assert "unverified" in text
    board = json.loads(said("boards", "agx-orin-64", "--json").stdout)
    assert board["memory"]["memcpy_bytes_per_s"] == {"value": 10.6e9, "mark": "published", "source": "sbc-bench"}
    assert set(board["speeds"]) == {"MAXN", "50W", "30W", "15W"}
    assert {"nvpmodel", "sbc-bench", "fev"} <= set(board["sources"])
    assert "did you mean" in refused(ConfigError, "boards", "agx-orin")
    assert "agx-orin-64@15W" in text
    assert "choose one of: rpi5-8" in refused(ConfigError, "boards", "rpi5-8@5W")
    assert json.loads(said("boards", "agx-orin-64@15W", "--json").stdout)["id"] == "agx-orin-64"


def test_every_board_of_the_list_can_be_shown_as_json() -> None:
    """Also one without power modes: its one speed has no name."""
    for listed in json.loads(said("boards", "--json").stdout):
        board = json.loads(said("boards", listed["id"], "--json").stdout)
        assert set(board["speeds"]) == set(listed["modes"] or [""])


# --- profile ------------------------------------------------------------------------------------------


@pytest.fixture
def quick(graph_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Graphs come from the tests' cache."""
    monkeypatch.setattr("export.graphs.default_cache", lambda: graph_cache)
    return tmp_path


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_profile_in_three_forms(quick: Path) -> None:
    """Two splits x two mask ratios on two boards; the page has the figures of the JSON."""
    command = [
        "profile", "--method", "eftvit", *TINY, "-o", "batch_size=8", "-o", "epochs=3", "--images", 40,
        "--device", "rpi5-8", "--device", "agx-orin-64@15W", "--mask", 0.5, "--mask", 0, "--split", 1,
    ]  # fmt: skip
    page = quick / "profile.html"
    result = said(*command, "--json", "--out", page)
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(result.stdout, type=ProfileDocument)
    assert [variant.label for variant in document.variants] == ["mask 0.5, M=1", "mask 0, M=1"]
    assert [(device.id, device.mode) for device in document.devices] == [("rpi5-8", None), ("agx-orin-64", "15W")]
    assert document.fitting == 4
    half, whole = (variant.cost for variant in document.variants)
    assert (half.kept_patches, whole.kept_patches) == (8, 16)
    assert half.flops_forward < whole.flops_forward
    assert half.steps == 3 * 5  # epochs x 40 / 8
    trained = {share.block: share.trained for share in half.flops}
    assert (trained["block 0"], trained["block 1"], trained["head"]) == (True, False, True)
    first = document.devices[0].predictions[0]
    assert first.power_w == 12.7
    assert first.peak_rss_bytes == max(phase.total_bytes for phase in first.memory)
    assert document.devices[0].budget.memory_bytes == (8 << 30) - (512 << 20)
    written = page.read_text()
    assert "Every variant fits the budget of every device." in written
    assert "mask 0.5, M=1" in written


def test_a_device_that_fits_nothing_ends_with_an_exit_code(quick: Path) -> None:
    """The budget is the tighter of the board's memory and the flag's; the report is there nevertheless."""
    arguments = ["profile", *TINY, "-o", "local_blocks=1", "--device", "rpi5-8", "--memory-budget", 10**6]
    result = said(*arguments)
    assert isinstance(result.exception, OverBudget)
    assert "No variant fits the budget of any device." in result.stdout
    assert "no variant fits the budget of rpi5-8" in str(result.exception)


def test_unsupported_profile_is_reported(quick: Path) -> None:
    device = ("--device", "rpi5-8")
    assert "these have: eftvit" in refused(ConfigError, "profile", "--method", "fedavg", *TINY, *device, "--split", 1)
    assert "no power mode 'fast'" in refused(ConfigError, "profile", *TINY, "--device", "agx-orin-64@fast")
    assert "unknown method 'magic'" in refused(ConfigError, "profile", "--method", "magic", *TINY, *device)
    assert said("profile", *TINY).exit_code == 2  # no device


# --- plan of a run ------------------------------------------------------------------------------------


def test_plan_of_a_queued_run_is_kept_for_the_dashboard(quick: Path) -> None:
    """With the run's own method, model and budget: 100 GFLOP a round for one board, too little memory for none."""
    with open_record(quick) as store:
        options = {"batch_size": 8, "epochs": 3, "mask": 0.5, "local_blocks": 1}
        config = {"method": "eftvit", "model_options": MODEL, "options": options, "rounds": 5}
        store.runs.submit("night", {**config, "budget": {"flops_budget": "1TFLOP"}})
        store.runs.submit("small", {**config, "budget": {"memory_budget": "1MB"}})
    given = ["--runs", quick, "--device", "rpi5-8", "--device", "agx-orin-64@15W", "--images", 40]
    result = said("plan", "--run", "night", *given, "--json")
    assert result.exit_code == 0, result.output
    chosen = json.loads(result.stdout)
    forecast = read_forecast(quick / "night")
    assert forecast is not None
    assert (forecast.images, [board.board for board in forecast.boards]) == (40, ["rpi5-8", "agx-orin-64@15W"])
    for board, choice in zip(forecast.boards, chosen, strict=True):
        assert board.expected is not None
        assert board.budget.flops_per_round == 10**12
        assert board.expected.flops == choice["cost"]["flops_round"]
        assert board.expected.prediction.peak_rss_bytes == choice["chosen"]["prediction"]["peak_rss_bytes"]
        assert choice["cost"]["options"]["mask"] == 0.5
    assert "rpi5-8" in refused(OverBudget, "plan", "--run", "small", *given)
    small = read_forecast(quick / "small")
    assert small is not None
    assert [board.expected for board in small.boards] == [None, None]
    assert "memory" in (small.boards[0].refused or "")


def test_plan_of_a_run_takes_no_method(quick: Path) -> None:
    open_record(quick).close()
    device = ("--runs", quick, "--device", "rpi5-8")
    why = refused(ConfigError, "plan", "--run", "night", "--method", "fedavg", "-o", "lr=1", *device)
    assert why == "--run night has its own method and model: leave out --method, --option"
    assert "'night'" in refused(ConfigError, "plan", "--run", "night", *device)


# --- report -------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with open_record(tmp_path / "runs") as store:
        store.runs.create("done", {"method": "eftvit", "model": "vit_base_patch16_224", "rounds": 1, "seed": 5})
        store.runs.update("done", status="finished", protocol="p")
        store.rounds.open("done", 1, ["pi"])
        use = ResourceUse(step_s=2.0, train_s=60.0, peak_rss_bytes=10**8, received_bytes=10**6, sent_bytes=10**5)
        add_result(store, "pi", messages.Result("done", 1, "train", 10, {"loss": 0.5}, use))
        add_result(store, "pi", messages.Result("done", 1, "evaluate", 5, {"correct": 4.0}, ResourceUse()))
        store.rounds.close("done", 1, SavedState({}, None, {}), {})
    return tmp_path / "runs"


def test_a_report_in_three_forms(runs: Path) -> None:
    page = runs / "report.html"
    text = said("report", "done", "--runs", runs, "--out", page)
    assert text.exit_code == 0, text.output
    assert "Finished: 1 of 1 rounds, accuracy 0.800" in text.stdout
    assert "60.0 s" in text.stdout
    assert "Finished: 1 of 1 rounds, accuracy 0.800" in page.read_text()
    document = json.loads(said("report", "done", "--runs", runs, "--json").stdout)
    assert document["devices"][0]["rounds"][0]["measured"]["step_s"] == 2.0


def test_a_report_of_nothing(runs: Path, tmp_path: Path) -> None:
    assert "no run 'gone'" in refused(ConfigError, "report", "gone", "--runs", runs)
    assert "use --runs for another folder" in refused(ConfigError, "report", "done", "--runs", tmp_path / "empty")
