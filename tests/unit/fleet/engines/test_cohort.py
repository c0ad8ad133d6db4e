"""A damaged image changes the results of its own device alone, and to what it does on a device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from coordinator.record.record import open_record
from fleet.request import Engine, RunRequest
from fleet.simulate import simulate
from tests.support.tiny import TINY_MODEL

LOCAL = {"method": "local", "options": {"batch_size": 1, "lr": 0.05}}
BALANCED = {"method": "eftvit", "options": {"batch_size": 2, "local_blocks": 1, "sampler": "balanced", "lr": 0.05}}


def write_folders(out: Path, damaged: tuple[int, ...] = (), *, all_images: bool = False) -> list[Path]:
    """Three devices with six images for training each; `damaged` devices have a truncated one, or truncated ones."""
    draw, folders = np.random.default_rng(0), [out / f"device-{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        for path in [folder / split / name for split in ("train", "test") for name in ("a", "b")]:
            path.mkdir(parents=True)
            for image in range(3):
                Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(path / f"{image}.png")
        if number in damaged:
            for broken in (folder / "train").glob("*/*.png" if all_images else "a/0.png"):
                broken.write_bytes(broken.read_bytes()[:400])
    return folders


def run(folders: list[Path], values: dict[str, Any], out: Path, **more: Any) -> Path:
    given = {"rounds": 1, "model_options": TINY_MODEL, **values}
    engine: Engine = more.pop("engine", "torch")
    return simulate(RunRequest(folders, given, out=out, run="run", engine=engine, at_once=1, **more)).folder


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_image_changes_no_other_device(damaged: int, tmp_path: Path) -> None:
    """With a batch of its own it is one step less, so that this device is the first that has finished."""
    kept = []
    for name, broken in (("whole", ()), ("damaged", (damaged,))):
        home = run(write_folders(tmp_path / name, broken), LOCAL, tmp_path / f"runs-{name}")
        kept.append(load_file(home / "state" / "devices-1.safetensors"))
    whole, other = kept
    assert whole.keys() == other.keys()
    for name in (one for one in whole if one.startswith("kept/")):
        same = np.allclose(whole[name], other[name], rtol=1e-5, atol=1e-7)
        assert same is not name.startswith(f"kept/device-{damaged}/"), name


def test_features_with_a_damaged_image_are_chosen_as_on_a_device(tmp_path: Path, graph_cache: Path) -> None:
    """The balanced sampler takes fewer of the other class, too."""
    folders = write_folders(tmp_path / "data", (0, 1))
    engines: tuple[Engine, ...] = ("torch", "onnx")
    torch, onnx = (
        load_file(
            run(folders, BALANCED, tmp_path / engine, engine=engine, graph_cache=graph_cache) / "model.safetensors"
        )
        for engine in engines
    )
    assert torch.keys() == onnx.keys()
    for name, value in onnx.items():
        np.testing.assert_allclose(torch[name], value, rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedbabu"])
def test_a_device_without_an_intact_image_is_left_out(method: str, tmp_path: Path, graph_cache: Path) -> None:
    """Its task fails, and the run goes on without it, as with devices; also where a test begins with training."""
    folders = write_folders(tmp_path / "data", (1,), all_images=True)
    options = {"batch_size": 2, "lr": 0.05, **({"tune_steps": 1} if method == "fedbabu" else {})}
    values, found = {"method": method, "options": options, "rounds": 2}, []
    engines: tuple[Engine, ...] = ("torch", "onnx")
    for engine in engines:
        home = run(folders, values, tmp_path / engine, engine=engine, graph_cache=graph_cache)
        with open_record(tmp_path / engine) as store:
            refusals = {(one.round, one.device, one.kind) for one in store.devices.read_refusals("run")}
        found.append((load_file(home / "model.safetensors"), refusals))
    (torch, refused), (onnx, refused_onnx) = found
    assert {(number, "device-1", "train") for number in (1, 2)} <= refused <= refused_onnx
    for name, value in onnx.items():
        np.testing.assert_allclose(torch[name], value, rtol=1e-2, atol=1e-3, err_msg=name)
