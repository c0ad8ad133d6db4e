"""A trained model leaves the system: written by the coordinator or a device, run by plain onnxruntime."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import onnxruntime
import pytest
import timm
import torch
import yaml
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard

import coordinator.cli
import edge_client.cli
from coordinator.record.record import open_record
from edge_client.storage.models import DeviceModels
from edge_client.storage.state import device_id
from edge_client.storage.vault import Vault
from export.bundle.read import Bundle
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.data.images import unfold
from fedvit.errors import ConfigError, DataError, DiskFull, FedvitError, StorageFailed
from fedvit.onnx_model import read_model
from fedvit.program import Program, decode_program
from fedvit.tensors import unpack
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate
from tests.support.programs import CONFIG, program

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedbfpt": {"local_blocks": 2},
    "fedper": {},
    "fedbabu": {},
    "knn_per": {"capacity": 20},
    "fedtp": {},
    "pfedpg": {},
    "scaffold": {},
    "fed_lora": {"rank": 4, "alpha": 12.0},
}
"""Shared alone; other blocks each round; with local tensors; tuned to answer; with neighbours; made for each
device; tested as it was kept; with tensors that training alone reads; with low-rank additions."""

DEVICES = ("device-0", "device-1")
DEVICE = "device-1"


class Trained(NamedTuple):
    """A finished run in memory, named after its method; its devices keep their state below it."""

    name: str
    runs: Path
    parts: Path

    @property
    def data(self) -> Path:
        return self.parts / DEVICE

    @property
    def state(self) -> Path:
        return self.runs / self.name / "state" / DEVICE

    def program(self) -> tuple[Program, BlobStore]:
        store, blobs = open_record(self.runs), BlobStore(self.runs / self.name / "blobs")
        digest = store.runs.read(self.name).program
        store.close()
        assert digest is not None
        return decode_program(blobs.get(digest)), blobs

    def tested(self) -> tuple[int, int]:
        """Right answers and images of the device's last evaluation in the run."""
        with open_record(self.runs) as store:
            [*_, last] = [
                entry for entry in store.tasks.read_results(self.name, kind="evaluate") if entry.device == DEVICE
            ]
        return int(last.metrics["correct"]), last.samples


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, parts: Path, graph_cache: Path) -> Callable[[str], Trained]:
    """Two rounds of a method on two devices; not to be changed."""
    made: dict[str, Trained] = {}

    def train(method: str) -> Trained:
        if method not in made:
            runs = tmp_path_factory.mktemp(method)
            options = {"batch_size": 8, "epochs": 1, "lr": 0.01, **METHODS[method]}
            values = {**CONFIG, "method": method, "rounds": 2, "options": options, "variants": {}}
            folders = [parts / name for name in DEVICES]
            simulate(RunRequest(folders, values, out=runs, run=method, graph_cache=graph_cache))
            for name in DEVICES:
                device_id(runs / method / "state" / name, name, parts / name)
            made[method] = Trained(method, runs, parts)
        return made[method]

    return train


@pytest.fixture
def copied(trained: Callable[[str], Trained], tmp_path: Path) -> Callable[[str], Trained]:
    """A run that may be damaged."""

    def copy(method: str) -> Trained:
        run = trained(method)
        return run._replace(runs=Path(shutil.copytree(run.runs, tmp_path / "runs")))

    return copy


def on_server(run: Trained, out: Path, *arguments: object) -> Result:
    given = ["export", run.name, "--runs", run.runs, "--out", out, "--threads", 1, *arguments]
    return CliRunner().invoke(coordinator.cli.cli, list(map(str, given)))


def on_device(run: Trained, out: Path, *arguments: object) -> Result:
    given = ["export", run.name, "--data", run.data, "--state", run.state, "--out", out, "--threads", 1, *arguments]
    return CliRunner().invoke(edge_client.cli.cli, list(map(str, given)))


def assert_refused(done: Result, kind: type[FedvitError], *named: object) -> None:
    assert isinstance(done.exception, kind), (done.output, done.exception)
    for text in named:
        assert str(text) in str(done.exception)


def pictures(run: Trained) -> tuple[Any, Any]:
    """The device's test images as any tool would prepare them, and their labels."""
    images = DeviceData.open(run.data).relabel(run.program()[0].classes).test
    pixels, readable = images.load(np.arange(len(images)), 32)
    assert readable.all()
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32).transpose(0, 3, 1, 2), images.labels


def answers(bundle: Path, file: str, images: Any) -> tuple[Any, Any]:
    session = onnxruntime.InferenceSession(str(bundle / file), providers=["CPUExecutionProvider"])
    logits, probabilities = session.run(["logits", "probabilities"], {"image": images})
    return logits, probabilities


# --- what comes out -----------------------------------------------------------------------------------


FAST = ("fedavg", "fedper", "fedtp")


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method in FAST else pytest.mark.slow) for method in METHODS]
)
def test_a_device_exports_what_it_tested(trained: Callable[[str], Trained], tmp_path: Path, method: str) -> None:
    """Whatever an evaluation does before it answers is in the bundle: it is right on as many images."""
    run, out = trained(method), tmp_path / "bundle"
    done = on_device(run, out, "--json")
    assert done.exit_code == 0, done.output
    card = json.loads((out / "card.json").read_text())
    assert card["origin"]["run"] == method
    assert (card["origin"]["round"], card["origin"]["device"]) == (2, DEVICE)
    assert card["origin"]["adapted"] == (method == "fedbabu")
    assert (card["training"]["devices"], card["training"]["train_images"]) == (1, len(DeviceData.open(run.data).train))
    assert card["training"]["policy"][1].startswith("may be sent: ")
    assert card["origin"]["remembered"] == (20 if method == "knn_per" else 0)
    assert bool(card["origin"]["personal_tensors"]) == (method in ("fedper", "pfedpg"))
    images, labels = pictures(run)
    right, count = run.tested()
    assert count == len(images)
    for precision, entry in card["files"].items():
        assert entry["size_bytes"] == (out / entry["file"]).stat().st_size
        logits, probabilities = answers(out, entry["file"], images)
        assert int((probabilities.argmax(axis=1) == labels).sum()) == entry["accuracy"]["correct"]
        assert entry["accuracy"]["images"] == count
        np.testing.assert_array_equal(logits.argmax(axis=1), probabilities.argmax(axis=1))
        assert entry["latency"]["median_s"] > 0
        assert (entry["agreement"] is None) == (precision == "fp32")
    assert card["files"]["fp32"]["accuracy"]["correct"] == right
    sizes = [card["files"][precision]["size_bytes"] for precision in ("fp32", "fp16", "int8")]
    assert sizes == sorted(sizes, reverse=True)
    text = (out / "README.md").read_text()
    personal = method in ("fedper", "pfedpg", "fedbabu", "knn_per")
    assert ("**Personal.**" in text) == personal
    assert str(sizes[0]) in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedbfpt", "scaffold"))]
)
def test_the_server_exports_the_runs_model(trained: Callable[[str], Trained], tmp_path: Path, method: str) -> None:
    """The run's graph with the tensors of model.safetensors gives the same logits; nothing was measured on images."""
    run, out = trained(method), tmp_path / "bundle"
    done = on_server(run, out)
    assert done.exit_code == 0, done.output
    held, blobs = run.program()
    images, _ = pictures(run)
    tensors = unpack((run.runs / run.name / "model.safetensors").read_bytes())
    assert_same_logits(out, held, blobs, tensors, images)
    card = json.loads((out / "card.json").read_text())
    assert all(entry["accuracy"] is None for entry in card["files"].values())
    assert card["origin"]["device"] is None
    assert card["pictures"] == "64 random pictures"
    assert card["reported"]["devices"] == 2
    assert "not measured" in (out / "README.md").read_text()
    assert json.loads((out / "labels.json").read_text()) == list(held.classes)


@pytest.mark.parametrize("engine", ["torch", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_simulation_without_graphs_is_exported_afterwards(
    trained: Callable[[str], Trained], tmp_path: Path, graph_cache: Path, engine: Engine
) -> None:
    """FedLoRA: its frozen backbone, too, is in no blob of the run. The engine onnx trains the same model."""
    run = trained("fed_lora")
    options = {"batch_size": 8, "epochs": 1, "lr": 0.01, **METHODS["fed_lora"]}
    values = {**CONFIG, "method": "fed_lora", "rounds": 2, "options": options, "variants": {}}
    folders = [run.parts / name for name in DEVICES]
    runs = tmp_path / "runs"
    simulate(RunRequest(folders, values, out=runs, run="fed_lora", graph_cache=graph_cache, engine=engine))
    for name, made in (("simulated", run._replace(runs=runs)), ("onnx", run)):
        done = on_server(made, tmp_path / name, "--precision", "fp32")
        assert done.exit_code == 0, done.output
    images, _ = pictures(run)
    (mine, _), (theirs, _) = (answers(tmp_path / name, "model.onnx", images) for name in ("simulated", "onnx"))
    np.testing.assert_allclose(mine, theirs, atol=2e-3)


def test_the_server_exports_what_it_made_for_a_device(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """FedTP: shared tensors and those generated for the device; measured on images that are here."""
    run, out = trained("fedtp"), tmp_path / "bundle"
    done = on_server(run, out, "--device", DEVICE, "--data", run.data, "--precision", "int8", "--precision", "fp32")
    assert done.exit_code == 0, done.output
    home = run.runs / run.name
    tensors = unpack((home / "model.safetensors").read_bytes())
    tensors |= unpack((home / "generated" / f"{DEVICE}.safetensors").read_bytes())
    images, _ = pictures(run)
    assert_same_logits(out, *run.program(), tensors, images)
    card = json.loads((out / "card.json").read_text())
    assert sorted(card["files"]) == ["fp32", "int8"]
    assert not (out / "model.fp16.onnx").exists()
    accuracy = card["files"]["fp32"]["accuracy"]
    assert (accuracy["correct"], accuracy["images"]) == run.tested()
    assert card["reported"]["accuracy"] == accuracy["correct"] / accuracy["images"]


def assert_same_logits(out: Path, held: Program, blobs: BlobStore, tensors: dict[str, Any], images: Any) -> None:
    """The run's predict graph, eight images at a time, in plain onnxruntime."""
    graph = onnxruntime.InferenceSession(blobs.get(held.graphs[held.evaluate.graph].digest))
    unread = {f"tensor/{name}": np.zeros(spec.shape, np.float32) for name, spec in held.tensors.items()}
    fed = unread | {f"tensor/{name}": value for name, value in tensors.items()}
    fed = {node.name: fed[node.name] for node in graph.get_inputs() if node.name in fed}
    patches = unfold(images[:8].transpose(0, 2, 3, 1), held.batch.patch_size)
    [want] = graph.run(["logits"], {**fed, "batch/patches": patches})
    logits, _ = answers(out, "model.onnx", images)
    np.testing.assert_allclose(logits[:8], want, rtol=1e-4, atol=1e-5)


def test_int8_products_are_calibrated_on_the_devices_images(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """Most answers are those of fp32, and any number of pictures gives the same logits as each alone."""
    run, out = trained("fedper"), tmp_path / "bundle"
    done = on_device(run, out, "--precision", "fp32", "--precision", "int8_static", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    static = json.loads((out / "card.json").read_text())["files"]["int8_static"]
    assert static["agreement"]["equal_answers"] >= 0.8
    assert static["parity"]["difference"] <= static["parity"]["tolerance"]
    assert static["size_bytes"] < (out / "model.onnx").stat().st_size
    kinds = [node.kind for node in read_model((out / "model.int8_static.onnx").read_bytes()).nodes]
    # attention's two projections and the two products of the MLP, in three blocks; the last one's queries, keys and
    # values are split
    assert kinds.count("MatMulIntegerToFloat") >= 9
    images, _ = pictures(run)
    for file in ("model.onnx", "model.int8_static.onnx"):
        together, _ = answers(out, file, images[:5])
        for count in (1, 2, 3):
            some, _ = answers(out, file, images[:count])
            np.testing.assert_allclose(some, together[:count], rtol=1e-4, atol=1e-5)


def test_int8_products_need_images(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    refused = on_server(trained("fedavg"), tmp_path / "bundle", "--precision", "int8_static")
    assert_refused(refused, ConfigError, "model.int8_static.onnx", "--data")
    assert not (tmp_path / "bundle").exists()


# --- other formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "name"), [("fedavg", "huggingface"), ("fed_lora", "timm")])
def test_timm_loads_the_model_with_equal_logits(
    trained: Callable[[str], Trained], tmp_path: Path, method: str, name: str
) -> None:
    """LoRA additions are in the weights then; the card of the Hub has the metadata."""
    run, out = trained(method), tmp_path / "folder"
    assert on_server(run, tmp_path / "bundle", "--precision", "fp32").exit_code == 0
    done = on_server(run, out, "--format", name, "--licence", "apache-2.0")
    assert done.exit_code == 0, done.output
    assert str(out) in done.output
    images, _ = pictures(run)
    want, _ = answers(tmp_path / "bundle", "model.onnx", images)
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        got = model(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    config = json.loads((out / "config.json").read_text())["pretrained_cfg"]
    assert config["label_names"] == list(run.program()[0].classes)
    assert config["license"] == "apache-2.0"
    if name == "huggingface":
        _, metadata, text = (out / "README.md").read_text().split("---\n", 2)
        held = yaml.safe_load(metadata)
        assert (held["library_name"], held["license"]) == ("timm", "apache-2.0")
        assert 0 <= held["model-index"][0]["results"][0]["metrics"][0]["value"] <= 1
        assert ModelCard(f"---\n{metadata}---\n{text}").data.pipeline_tag == "image-classification"
        assert "Data: 2 devices" in text


def test_peft_files_are_the_additions_of_the_run(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """PEFT: weight + lora_alpha / r * B A on the backbone that the run began with, and the saved head."""
    run = trained("fed_lora")
    for name in ("peft", "timm"):
        done = on_server(run, tmp_path / name, "--format", name)
        assert done.exit_code == 0, done.output
    adapter = unpack((tmp_path / "peft" / "adapter_model.safetensors").read_bytes())
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    merged = unpack((tmp_path / "timm" / "model.safetensors").read_bytes())
    held, blobs = run.program()
    frozen: dict[str, Any] = {}
    for group in held.groups.values():
        if group.initial:
            frozen |= unpack(blobs.get(group.initial))
    root, names = "base_model.model.", {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name}
    assert len(names) == 3
    for name in names:
        a, b = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        assert len(a) == config["r"] == 8
        weight = f"{name.removeprefix(root)}.weight"
        assert np.abs(b).max() > 0, "it was trained"
        want = frozen[weight] + config["lora_alpha"] / config["r"] * (b @ a)
        np.testing.assert_allclose(merged[weight], want, rtol=1e-5, atol=1e-6)
        assert name.removeprefix(root).endswith(tuple(config["target_modules"]))
    np.testing.assert_array_equal(adapter[f"{root}head.weight"], merged["head.weight"])


def test_formats_refuse_models_that_they_cannot_hold(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    out = tmp_path / "folder"
    assert_refused(on_server(trained("fedavg"), out, "--format", "peft"), ConfigError, "'fedavg'", "LoRA")
    device = on_device(trained("fedavg"), out, "--format", "timm")
    assert_refused(device, ConfigError, "'vit_small_images'", "onnx")
    assert not out.exists()


def test_mlflow_registers_a_version(
    trained: Callable[[str], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    run = trained("fedavg")
    for number in (1, 2):
        done = on_server(run, tmp_path / str(number), "--format", "mlflow", "--licence", "mit")
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"version {number}" in done.output
    client = mlflow.MlflowClient()
    version = client.get_model_version("fedavg", "2")
    assert (version.tags["round"], version.tags["licence"]) == ("2", "mit")
    folder = Path(mlflow.artifacts.download_artifacts(version.source))
    images, _ = pictures(run)
    logits, _ = answers(folder, "model.onnx", images)
    assert logits.shape == (len(images), 10)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedper", "never leave a device"),
        pytest.param("fedbabu", "tunes it on its own images", marks=pytest.mark.slow),
        ("knn_per", "features of its own images"),
        pytest.param("pfedpg", "last trained itself", marks=pytest.mark.slow),
    ],
)
def test_the_server_sends_to_the_device(
    trained: Callable[[str], Trained], tmp_path: Path, method: str, reason: str
) -> None:
    done = on_server(trained(method), tmp_path / "bundle")
    assert_refused(done, ConfigError, repr(method), reason, f"edge-client export {method}")
    assert not [*tmp_path.iterdir()]


def test_the_server_names_what_is_wrong(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    fedavg, fedtp, out = trained("fedavg"), trained("fedtp"), tmp_path / "bundle"
    assert_refused(on_server(fedavg._replace(name="nothing"), out), ConfigError, "'nothing'", "fedavg")
    assert_refused(on_server(fedavg._replace(runs=tmp_path), out), ConfigError, tmp_path, "--runs")
    assert_refused(on_server(fedavg, out, "--device", "pi-9"), ConfigError, "'pi-9'", *DEVICES)
    assert_refused(on_server(fedavg, out, "--device", DEVICE), ConfigError, "'fedavg'", DEVICE)
    assert_refused(on_server(fedtp, out), ConfigError, "--device", *DEVICES)
    assert_refused(on_server(fedtp, tmp_path, "--device", DEVICE), ConfigError, tmp_path, "--out")
    assert not [*tmp_path.iterdir()]


def test_a_run_that_is_not_whole_is_named(copied: Callable[[str], Trained], tmp_path: Path) -> None:
    """Damaged, missing, not finished, not begun, or with another program on that device."""
    run, out = copied("fedtp"), tmp_path / "bundle"
    made = run.runs / run.name / "generated" / f"{DEVICE}.safetensors"
    made.write_bytes(b"cut")
    assert_refused(on_server(run, out, "--device", DEVICE), StorageFailed, made)
    with open_record(run.runs) as store:
        config = store.runs.read(run.name).config
        store.runs.update(run.name, status="interrupted")
        assert_refused(on_server(run, out, "--device", DEVICE), ConfigError, run.name, "interrupted", "--resume")
        store.runs.update(run.name, config={**config, "variants": {"device-*": {"epochs": 2}}})
        assert_refused(on_server(run, out, "--device", DEVICE), ConfigError, "'device-*'", "edge-client export")
        store.runs.create("young", config)
        assert_refused(on_server(run._replace(name="young"), out), ConfigError, "'young'", "closed no round")
    held, blobs = run.program()
    graph = blobs.path(held.graphs[held.evaluate.graph].digest)
    graph.unlink()
    assert_refused(on_server(run, out, "--device", DEVICE), StorageFailed, f"{graph} is missing")
    assert not out.exists()


def test_the_device_names_what_is_wrong(copied: Callable[[str], Trained], tmp_path: Path) -> None:
    run, out = copied("knn_per"), tmp_path / "bundle"
    assert_refused(
        on_device(run._replace(name="nothing"), out, "--state", run.state), ConfigError, "'nothing'", run.name
    )
    assert_refused(on_device(run._replace(name="a/b"), out, "--state", run.state), ConfigError, "'a/b'")
    assert_refused(on_device(run, tmp_path), ConfigError, tmp_path, "--out")
    assert_refused(on_device(run, out, "--state", tmp_path / "none"), ConfigError, tmp_path / "none", "--state")
    without = ["export", run.name, "--out", str(out)]
    assert_refused(CliRunner().invoke(edge_client.cli.cli, without), ConfigError, "--data", "--state")
    blind = [*without, "--state", str(run.state)]
    assert_refused(CliRunner().invoke(edge_client.cli.cli, blind), ConfigError, "'knn_per'", "--data")
    assert not out.exists()


def test_a_damaged_vault_is_named(copied: Callable[[str], Trained], tmp_path: Path) -> None:
    run, out = copied("fedper"), tmp_path / "bundle"
    home = run.state / "vault" / run.name
    local = home / (home / "CURRENT").read_text() / "local.safetensors"
    local.write_bytes(local.read_bytes()[:100])
    assert_refused(on_device(run, out), StorageFailed, local)
    note = run.state / "vault" / run.name / "TASK"
    note.write_bytes(b"\xc1")
    assert_refused(on_device(run, out), StorageFailed, note)
    assert not out.exists()


def test_a_device_that_went_on_cannot_look_back(copied: Callable[[str], Trained], tmp_path: Path) -> None:
    """Its blobs are those of the newest task; the personal tensors of the run before are kept, alone."""
    run, out = copied("fedper"), tmp_path / "bundle"
    vault = Vault(run.state / "vault")
    shutil.copytree(vault.folder / run.name, vault.folder / "later")
    for age_s, name in enumerate(("later", run.name)):
        os.utime(vault.folder / name / "TASK", (1e9 - age_s, 1e9 - age_s))
    noted = vault.notes.find_newest(run.name)
    assert noted is not None
    program_blob = BlobStore(run.state / "blobs").path(noted.program)
    program_blob.unlink()
    assert_refused(on_device(run, out), ConfigError, f"'{run.name}'", "'later' since")
    assert_refused(
        on_device(run._replace(name="later"), out, "--state", run.state), ConfigError, "'later'", noted.program
    )


def test_without_images_nothing_is_claimed(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """A state alone is enough for a method that needs no images; accuracy is then not measured."""
    run, out = trained("fedper"), tmp_path / "bundle"
    given = ["--state", str(run.state), "export", run.name, "--out", str(out), "--precision", "fp32"]
    done = CliRunner().invoke(edge_client.cli.cli, given)
    assert done.exit_code == 0, done.output
    assert "accuracy not measured" in done.output
    assert json.loads((out / "card.json").read_text())["files"]["fp32"]["accuracy"] is None


# --- as processes -------------------------------------------------------------------------------------


def test_device_lists_its_own_model(copied: Callable[[str], Trained]) -> None:
    """With the personal tensors of a real run; adding it twice changes nothing, in another precision its file."""
    run = copied("fedper")
    flags = ["--data", str(run.data), "--state", str(run.state), "--json"]
    folder = run.state / "models" / "fedper-2"
    for options, file in (
        ([], "model.onnx"),
        (["--precision", "int8_static", "--round", "last"], "model.int8_static.onnx"),
        (["--round", "2"], "model.onnx"),
    ):
        added = CliRunner().invoke(edge_client.cli.cli, ["models", "add", run.name, *options, *flags])
        assert added.exit_code == 0, added.output
        [model] = json.loads(added.stdout)["models"]
        assert (model["state"], model["round"], model["method"]) == ("trained", 2, "fedper")
        assert [path.name for path in folder.glob("*.onnx")] == [file]
        assert Bundle.open(folder, None, 1).answer(next((run.data / "test").glob("*/*")), 1)
    promoted = CliRunner().invoke(edge_client.cli.cli, ["models", "promote", "fedper-2", *flags])
    assert json.loads(promoted.stdout)["models"][0]["state"] == "champion"
    for refused in (["add", run.name], ["add", run.name, "--round", "1"], ["list", "--round", "best"]):
        done = CliRunner().invoke(edge_client.cli.cli, ["models", *refused, *flags])
        assert isinstance(done.exception, ConfigError)
    (folder / "labels.json").write_text("[]")
    mended = CliRunner().invoke(edge_client.cli.cli, ["models", "add", run.name, *flags])
    assert json.loads(mended.stdout)["models"][0]["state"] == "champion"
    card = json.loads((folder / "card.json").read_text())
    correct, images = run.tested()
    assert card["files"]["fp32"]["accuracy"] == {"correct": correct, "images": images}
    assert card["calibration"]["images"] == images
    assert "features" in {output.name for output in onnxruntime.InferenceSession(folder / "model.onnx").get_outputs()}


def test_model_stays_listed_when_another_cannot_take_its_place(
    copied: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied("fedper")
    models, command = DeviceModels(run.state), ["models", "add", run.name, "--data", run.data, "--state", run.state]

    def fail(*_: object, **__: object) -> None:
        raise DiskFull(DiskFull.general_code, "no space left on device")

    for kind in (type(None), DiskFull):
        with monkeypatch.context() as patched:
            if kind is DiskFull:
                patched.setattr(DeviceModels, "add", fail)
            done = CliRunner().invoke(edge_client.cli.cli, list(map(str, command)))
        assert isinstance(done.exception, kind)
        assert [model.state for model in models.read().models] == ["trained"]
        assert Bundle.open(models.path("fedper-2"), None, 1).answer(next((run.data / "test").glob("*/*")), 1)


def test_processes_export_and_predict(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """The programs as they are called, each with its exit code; a device's bundle of a real run: see test_run.py."""

    def say(module: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*program(module), *map(str, arguments)], capture_output=True, text=True, check=False)

    run, out = trained("fedavg"), tmp_path / "bundle"
    given = ("export", run.name, "--runs", run.runs, "--out", out, "--precision", "int8", "--threads", 1)
    made = say("coordinator.cli", *given)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"bundle: {out}\nmodel.int8.onnx")
    again = say("coordinator.cli", *given)
    assert again.returncode == ConfigError.exit_code
    [line] = again.stderr.splitlines()
    assert line.startswith(f"coordinator: {out} exists already")
    image = next((run.data / "test").glob("*/*"))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    asked = say("edge_client.cli", "predict", image, broken, image, "--bundle", out, "--json")
    assert asked.returncode == DataError.exit_code
    assert str(broken) in asked.stderr
    first, second, third = json.loads(asked.stdout)
    assert first == third
    assert 0 < first["answers"][0]["probability"] <= 1
    assert str(broken) in second["error"]
