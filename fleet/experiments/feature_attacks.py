"""Attacks of a curious server on uploaded features: it rebuilds images, looks for an image among those of a device, and
reads the device's class distribution.

Letters: B images, K kept patches, N all patches, T tokens, D width, V values of a patch.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from PIL import Image

from coordinator.compute.planning.batch import method_batch
from edge_client.work.private import noisy_rows
from edge_client.work.runtime import Seeds
from edge_client.work.sampler import make_sampler
from fedvit.data.folder import DeviceData
from fedvit.data.images import Floats, Indices, draw_kept, normalise, read_image, select, unfold
from fedvit.methods.base import Images, Method
from fedvit.methods.calculus import Named
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Collect, count_kept_patches
from fleet.experiments.pictures import restore_model
from fleet.finished import FinishedRun
from profiles.report.experiment import FeatureAttack

PUBLIC_IMAGES = 1200
"""Most images of other devices that the attacker learns from."""
ATTACKED_IMAGES = 40
"""Most images of a device that are attacked, and as many that it does not have."""
SHOWN_IMAGES = 4
SENDER, ATTACKER = "sender", "attacker"
"""Names from which noise is drawn, if the method has noise on features: independently for both."""
RIDGE = 1e-3
"""Penalty of the linear attacker, times the mean square of a feature."""


class _Encoder(NamedTuple):
    """The blocks that turn masked images into the features that a device uploads."""

    method: Method
    vit: PatchViT
    tensors: Named
    collect: Collect

    def encode(self, patches_BNV: Floats, kept_BK: Indices, noise: Seeds | None = None) -> Floats:
        """(B, K, D) features of the kept patches, with the device's noise if there is `noise` to draw it from.

        The attacks use nothing of tokens that are no patches.
        """
        kept = torch.from_numpy(kept_BK) if kept_BK.shape[1] < self.vit.patches else None
        images = Images(torch.from_numpy(select(patches_BNV, kept_BK)), kept)
        with torch.no_grad():
            features_BTD = self.method.forward(self.vit, self.tensors, images).collected[self.collect.output]
        sent = features_BTD.numpy()
        if noise:
            sent = noisy_rows(sent, self.collect, noise)
        return np.asarray(sent[:, -kept_BK.shape[1] :], np.float32)


class _Decoder(NamedTuple):
    """A linear map from the feature of a patch to its pixels and its place."""

    weights: npt.NDArray[np.float64]  # (D + 1, V + N)
    mean_NV: Floats  # the mean public image, in place of patches that were not sent

    def decode(self, features_BKD: Floats) -> tuple[npt.NDArray[np.float64], Indices]:
        """(B, K, V) pixels and (B, K) places."""
        read = _with_one(features_BKD) @ self.weights
        values = self.mean_NV.shape[1]
        return read[..., :values], read[..., values:].argmax(axis=-1).astype(np.int64)

    def rebuild(self, uploads: Sequence[Floats]) -> npt.NDArray[np.float64]:
        """(B, N, V) images from uploads of the same images: the mean of what is read for a place, or the mean image."""
        patches, values = self.mean_NV.shape
        images = len(uploads[0])
        total, count = np.zeros((images, patches, values)), np.zeros((images, patches, 1))
        rows = np.arange(images)[:, None]
        for features_BKD in uploads:
            pixels_BKV, places_BK = self.decode(features_BKD)
            np.add.at(total, (rows, places_BK), pixels_BKV)
            np.add.at(count, (rows, places_BK), 1)
        return np.where(count > 0, total / np.maximum(count, 1), self.mean_NV)


def attack_features(
    run: FinishedRun, config: Mapping[str, Any], folders: Sequence[Path], seed: int, count: int
) -> list[FeatureAttack]:
    """Attack the first `count` devices that trained and have test images, by a server that has their encoder, and by
    one that has its first values.

    An upload has the features of one epoch, and devices send those of all epochs at most. The attacker has images of
    the other devices as an example of such images. Empty for a method that uploads no features, and for text.
    """
    classes = run.summary.classes
    attacks: list[FeatureAttack] = []
    data = {folder.name: DeviceData.open(folder).relabel(classes) for folder in folders}
    trained = {device.device for device in run.summary.devices if device.rounds}
    for device in [name for name, one in data.items() if name in trained and len(one.test)][:count]:
        sender = _find_encoder(config, len(classes), seed, run, device)
        beginner = _find_encoder(config, len(classes), seed, run, None)
        if sender is None or beginner is None:
            return []
        batch = method_batch(sender.method, sender.vit)
        others = [path for name, one in data.items() if name != device for path in one.train.paths]
        draw = np.random.default_rng(seed)
        public = _read([others[place] for place in draw.permutation(len(others))[:PUBLIC_IMAGES]], batch)
        own, absent = (_read(split.paths[:ATTACKED_IMAGES], batch) for split in (data[device].train, data[device].test))
        distance, even = _compare_distributions(sender, data[device].train.labels, draw)
        for knows in (sender, beginner):
            attack = _attack(_Scene(sender, knows, public, own, absent), seed, batch)
            attacks.append(replace(attack, device=device, class_distance=distance, even_distance=even))
    return attacks


class _Scene(NamedTuple):
    sender: _Encoder
    knows: _Encoder  # the attacker's
    public: Floats  # (B, N, V) images of the same kind
    own: Floats  # of the device
    absent: Floats  # like them, which it does not train with


def _attack(scene: _Scene, seed: int, batch: Batch) -> FeatureAttack:
    draw = np.random.default_rng(seed)
    patches, sender = scene.sender.vit.patches, scene.sender
    keep = count_kept_patches(patches, sender.method.mask)

    masks = [draw_kept(draw, len(scene.own), patches, keep) for _ in range(sender.method.epochs)]
    noise = [Seeds(seed, epoch, SENDER) for epoch in range(len(masks))]
    uploads = [sender.encode(scene.own, kept, drawn) for kept, drawn in zip(masks, noise, strict=True)]
    decoder = _fit(scene, draw, keep)
    once, every = decoder.rebuild(uploads[:1]), decoder.rebuild(uploads)
    seen = np.zeros((len(scene.own), patches), bool)
    for kept in masks:
        np.put_along_axis(seen, kept, True, axis=1)
    worst = np.square(scene.own - decoder.mean_NV).sum()
    return FeatureAttack(
        device="",
        attacker="encoder" if scene.knows is sender else "first values",
        seen_once=keep / patches,
        seen_ever=float(seen.mean()),
        error_once=float(np.square(scene.own - once).sum() / worst),
        error_ever=float(np.square(scene.own - every).sum() / worst),
        membership=_find_members(scene, uploads[0], masks[0]),
        class_distance=0.0,
        even_distance=0.0,
        picture=_draw([images[:SHOWN_IMAGES] for images in (scene.own, once, every)], batch),
    )


def _fit(scene: _Scene, draw: np.random.Generator, keep: int) -> _Decoder:
    """Least squares with a small penalty, on public images under masks of the attacker's own."""
    patches = scene.sender.vit.patches
    kept_BK = draw_kept(draw, len(scene.public), patches, keep)
    features = scene.knows.encode(scene.public, kept_BK, Seeds(0, 0, ATTACKER)).reshape(-1, scene.sender.vit.width)
    pixels = select(scene.public, kept_BK).reshape(len(features), -1)
    wanted = np.concatenate([pixels, np.eye(patches)[kept_BK.ravel()]], axis=1)
    inputs = _with_one(features).astype(np.float64)
    square = inputs.T @ inputs
    penalty = RIDGE * len(inputs) * np.square(features, dtype=np.float64).mean()
    return _Decoder(
        np.linalg.solve(square + penalty * np.eye(len(square)), inputs.T @ wanted), scene.public.mean(axis=0)
    )


def _find_members(scene: _Scene, features_BKD: Floats, kept_BK: Indices) -> float:
    """Area under the curve of a guess that an image is the device's: the nearer to some upload, the likelier.

    The attacker masks the image as the upload was masked, whose patches it knows by their places.
    """

    def distances(images: Floats) -> npt.NDArray[np.float64]:
        nearest = np.full(len(images), np.inf)
        for features_KD, kept_K in zip(features_BKD, kept_BK, strict=True):
            own = scene.knows.encode(images, np.repeat(kept_K[None], len(images), axis=0))
            nearest = np.minimum(nearest, np.square(own - features_KD).sum(axis=(1, 2)))
        return nearest

    members, others = distances(scene.own), distances(scene.absent)
    ahead = (members[:, None] < others).mean() + 0.5 * (members[:, None] == others).mean()
    return float(ahead)


def _compare_distributions(
    encoder: _Encoder, labels: npt.NDArray[Any], draw: np.random.Generator
) -> tuple[float, float]:
    """Distances between a device's class distribution and that of its upload, and that of equally many of each class.

    Half of the sum of absolute differences: 0 is told by the upload, and the second is what a server guesses that
    knows the classes alone.
    """
    epochs = encoder.method.epochs
    sampler = make_sampler(encoder.collect, labels, epochs, draw)
    rows = np.arange(len(labels))
    for epoch in range(epochs):
        sampler.record(epoch, rows, np.ones(len(rows), bool), np.zeros((len(rows), 1), np.float32))
    _, sent = sampler.collect((1,))
    classes = np.unique(labels)
    true, uploaded = (np.array([(some == label).mean() for label in classes]) for some in (labels, sent))
    return float(np.abs(true - uploaded).sum() / 2), float(np.abs(true - 1 / len(classes)).sum() / 2)


def _find_encoder(
    config: Mapping[str, Any], classes: int, seed: int, run: FinishedRun, device: str | None
) -> _Encoder | None:
    """The encoder of a device after the last round, or with the first values of its own tensors."""
    own = run.tensors(device) if device else {}
    method, vit, tensors = restore_model(config, classes, seed, {**run.tensors(), **own})
    collects = [phase.collect for phase in method.phases(vit) if phase.collect]
    if not collects or "patches" not in vit.has:
        return None
    privacy = config["privacy"]
    if not privacy["feature_noise"]:
        return _Encoder(method, vit, tensors, collects[0])
    # the same in every run, which a device's own noise is not
    noisy = replace(collects[0], clip=privacy["feature_clip"], noise=privacy["feature_noise"], rehearsal=True)
    return _Encoder(method, vit, tensors, noisy)


def _read(paths: Sequence[Path], batch: Batch) -> Floats:
    """(B, N, V) patches of images."""
    pixels = np.stack([read_image(path, batch.image_size) for path in paths])
    return unfold(normalise(pixels, batch), batch.patch_size)


def _with_one(features: Floats) -> Floats:
    return np.concatenate([features, np.ones((*features.shape[:-1], 1), features.dtype)], axis=-1)


def _draw(rows: Sequence[npt.NDArray[Any]], batch: Batch) -> bytes:
    """A picture with the images of each row beside each other."""
    side, size = batch.image_size // batch.patch_size, batch.patch_size
    strips = []
    for images_BNV in rows:
        grid = images_BNV.reshape(-1, side, side, 3, size, size).transpose(1, 4, 0, 2, 5, 3)
        strips.append(grid.reshape(side * size, -1, 3))
    pixels = np.concatenate(strips) * np.array(batch.std) + np.array(batch.mean)
    file = io.BytesIO()
    Image.fromarray((255 * pixels.clip(0, 1)).round().astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()
