"""The real program as an operator meets it."""

import ctypes
import fcntl
import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import tomli_w
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from coordinator.cli import cli
from coordinator.compute.accelerator import choose_accelerator
from coordinator.config import RunConfig, make_config, merge_flags
from coordinator.record.record import open_record
from coordinator.record.tables import RefusalRecord, SavedState
from fedvit.errors import ConfigError, StorageFailed
from fedvit.models import build_vit
from fedvit.resources import ResourceUse
from fedvit.wire import messages
from tests.support.children import run_child
from tests.support.codes import has_code
from tests.support.event_files import scalars
from tests.support.forked import ForkedWorker
from tests.support.records import add_result
from tests.support.waiting import WAIT_S

DRIVERS = "sqlalchemy.dialects.postgresql"
"""SQLAlchemy's module of PostgreSQL, which imports all its drivers."""
PROGRAM = [sys.executable, "-c", "from coordinator.cli import main; main()"]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder with a finished run `done`, one evaluated round of two devices, and an interrupted run `half`."""
    folder = tmp_path / "runs"
    with open_record(folder) as store:
        for name, status in (("done", "finished"), ("half", "interrupted")):
            store.runs.create(name, msgspec.to_builtins(RunConfig(method="fedavg", rounds=3, seed=5)))
            store.runs.update(name, status=status, classes=["ant", "bee"], protocol="each device's own test images")
        store.rounds.open("done", 1, ["pi-1", "pi-2"])
        for device, right in (("pi-1", 4.0), ("pi-2", 3.0)):
            use = ResourceUse(step_s=0.01, flops=10**9, peak_rss_bytes=10**8, received_bytes=10**6, sent_bytes=10**5)
            add_result(store, device, messages.Result("done", 1, "train", 10, {"loss": 0.5}, use))
            add_result(store, device, messages.Result("done", 1, "evaluate", 5, {"correct": right}, ResourceUse()))
        store.rounds.close("done", 1, SavedState({}, None, {}), {})
        store.rounds.close_evaluation("done", 1)
        store.devices.add_refusal(
            "done", RefusalRecord(1, "pi-3", "train", "'head.bias' holds [3] values that are NaN")
        )
        yield folder


@pytest.fixture
def forked_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process that has torch at once; it is not told of a run, so it opens no database."""
    monkeypatch.setattr("coordinator.compute.process.spawn", ForkedWorker)


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
    lines = said("runs", "--runs", out).output.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["half", "done"]
    assert lines[2].split()[-4:] == ["0/3", "–", "0", "B"]
    assert lines[3].split()[-4:-2] == ["1/3", "0.700"]  # (4/5 + 3/5) / 2


def test_runs_as_json(out: Path) -> None:
    listed = json.loads(said("runs", "--runs", out, "--json").output)
    assert [entry["run"] for entry in listed] == ["half", "done"]
    assert listed[1] == {
        "run": "done",
        "created_at": listed[1]["created_at"],
        "status": "finished",
        "reason": None,
        "method": "fedavg",
        "model": "vit_small_images",
        "seed": 5,
        "settings": {"method": "fedavg", "seed": 5, "rounds": 3},
        "rounds": 1,
        "rounds_planned": 3,
        "mean_accuracy": pytest.approx(0.7),
        "bytes": 0,
    }


def test_show_prints_the_tables(out: Path) -> None:
    output = said("show", "done", "--runs", out).output
    for text in (
        "run done: fedavg on vit_small_images, finished, 1 of 3 rounds, seed 5",
        "accuracy by round",
        "pi-1",
        "0.800",
        "0.600",
        "0.700",
        "each device's own",
        "2 classes: ant, bee",
        "devices",
        "refused or lost",
        "'head.bias' holds [3] values that are NaN",
    ):
        assert text in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_show_as_json(out: Path) -> None:
    shown: dict[str, Any] = json.loads(said("show", "done", "--runs", out, "--json").output)
    assert (shown["run"], shown["status"], shown["classes"]) == ("done", "finished", ["ant", "bee"])
    assert shown["mean_accuracy"] == pytest.approx(0.7)
    assert (shown["bytes_down"], shown["bytes_up"], shown["max_edge_rss_bytes"]) == (2 * 10**6, 2 * 10**5, 10**8)
    assert [entry["device"] for entry in shown["devices"]] == ["pi-1", "pi-2"]
    assert shown["rounds"][0]["accuracy"] == {"pi-1": 0.8, "pi-2": 0.6}
    assert shown["refusals"][0]["device"] == "pi-3"


def test_an_unknown_run_is_one_line(out: Path) -> None:
    line = one_line(as_process("show", "yesterday", "--runs", out), ConfigError.exit_code)
    assert "'yesterday'" in line


def test_a_folder_without_runs_is_named_and_left_alone(tmp_path: Path) -> None:
    for command in (("runs",), ("show", "r")):
        assert str(tmp_path / "none") in refused(*command, "--runs", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_record_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fedvit.db").write_bytes(b"something else entirely " * 100)
    line = one_line(as_process("runs", "--runs", tmp_path), StorageFailed.exit_code)
    assert "fedvit.db" in line
    assert "not a database" in line


def test_commands_that_only_read_import_no_torch(out: Path) -> None:
    """Nor anything else that takes seconds; in a process of their own, since this one has it."""
    commands = [["runs"], ["show", "done"], ["status", "done"], ["quarantine", "done"], ["devices", "--help"]]
    script = (
        "import sys; from click.testing import CliRunner; from coordinator.cli import cli\n"
        f"for command in {[[*given, '--runs', str(out)] for given in commands]}: CliRunner().invoke(cli, command)\n"
        f"CliRunner().invoke(cli, ['report', 'done', '--runs', {str(out)!r}, '--json'], catch_exceptions=False)\n"
        "print([name for name in ('torch', 'timm', 'onnx', 'onnxruntime', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip() == "[]"


# --- start --------------------------------------------------------------------------------------------


def test_a_typing_error_in_the_file_is_one_line(tmp_path: Path) -> None:
    """And nothing is made."""
    file = tmp_path / "run.toml"
    file.write_text("rounds = 3\nquorun = 0.5\n")
    line = one_line(as_process("start", "--config", file, "--runs", tmp_path / "runs"), ConfigError.exit_code)
    assert line == f"coordinator: {file}: unknown key 'quorun'; did you mean 'quorum'? [FV1002]"
    assert not (tmp_path / "runs").exists()


def test_an_unknown_flag_is_named() -> None:
    result = said("start", "--quorun", "0.5")
    assert result.exit_code == 2
    assert "--quorun" in result.output
    assert "--quorum" in result.output


def test_there_may_be_nothing_to_resume(tmp_path: Path, out: Path) -> None:
    assert "no run to resume" in refused("start", "--resume", "--runs", tmp_path / "fresh")
    assert refused("start", "--resume", "done", "--runs", out) == "run 'done' is finished; there is nothing to resume"
    assert "'other'" in refused("start", "--resume", "other", "--runs", out)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--rounds", 2), "rounds = 3, and now rounds = 2 is asked for: a resumed run can have more rounds"),
        (("--devices", 2), "devices = 1, and now devices = 2 is asked for: a resumed run can wait for fewer"),
        (
            ("--seed", 6),
            "seed = 5, and now seed = 6 is asked for: only rounds, devices, stop rules, metrics, blobs and alerts of a "
            "resumed run may change",
        ),
        (("--images.flip",), "images.flip = False, and now images.flip = True is asked for"),
        (("-o", "lr=0.5"), "options.lr = None, and now options.lr = 0.5 is asked for"),
    ],
)
def test_resume_refuses_what_differs(out: Path, flags: tuple[object, ...], complaint: str) -> None:
    assert f"run 'half' began with {complaint}" in refused("start", "--resume", "half", *flags, "--runs", out)


def test_start_whose_port_is_busy_leaves_nothing_behind(out: Path, tmp_path: Path, forked_worker: None) -> None:
    """Neither a run in the record nor its folder, nor a folder of runs that was not there before."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for folder in (out, tmp_path / "fresh"):
            complaint = refused("start", "--broker.listen", listen, "--run", "new", "--runs", folder, "--quiet")
            assert complaint.startswith(f"port {listen.partition(':')[2]} on 127.0.0.1 is in use")
    assert not (tmp_path / "fresh").exists()
    assert not (out / "new").exists()
    assert "new" not in [record.id for record in open_record(out).runs.read_all()]


def test_start_resume_or_new_wants_a_name(out: Path) -> None:
    assert "needs the name of the run by --run NAME" in refused("start", "--resume-or-new", "--runs", out)


def test_start_resume_or_new_has_nothing_to_do_for_a_finished_run(out: Path) -> None:
    """Also with the file that it began with; a service manager may start it as often as it likes."""
    file = out / "run.toml"
    file.write_text('method = "fedavg"\nrounds = 3\nseed = 5\n')
    done = said("start", "--config", file, "--run", "done", "--resume-or-new", "--runs", out)
    assert done.exit_code == 0
    assert done.exception is None
    assert "run done is finished: there is nothing to do" in done.stderr


@pytest.mark.parametrize("how", [("--resume",), ("--resume", "half")])
def test_a_run_is_served_once(out: Path, how: tuple[str, ...]) -> None:
    """Without a name the newest unfinished run is meant."""
    (out / "half").mkdir()
    with open(out / "half" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refused("start", *how, "--runs", out) == "run 'half' is being served by another coordinator"


def test_a_start_takes_from_others_what_an_earlier_version_left_open(out: Path) -> None:
    """Folders of all runs and the record. The folder around them may be one that the operator shares."""
    for name in (".", "done", "half"):
        (out / name).mkdir(exist_ok=True)
        (out / name).chmod(0o755)
    (out / "fedvit.db").chmod(0o644)
    assert "exists already" in refused("start", "--run", "half", "--runs", out)
    modes = {name: (out / name).stat().st_mode & 0o777 for name in (".", "done", "half", "fedvit.db")}
    assert modes == {".": 0o755, "done": 0o700, "half": 0o700, "fedvit.db": 0o600}


def test_a_new_run_needs_a_new_name(out: Path) -> None:
    assert "run 'half' exists already; resume it with --resume half" in refused("start", "--run", "half", "--runs", out)
    assert "--run 'a b' must be" in refused("start", "--run", "a b", "--runs", out)


@pytest.mark.parametrize("name", ["-x", "..", "a/b", "a ", "x" * 65])
def test_a_name_that_no_folder_should_have_makes_no_run(out: Path, name: str) -> None:
    before = {path for path in out.rglob("*") if "fedvit.db" not in path.name}
    assert refused("start", "--runs", out, "--run", name).startswith(f"--run {name!r} must be 1 to 64 letters, digits")
    assert {path for path in out.rglob("*") if "fedvit.db" not in path.name} == before


@pytest.mark.usefixtures("forked_worker")
def test_an_accelerator_that_is_not_there_is_named_and_no_run_is_made(out: Path) -> None:
    said = refused("start", "--accelerator", "warp", "--run", "new", "--runs", out, "--quiet")
    assert said.startswith("accelerator = 'warp' cannot be used: ")
    assert "\n" not in said
    assert "new" not in [record.id for record in open_record(out).runs.read_all()]
    assert choose_accelerator("cpu") == "cpu"
    assert choose_accelerator("auto") in ("cpu", "cuda")


# --- variants -----------------------------------------------------------------------------------------


def test_variants_by_flag_go_over_those_of_the_file() -> None:
    """One option a flag; values are numbers where they look so, and a name may hold no colon before its first."""
    file = {"method": "eftvit", "variants": {"pi-*": {"mask": 0.5, "epochs": 1}}}
    flags = {"variants": {"pi-*": {"mask": 0.75}, "jetson-*": {"batch_size": 64, "optimizer": "sgd"}}, "rounds": None}
    merged = merge_flags(file, flags)
    assert merged["variants"] == {
        "pi-*": {"mask": 0.75, "epochs": 1},
        "jetson-*": {"batch_size": 64, "optimizer": "sgd"},
    }
    assert make_config(merged, "test").run.variants == merged["variants"]
    assert file["variants"] == {"pi-*": {"mask": 0.5, "epochs": 1}}, "the file's own table was written to"


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("batch_size=64", "--variant 'batch_size=64' must be written DEVICES:KEY=VALUE"),
        ("pi-*:batch_size", "--variant 'pi-*:batch_size' must be written DEVICES:KEY=VALUE"),
        ("pi-*:batch_size=0", "variants: 'pi-*': option batch_size = 0 of method 'eftvit'"),
        ("pi-*:bach_size=8", "variants: 'pi-*': method 'eftvit' has no option 'bach_size'"),
    ],
)
@pytest.mark.usefixtures("forked_worker")
def test_a_variant_that_cannot_be_is_named(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refused("start", "--variant", flag, "--runs", tmp_path / "runs", "--quiet")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("wrong", [3, {"pi-*": 3}])
def test_a_files_variants_of_another_kind_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1004")):
        make_config(merge_flags({"variants": wrong}, {"variants": {"pi-*": {"epochs": 2}}}), "test")


# --- methods ------------------------------------------------------------------------------------------


def test_methods_lists_what_was_asked_for() -> None:
    output = said("methods", "--method", "fedper", "--method", "local").output
    for text in ("fedper", "arXiv:1912.00818", "trains and returns shared", "up: changes of shared", "nothing"):
        assert text in output
    assert "eftvit" not in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_methods_as_json() -> None:
    """A head of 65 numbers for each of 7 classes stays on the device; everything is float32."""
    [entry] = json.loads(said("methods", "fedper", "--classes", "7", "--model-option", "depth=2", "--json").output)
    assert (entry["name"], entry["travels"]) == ("fedper", "down: shared; up: changes of shared")
    assert entry["on_device"] == "trains and returns shared; trains and keeps personal"
    assert entry["bytes_once"] == 4 * 7 * 65
    assert entry["bytes_down"] == entry["bytes_up"] == 4 * (entry["parameters"] - 7 * 65)


def test_one_method_in_full() -> None:
    output = said("methods", "eftvit", "--option", "local_blocks=1").output
    for text in ("eftvit on vit_small_images, 10 classes", "local_blocks", "number >= 0 < 1", "features.1", "seeded"):
        assert text in output
    assert all(len(line) <= 80 for line in output.splitlines())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nosuch",), "unknown method 'nosuch'"),
        (("--method", "nosuch"), "unknown method 'nosuch'"),
        (("apfl", "--method", "fedavg"), "methods apfl shows that one method; --method fedavg is for the list"),
        (("--model", "vit_smal"), "unknown model 'vit_smal'"),
        (("--model-option", "widht=3"), "has no option 'widht'"),
        (("--option", "mu=0.5"), "has no option 'mu'"),
        (("fedavg", "--option", "epochs=0"), "option epochs = 0 of method 'fedavg'"),
        (("fedavg", "--option", "epochs"), "option 'epochs' must be written KEY=VALUE"),
        (("fedavg", "--classes", "0"), "--classes 0 must be at least 1"),
    ],
)
def test_methods_that_cannot_be_shown(arguments: tuple[str, ...], complaint: str) -> None:
    assert complaint in refused("methods", *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint", "unneeded"),
    [
        (
            ["start", "--method", "fedav"],
            "flags: unknown method 'fedav'; did you mean 'fedavg'",
            "torch numpy sqlalchemy",
        ),
        (["start", "--resume", "nosuch"], "no run 'nosuch'", "torch numpy"),
        (
            ["start", "-o", "maks=0.5"],
            "flags: method 'eftvit' has no option 'maks'; did you mean 'mask'?",
            "torch numpy sqlalchemy",
        ),
        (["start", "--model", "vit_tiny_patch16_22"], "did you mean 'vit_tiny_patch16_224'", "torch numpy sqlalchemy"),
        (
            ["start", "--model-option", "dept=2"],
            "model 'vit_small_images' has no option 'dept'; did you mean",
            "torch numpy sqlalchemy",
        ),
        (
            ["start", "--variant", "pi-*:lrr=1"],
            "variants: 'pi-*': method 'eftvit' has no option 'lrr'",
            "torch numpy sqlalchemy",
        ),
        (
            ["submit", "--method", "fedav"],
            "unknown method 'fedav'; did you mean 'fedavg'",
            f"torch rich http.client {DRIVERS}",
        ),
        (["show", "dome"], "no run 'dome'; did you mean 'done'? The newest runs are: half, done", "torch numpy"),
        (["runs"], None, f"torch numpy {DRIVERS}"),
        (["show", "done"], None, f"torch numpy {DRIVERS}"),
        (["status"], "no coordinator has served", f"torch numpy rich {DRIVERS}"),
    ],
)
def test_a_command_imports_what_it_needs(out: Path, arguments: list[str], complaint: str | None, unneeded: str) -> None:
    """Seconds in which nothing would be said."""
    script = (
        "import sys\nfrom coordinator.cli import cli\ntry: cli(sys.argv[2:], standalone_mode=False)\n"
        "except Exception as error: print(error)\n"
        "print('imported', sorted(set(sys.argv[1].split()) & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", script, unneeded, *arguments, "--runs", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert ended.stdout.endswith("imported []\n"), ended.stdout
    assert complaint is None or complaint in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["methods", "eftvitt"], "unknown method 'eftvitt'; did you mean 'eftvit'"),
        (["methods", "--model", "vit_smal_images"], "did you mean 'vit_small_images'"),
        (["plan", "--device", "rpi5-9"], "no board 'rpi5-9' in the catalogue; did you mean rpi5-8"),
        (["plan", "--device", "rpi5-8", "--method", "fedav"], "unknown method 'fedav'; did you mean 'fedavg'"),
        (["profile", "--device", "rpi5-8", "-o", "maks=1"], "has no option 'maks'; did you mean 'mask'"),
        (["profile", "--device", "rpi5-8@MAXN"], "board 'rpi5-8' has no power mode 'MAXN'"),
    ],
)
def test_a_mistyped_name_is_refused_before_torch_is_imported(arguments: list[str], complaint: str) -> None:
    script = (
        "import sys\nfrom coordinator.cli import cli\ntry: cli(sys.argv[1:], standalone_mode=False)\n"
        "except Exception as error: print(error)\nprint('imported', {'torch', 'timm', 'numpy'} & sys.modules.keys())"
    )
    ended = run_child([sys.executable, "-c", script, *arguments], check=True)
    assert complaint in ended.stdout
    assert ended.stdout.endswith("imported set()\n"), ended.stdout


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--mode", "bufered", "allowed are buffered | rounds; did you mean 'buffered'?"),
        ("--late", "accept", "allowed are discount | refuse | use"),
        (
            "--robust.aggregator",
            "medain",
            "allowed are geometric_median | krum | mean | median | multi_krum | trimmed_mean",
        ),
        ("--deadline-s", "soon", "allowed are auto | number > 0"),
        ("--robust.clip-norm", "midian", "allowed are median | number | none; did you mean 'median'?"),
        ("--privacy.accounting", "always", "allowed are every_round | sampled"),
    ],
)
def test_a_value_that_is_not_allowed_is_answered_with_those_that_are(flag: str, value: str, complaint: str) -> None:
    line = refused("start", flag, value)
    assert complaint in line
    assert "enum" not in line


def test_help_shows_flags_by_what_they_are_about() -> None:
    """None of a run's is left among those of the command itself."""
    text = said("start", "--help").stdout
    own = text.split("\nOptions:")[1].split("\n\n")[0]
    flags = [line.split()[0].rstrip(",") for line in own.splitlines() if line.startswith("  -")]
    assert flags == [
        "--config", "--runs", "--record", "--resume", "--run", "--resume-or-new", "--check", "--quiet", "--prometheus",
        "--prometheus-password-file", "--log-format", "--help",
    ]  # fmt: skip
    robust = text.split("Table [robust]:")[1].split("\n\n")[0]
    assert "--robust.aggregator" in robust
    assert "--robust.malicious-share" in robust
    assert "Rounds and devices:" in text
    assert "Table [broker]:" in said("serve", "--help").stdout


def test_help_shows_the_values_of_a_flag() -> None:
    text = " ".join(said("start", "--help").stdout.split())
    for flag in ("--mode buffered|rounds", "--late discount|refuse|use", "--deadline-s auto|NUMBER"):
        assert flag in text
    assert "--robust.aggregator geometric_median|krum|mean|median|multi_krum|trimmed_mean" in text
    assert "--budget.memory-budget AMOUNT" in text
    assert "--pretrained true|FILE" in text


# --- what can be known at the start -------------------------------------------------------------------

TIMM = ("--method", "fedavg", "--model", "vit_tiny_patch16_224", "--model-option", "image_size=32")


@pytest.mark.usefixtures("forked_worker")
def test_check_describes_run_and_creates_nothing(tmp_path: Path) -> None:
    result = said("start", "--check", "--runs", tmp_path / "runs", "--method", "fedavg", "--devices", 3, "--run", "r")
    assert result.exit_code == 0, result.output
    for text in (
        "run r can begin: fedavg on vit_small_images, 10 rounds, server on cpu",
        "classes: those of the devices",
        "devices = 3",
        "waits for 3 devices in federation home; broker: auto, on 127.0.0.1:1883",
        "coordinator plan --method fedavg --model vit_small_images --device ID",
    ):
        assert text in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("forked_worker")
def test_check_of_a_run_that_is_resumed(out: Path) -> None:
    result = said("start", "--check", "--resume", "half", "--runs", out)
    assert "would resume run half: fedavg on vit_small_images, 3 rounds" in result.stdout


@pytest.mark.usefixtures("forked_worker")
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model-option", "image_size=100", *TIMM[:4]), "image_size = 100 is not a multiple of patch_size = 16"),
        (("--pretrained", "junk.pth", *TIMM), "('junk.pth') cannot be loaded"),
        (("--pretrained", "small.safetensors", *TIMM), "cannot be loaded"),
        (("--pretrained", "true", *TIMM), "(True) cannot be loaded"),
        (("--start-from", "nosuch", "--run", "new"), "no run 'nosuch'; the newest runs are: half, done"),
        (("--start-from", "half"), "start_from = 'half': that run closed no round"),
    ],
)
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_what_cannot_begin_is_refused_before_any_device_is_waited_for(
    out: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], complaint: str, check: tuple[str, ...]
) -> None:
    monkeypatch.chdir(out.parent)
    Path("junk.pth").write_bytes(b"no checkpoint")
    save_file({"cls_token": np.zeros((1, 1, 7), np.float32)}, "small.safetensors")
    result = said("start", "--runs", out, "--broker", "mqtt://127.0.0.1:1", *flags, *check)
    assert isinstance(result.exception, ConfigError), result.output
    assert complaint in str(result.exception)
    assert [record.id for record in open_record(out).runs.read_all()] == ["half", "done"]


@pytest.mark.usefixtures("forked_worker")
def test_start_warns_of_a_random_backbone_that_is_never_trained(tmp_path: Path) -> None:
    result = said("start", "--check", "--runs", tmp_path / "runs", "--method", "fed_head")
    assert "of the model is random and never trained: give it weights with --pretrained" in result.output
    assert "never trained" not in said("start", "--check", "--runs", tmp_path / "runs", "--method", "fedavg").output


@pytest.mark.usefixtures("forked_worker")
def test_start_warns_of_tensors_missing_in_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(
        build_vit("vit_tiny_patch16_224", 7, seed=1, options={"image_size": 48}).vit.state_dict(), file
    )
    output = said("start", "--check", "--runs", tmp_path / "runs", "--pretrained", file, *TIMM).output
    assert "pos_embed has shape (1, 10, 192) there and (1, 5, 192) here: it is resampled" in output
    assert "its head (for 7 classes) is replaced" in output


def test_status_of_finished_run_has_no_activity(out: Path) -> None:
    left = {
        "at": "2026-01-02T03:04:05+00:00",
        "doing": "server epoch 3/4",
        "waiting_for": [],
        "resting": [],
        "online": 2,
    }
    for run in ("done", "half"):
        (out / run).mkdir()
        (out / run / "status.json").write_text(json.dumps(left))
    told = json.loads(said("status", "done", "--runs", out, "--json").stdout)
    assert (told["doing"], told["online"]) == ("finished", 0)
    assert json.loads(said("status", "half", "--runs", out, "--json").stdout)["doing"] == "server epoch 3/4"


def _as_everybody() -> None:
    """From the next program on, root is held to the modes of files, too."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def test_reading_needs_no_permission_to_write(out: Path) -> None:
    """Nor do the files that SQLite writes beside a database that it reads."""
    for file in out.iterdir():
        file.chmod(0o444)
    out.chmod(0o555)
    before = sorted(out.iterdir())
    try:
        for command in (("runs", "--runs"), ("show", "done", "--runs"), ("report", "done", "--runs")):
            done = subprocess.run(
                [*PROGRAM, *command, str(out)],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
                preexec_fn=_as_everybody,
            )
            assert done.returncode == 0, done.stderr
            assert "done" in done.stdout
        refused_rm = subprocess.run(
            [*PROGRAM, "rm", "done", "--runs", str(out)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            preexec_fn=_as_everybody,
        )
        assert refused_rm.returncode == StorageFailed.exit_code, refused_rm.stderr
    finally:
        out.chmod(0o755)
        for file in out.iterdir():
            file.chmod(0o644)
    assert sorted(out.iterdir()) == before


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from coordinator.cli import main; main()"
LR, LOCAL_BLOCKS = "of method 'eftvit'", "option local_blocks = {} must be at most {}: model {!r} has {} blocks"
WRONG_VALUES: list[tuple[str, str, dict[str, Any]]] = [
    ("-o lr=-1", f"option lr = -1 {LR}: Expected `float` > 0.0", {"options": {"lr": -1}}),
    ("-o lr=nan", f"option lr = nan {LR} must be a finite number", {"options": {"lr": math.nan}}),
    ("-o lr=fast", f"option lr = 'fast' {LR}: Expected `float`, got `str`", {"options": {"lr": "fast"}}),
    ("-o batch_size=0", f"option batch_size = 0 {LR}: Expected `int` >= 1", {"options": {"batch_size": 0}}),
    ("-o batch_size=16.5", f"option batch_size = 16.5 {LR}: Expected `int`", {"options": {"batch_size": 16.5}}),
    (
        "-o local_blocks=2 --model-option depth=2",
        LOCAL_BLOCKS.format(2, 1, "vit_small_images", 2),
        {"options": {"local_blocks": 2}, "model_options": {"depth": 2}},
    ),
    (
        "-o local_blocks=12 --model vit_tiny_patch16_224",
        LOCAL_BLOCKS.format(12, 11, "vit_tiny_patch16_224", 12),
        {"options": {"local_blocks": 12}, "model": "vit_tiny_patch16_224"},
    ),
    (
        "--variant pi-*:local_blocks=6",
        "variants: 'pi-*': " + LOCAL_BLOCKS.format(6, 5, "vit_small_images", 6),
        {"variants": {"pi-*": {"local_blocks": 6}}},
    ),
    (
        "--model vit_tiny_patch16_224 --model-option image_size=100",
        "model option image_size = 100 is not a multiple of patch_size = 16",
        {"model": "vit_tiny_patch16_224", "model_options": {"image_size": 100}},
    ),
    (
        "--model-option image_size=101",
        "model option image_size = 101 is not a multiple of patch_size = 4",
        {"model_options": {"image_size": 101}},
    ),
]


@pytest.mark.parametrize(
    ("flags", "complaint", "values"),
    [pytest.param(*case, marks=pytest.mark.slow if at % 4 else ()) for at, case in enumerate(WRONG_VALUES)],
    ids=[flags for flags, *_ in WRONG_VALUES],
)
def test_a_wrong_value_is_refused_without_torch(
    flags: str, complaint: str, values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(values))
    for where, arguments in (("flags", flags.split()), (str(file), ["--config", str(file)])):
        command = [sys.executable, "-c", WITHOUT_TORCH, "start", "--runs", str(tmp_path / "runs"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert f"{where}: {complaint}" in one_line(done, 2)
    assert not (tmp_path / "runs").exists()


def test_a_run_is_submitted_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "submit", "--runs", str(tmp_path), "--run", "one", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert json.loads(done.stdout)["status"] == "queued", done.stderr


@pytest.mark.parametrize("command", [["submit"], ["plan", "--device", "rpi5-8"], ["methods", "eftvit"]])
def test_other_commands_refuse_a_wrong_value_without_torch(command: list[str], tmp_path: Path) -> None:
    runs = ["--runs", str(tmp_path)] if command == ["submit"] else []
    done = run_child([sys.executable, "-c", WITHOUT_TORCH, *command, *runs, "-o", "lr=-1"])
    assert "option lr = -1 of method" in one_line(done, 2)


# --- metrics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["start"], ["submit"]])
def test_a_writer_whose_library_is_missing_is_refused(command: list[str], tmp_path: Path) -> None:
    """Before anything is opened, in one line that says what to install."""
    blocked = "import sys; sys.modules['mlflow'] = None; from coordinator.cli import main; main()"
    arguments = [*command, "--runs", str(tmp_path / "runs"), "--trackers.writer", "mlflow"]
    done = run_child([sys.executable, "-c", blocked, *arguments])
    assert "writers: 'mlflow' needs the package 'mlflow'" in one_line(done, 2)
    assert "pip install 'fedvit[mlflow]'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_metrics_of_an_earlier_run(out: Path) -> None:
    """It had no writers; what a second call finds written stays as it is."""
    assert "run 'done' has no writers of its own" in refused("show", "done", "--track", "--runs", out)
    for rounds in ("1 round", "0 rounds"):
        assert (
            f"{rounds} written to TensorBoard"
            in said("show", "done", "--runs", out, "--trackers.writer", "tensorboard").output
        )
    [written] = json.loads(said("show", "done", "--runs", out, "--trackers.writer", "tensorboard", "--json").stdout)
    assert written["rounds"] == 0
    assert written["where"].startswith("TensorBoard")
    assert scalars(out / "done")["accuracy/mean"] == [(1, pytest.approx(0.7))]


def test_a_password_in_the_address_of_a_server_is_refused(tmp_path: Path) -> None:
    told = refused(
        "start", "--runs", tmp_path, "--trackers.writer", "mlflow", "--trackers.mlflow-uri", "https://me:secret@mlflow"
    )
    assert "MLFLOW_TRACKING_PASSWORD in the environment" in told
    assert "secret" not in told


def test_a_writer_that_there_is_not_is_refused(tmp_path: Path) -> None:
    told = refused("start", "--runs", tmp_path, "--trackers.writer", "tensorbord")
    assert "allowed are mlflow | tensorboard" in told
