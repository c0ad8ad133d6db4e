"""Train the mean of the devices' models to answer, on images of the server, as those models do together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedvit.data.images import Floats, Indices
from fedvit.data.server_images import ServerImages
from fedvit.errors import ConfigError
from fedvit.methods.base import Images, RoundContext, ServerState, Upload, run_model
from fedvit.methods.calculus import Named
from fedvit.methods.products import products_in
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights
from fedvit.models.vit import PatchViT
from fedvit.tensors import Array


@dataclass(frozen=True, kw_only=True)
class Distillation(WeightedMean):
    """Begins at the weighted mean, and minimises KL(softmax of the devices' mean logits, softmax of its own logits).

    Every step takes a batch of the server's images, without augmentation. Adam starts anew in each round; its rate
    falls to 0 by a cosine.
    """

    steps: int
    batch_size: int
    lr: float

    @property
    def needs_images(self) -> bool:
        return True

    @property
    def why_never_late(self) -> str:
        return "its server asks the models of one round's devices"

    @property
    def why_no_regions(self) -> str:
        return "its server asks the model of each single device"

    @property
    def averages(self) -> bool:
        return False

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """In memory are one device's model, the student, and the teachers' logits on the images of all steps.

        Raises EmptyCohort as the mean does.
        """
        if context.images is None:
            raise ConfigError("FV2131", "server_data names no folder of images, and this method distils on them")
        updated, figures = super().close(state, uploads, context)
        draw = np.random.default_rng([context.seed, context.round])
        batches = draw_batches(len(context.images), self.steps, self.batch_size, draw)
        used = np.unique(np.concatenate(batches))
        vit, place = context.vit.to(context.accelerator), torch.device(context.accelerator)
        with products_in(context.precision, place):
            weights = cohort_weights(uploads, context.round)
            teachers = [upload for upload in uploads if weights[upload.device]]
            logits = np.zeros((len(used), vit.classes), np.float32)
            for number, upload in enumerate(teachers, 1):
                context.progress(f"asking model {number}/{len(teachers)} about {len(used)} images")
                deltas = upload.load()
                model = {name: _place(np.add(value, deltas[name]), place) for name, value in state.tensors.items()}
                logits += self._answer(vit, model, context.images, used, place) / len(teachers)
            student = {name: _place(value, place).requires_grad_() for name, value in updated.tensors.items()}
            optimizer = torch.optim.Adam(student.values(), self.lr)
            losses = []
            for step, rows in enumerate(batches):
                optimizer.param_groups[0]["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))
                optimizer.zero_grad()
                wanted = torch.from_numpy(logits[np.searchsorted(used, rows)]).to(place)
                answers = find_logits(vit, student, _place(context.images.read(rows), place))
                loss = distil(answers, wanted)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                context.progress(f"distillation step {step + 1}/{self.steps}")
        vit.to("cpu")
        tensors = {name: value.detach().cpu().numpy() for name, value in student.items()}
        figures |= {"distillation_loss": float(np.mean(losses)), "distilled_images": float(len(used))}
        return replace(updated, tensors=tensors), figures

    def _answer(self, vit: PatchViT, model: Named, images: ServerImages, rows: Indices, place: torch.device) -> Floats:
        """(rows, C) logits of a model."""
        answers = []
        with torch.no_grad():
            for start in range(0, len(rows), self.batch_size):
                patches = images.read(rows[start : start + self.batch_size])
                answers.append(find_logits(vit, model, _place(patches, place)).cpu().numpy())
        return np.concatenate(answers)


def find_logits(vit: PatchViT, model: Named, patches: Tensor) -> Tensor:
    """(B, C) answers to whole images."""
    read = Images(patches, None)
    logits: Tensor = run_model(vit, model, lambda vit: vit.classify(vit.run_to_class(vit.embed(*read), 0)))
    return logits


def distil(answers: Tensor, wanted: Tensor) -> Tensor:
    """Mean over the batch of KL(softmax(wanted), softmax(answers))."""
    return kl_div(log_softmax(answers, dim=1), log_softmax(wanted, dim=1), log_target=True, reduction="batchmean")


def draw_batches(images: int, steps: int, size: int, draw: np.random.Generator) -> list[Indices]:
    """Return the rows of each step's batch: every image once before any comes again."""
    size = min(size, images)
    rounds = -(-steps * size // images)
    order = np.concatenate([draw.permutation(images) for _ in range(rounds)])
    return [order[step * size : (step + 1) * size] for step in range(steps)]


def _place(value: Array, place: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=place)
