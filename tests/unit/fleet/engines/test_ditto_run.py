"""A whole run of Ditto beside the loop that PFLlib and FL-bench have, written out in plain torch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedvit.data.folder import DeviceData
from fedvit.data.images import read_image
from fedvit.methods.twins import TWIN
from fedvit.models import SMALL, build_vit
from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.finished import FinishedRun
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.tiny import TINY_MODEL

ROUNDS, EPOCHS, RATE, PULL = 3, 2, 0.05, 0.5
SIDE = TINY_MODEL["image_size"]


def test_ditto_ends_where_the_released_loop_does(tmp_path: Path) -> None:
    """Three devices with 16, 24 and 32 images to train with, each in one batch; all tensors agree to 1e-5."""
    parts = np.split(np.random.default_rng(0).permutation(90), [20, 50])
    write_device_folders(read_digits(SIDE), parts, tmp_path / "parts", test_share=0.2, seed=0)
    folders = device_folders(tmp_path / "parts", len(parts))
    options = {"batch_size": 64, "epochs": EPOCHS, "lr": RATE, "lam": PULL}
    values = {"method": "ditto", "rounds": ROUNDS, "options": options, "model_options": TINY_MODEL, "seed": 5}
    outcome = simulate(RunRequest(folders, values, out=tmp_path, run="ditto", engine="torch", at_once=1))
    run = FinishedRun("ditto", outcome.folder, 0.0, outcome.summary)

    data = [_read_training(folder, run.summary.classes) for folder in folders]
    shared = build_vit(SMALL, 10, seed=5, options=TINY_MODEL).vit.state_dict()
    personal = [shared] * len(data)
    for _ in range(ROUNDS):
        personal = [_descend(own, *batch, spring=shared) for own, batch in zip(personal, data, strict=True)]
        updated = [_descend(shared, *batch) for batch in data]
        shares = [len(labels) / sum(len(labels) for _, labels in data) for _, labels in data]
        shared = {name: sum(share * one[name] for share, one in zip(shares, updated, strict=True)) for name in shared}
    for name, value in run.tensors().items():
        np.testing.assert_allclose(value, shared[name].numpy(), rtol=0, atol=1e-5, err_msg=name)
    for folder, own in zip(folders, personal, strict=True):
        for name, value in run.tensors(folder.name).items():
            np.testing.assert_allclose(value, own[name.removeprefix(TWIN)].numpy(), rtol=0, atol=1e-5, err_msg=name)


def _read_training(folder: Path, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    part = DeviceData.open(folder).relabel(classes).train
    pixels = np.stack([read_image(path, SIDE) for path in part.paths]).astype(np.float32)
    return torch.from_numpy((pixels / 255 - 0.5) / 0.5).permute(0, 3, 1, 2), torch.from_numpy(part.labels)


def _descend(
    start: dict[str, Tensor], images: Tensor, labels: Tensor, spring: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """SGD on all images; a spring holds a personal model near the one that the round began with."""
    model = build_vit(SMALL, 10, seed=0, options=TINY_MODEL).vit
    model.load_state_dict(start)
    for _ in range(EPOCHS):
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for name, value in model.named_parameters():
                assert value.grad is not None
                value -= RATE * (value.grad + (PULL * (value - spring[name]) if spring else 0.0))
    return {name: value.clone() for name, value in model.state_dict().items()}
