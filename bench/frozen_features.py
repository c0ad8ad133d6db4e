"""Federated rounds of methods that train behind a frozen backbone, on features that were computed once."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from coordinator.compute.planning.planner import Plan
from coordinator.config.sums import SumsConfig
from edge_client.work.batches import whole_samples
from fedvit.data.folder import DeviceData, Split
from fedvit.data.images import Indices
from fedvit.methods.base import Images, Method, RoundContext, ServerState, Upload, list_trained
from fedvit.methods.step import whole_step
from fedvit.models.feature_model import FeatureModel
from fedvit.program import Role, Train
from fedvit.secure import SUM
from fedvit.secure.layout import Layout, add_plainly, make_training_payload, read_training
from fedvit.wire.messages import SumTerms


class Features(NamedTuple):
    """Images behind a backbone."""

    values: Tensor  # (images, D) float32
    labels: Tensor  # (images,)


class DeviceFeatures(NamedTuple):
    """The images of a device."""

    train: Features
    test: Features


def read_features(plan: Plan, data: DeviceData) -> DeviceFeatures:
    """Compute the features of a device's images by torch."""
    data = data.relabel(plan.classes)
    return DeviceFeatures(_read_split(plan, data.train), _read_split(plan, data.test))


@torch.no_grad()
def _read_split(plan: Plan, images: Split) -> Features:
    vit, values, labels = plan.vit, [], []
    for rows, readable, fed in whole_samples(images, np.arange(len(images)), plan.batch_of(plan.method)):
        tokens = vit.run_to_class(vit.embed(torch.from_numpy(fed["batch/patches"])), 0)
        values.append(vit.features(tokens)[: len(rows)][torch.from_numpy(readable)])
        labels.append(images.labels[rows][readable])
    return Features(torch.cat(values), torch.from_numpy(np.concatenate(labels)))


class FrozenRounds:
    """Rounds of all devices with secure sums; a device's own tensors stay from round to round."""

    def __init__(self, method: Method, model: FeatureModel, seed: int) -> None:
        self._method, self._model, self._seed = method, model, seed
        self._first = method.tensors(model)
        common = method.names_with(model, Role.SHARED, Role.GLOBAL)
        self._shared = method.names_with(model, Role.SHARED)
        self._local = method.names_with(model, Role.LOCAL)
        self._own: dict[int, dict[str, Tensor]] = {}  # by number of the device
        self._rule = method.server_rule(model)
        self.state = ServerState({name: self._first[name].numpy().copy() for name in common})
        self.figures: dict[str, float] = {}

    def run_round(self, number: int, devices: Sequence[Features]) -> None:
        """Train on all devices, add their updates up as integers, and close the round."""
        payloads = {}
        for place, features in enumerate(devices):
            trained = self._train(number, place, features)
            self._own[place] = {name: trained[name] for name in self._local}
            deltas = {name: trained[name].numpy() - self.state.tensors[name] for name in self._shared}
            payloads[f"device-{place}"] = make_training_payload(deltas, len(features.labels), 0.0)
        sums, images = SumsConfig(), max(len(features.labels) for features in devices)
        layout = Layout.of_payload("train", next(iter(payloads.values())))
        terms = SumTerms(layout.digest, len(devices), sums.neighbours, sums.bits, sums.range, images)
        total = read_training(layout, add_plainly(payloads, terms, self._seed, number), terms)
        upload = Upload(SUM, total.samples, SUM, partial(dict, total.mean))
        context = RoundContext(number, self._seed, 1.0, self._model, "cpu", lambda _: {}, lambda _: None)
        self.state, self.figures = self._rule.close(self.state, [upload], context)

    @torch.no_grad()
    def measure_accuracy(self, devices: Sequence[Features]) -> float:
        """Return the share of right answers to the images of all devices together."""
        right = []
        for place, features in enumerate(devices):
            values = self._values(place)
            logits = self._method.predict(self._model, values, Images(features.values, None), None)
            right.append(logits.argmax(dim=1) == features.labels)
        return float(torch.cat(right).double().mean())

    def _values(self, place: int) -> dict[str, Tensor]:
        common = {name: torch.from_numpy(value) for name, value in self.state.tensors.items()}
        return self._first | common | self._own.get(place, {})

    def _train(self, number: int, place: int, features: Features) -> dict[str, Tensor]:
        draw, values = np.random.default_rng([self._seed, number, place]), self._values(place)
        for phase in self._method.phases(self._model):
            step = whole_step(self._method, self._model, msgspec.structs.replace(phase, update=None))
            names = list_trained(self._method, self._model, phase)
            inputs = {f"tensor/{name}": value for name, value in values.items()} | {"hyper/lr": torch.tensor(phase.lr)}
            inputs |= {f"slot/{slot}/{name}": torch.zeros_like(values[name]) for slot in phase.slots for name in names}
            for drawn in phase.draws:
                inputs[f"draw/{drawn.name}"] = torch.from_numpy(draw.integers(drawn.low, drawn.high, drawn.count))
            for count, rows in enumerate(self._draw_batches(phase, len(features.labels), draw), start=1):
                inputs |= {"batch/patches": features.values[rows], "batch/labels": features.labels[rows]}
                inputs |= {"batch/weight": torch.ones(len(rows)), "hyper/step": torch.tensor(float(count))}
                outputs = step(inputs)
                inputs |= {key.removeprefix("new/"): value.detach() for key, value in outputs.items() if "new/" in key}
            values |= {name: inputs[f"tensor/{name}"] for name in names}
        return values

    def _draw_batches(self, phase: Train, images: int, draw: np.random.Generator) -> Iterator[Indices]:
        size, left = self._method.batch_size, phase.steps
        for _ in range(phase.epochs):
            order = draw.permutation(images)
            for first in range(0, images, size):
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield order[first : first + size]
