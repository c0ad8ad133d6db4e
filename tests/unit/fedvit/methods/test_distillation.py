"""FedDF's server step beside a loop that a torch user would write, and its effect on what the mean forgot."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import kl_div, log_softmax

from fedvit.data.server_images import ServerImages
from fedvit.errors import ConfigError, EmptyCohort
from fedvit.methods import make_method
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.methods.rules.distillation import Distillation, draw_batches
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.quadratic import BATCH, small
from tests.support.uploads import upload

STEPS, SIZE, LR = 7, 3, 0.01
COUNTS = {"a": 6, "b": 2, "none": 0}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ServerImages:
    """Eight pictures of noise, in a folder of any name."""
    folder, draw = tmp_path_factory.mktemp("server"), np.random.default_rng(0)
    (folder / "any").mkdir()
    for number in range(8):
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "any" / f"{number}.png")
    return ServerImages(folder, BATCH)


def make_context_with(vit: PatchViT, images: ServerImages | None) -> RoundContext:
    return make_context(vit, 2)._replace(seed=5, images=images)


def make_state(vit: PatchViT) -> tuple[ServerState, list[Upload], dict[str, dict[str, torch.Tensor]]]:
    """The server's model, and the models of three devices, one of which has no images."""
    draw = torch.Generator().manual_seed(1)
    state = ServerState({name: value.numpy().copy() for name, value in vit.tensors().items()})
    ends = {
        device: {name: value + 0.3 * torch.randn(value.shape, generator=draw) for name, value in vit.tensors().items()}
        for device in COUNTS
    }
    uploads = [
        upload(device, COUNTS[device], {name: (end - vit.tensors()[name]).numpy() for name, end in tensors.items()})
        for device, tensors in ends.items()
    ]
    return state, uploads, ends


def answer(vit: PatchViT, tensors: dict[str, torch.Tensor], images: ServerImages, rows: np.ndarray) -> torch.Tensor:
    patches = torch.from_numpy(images.read(rows))
    return vit.call(tensors, lambda vit: vit.classify(vit.run_to_class(vit.embed(patches, None), 0)))


def test_a_server_step_is_that_of_a_plain_loop(images: ServerImages) -> None:
    vit = small()
    state, uploads, ends = make_state(vit)
    rule = make_method("feddf", {"server_steps": STEPS, "server_batch_size": SIZE, "server_lr": LR}).server_rule(vit)
    after, figures = rule.close(state, uploads, make_context_with(vit, images))
    student = {
        name: (0.75 * ends["a"][name] + 0.25 * ends["b"][name]).clone().requires_grad_() for name in vit.tensors()
    }
    optimizer = torch.optim.Adam(student.values(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for rows in draw_batches(8, STEPS, SIZE, np.random.default_rng([5, 2])):
        with torch.no_grad():
            teachers = torch.stack([answer(vit, ends[device], images, rows) for device in "ab"]).mean(dim=0)
        optimizer.zero_grad()
        wanted = torch.softmax(teachers, dim=1)
        loss = kl_div(torch.log_softmax(answer(vit, student, images, rows), dim=1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    for name, value in student.items():
        # the gradient of the keys' bias is zero but for rounding, which Adam makes a whole step
        rows = np.r_[0:8, 16:24] if name.endswith("qkv.bias") else slice(None)
        np.testing.assert_allclose(after.tensors[name][rows], value.detach().numpy()[rows], rtol=1e-4, atol=2e-5)
    assert figures["distillation_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert figures["distilled_images"] == 8


def test_the_student_answers_more_like_the_devices_together_than_their_mean_does(images: ServerImages) -> None:
    vit = small()
    state, uploads, ends = make_state(vit)
    rule = Distillation(steps=100, batch_size=8, lr=0.01)
    distilled, mean = (
        one.close(state, uploads, make_context_with(vit, images))[0].tensors for one in (rule, WeightedMean())
    )
    rows = np.arange(8)
    with torch.no_grad():
        wanted = torch.stack([answer(vit, ends[device], images, rows) for device in "ab"]).mean(dim=0)
        apart = [
            float(
                kl_div(
                    log_softmax(answer(vit, {n: torch.from_numpy(v) for n, v in one.items()}, images, rows), dim=1),
                    log_softmax(wanted, dim=1),
                    log_target=True,
                    reduction="batchmean",
                )
            )
            for one in (distilled, mean)
        ]
    assert apart[0] < 0.1 * apart[1]


def test_batches_take_every_image_before_any_comes_again() -> None:
    batches = draw_batches(10, 7, 4, np.random.default_rng(0))
    assert [len(batch) for batch in batches] == [4] * 7
    rows = np.concatenate(batches)
    for start in (0, 10):
        assert sorted(rows[start : start + 10]) == list(range(10))
    assert [sorted(batch) for batch in draw_batches(3, 2, 4, np.random.default_rng(0))] == [[0, 1, 2]] * 2


def test_without_images_or_devices_there_is_no_step(images: ServerImages) -> None:
    vit = small()
    state, uploads, _ = make_state(vit)
    rule = Distillation(steps=1, batch_size=1, lr=0.1)
    with pytest.raises(ConfigError, check=has_code("FV2131")):
        rule.close(state, uploads, make_context_with(vit, None))
    with pytest.raises(EmptyCohort):
        rule.close(state, uploads[2:], make_context_with(vit, images))
