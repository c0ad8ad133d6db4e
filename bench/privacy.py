"""`python -m bench privacy`: how well images can be rebuilt from the features that EFTViT uploads.

The attacker has the device's encoder and images of the same kind with their features, and fits linear decoders to them.
A token gives its patch and its position; class token and mean of all tokens give the whole image, which fills masked
patches. The figures are those of this attacker: a better one may rebuild more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from PIL import Image
from rich.console import RenderableType
from scipy.ndimage import uniform_filter

from coordinator.record.privacy import spent_on_rows
from fedvit.data.images import Floats, Pixels, draw_kept, select, unfold
from fedvit.methods.base import cross_entropy
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import count_kept_patches
from fleet.datasets.digits import read_digits
from profiles.report.terminal import column
from profiles.report.terminal import table as new_table

Indices = npt.NDArray[np.int64]

MASKS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
NOISES = (0.002, 0.01, 0.05)
SHOWN = 10
"""Images in the picture."""


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Digits of `size` pixels; `public` of them are the attacker's, others are rebuilt."""

    size: int = 32
    public: int = 1200
    held_out: int = 400
    local_blocks: int = 2
    training_steps: int = 60  # of the encoder, on the attacker's images, in place of many rounds
    masks: tuple[float, ...] = MASKS
    noises: tuple[float, ...] = NOISES  # at the first mask ratio: std of a number, times the clip of a row
    delta: float = 1e-5
    seed: int = 0


class Probe(Struct, frozen=True, kw_only=True):
    """Mask ratio and noise of uploads, and the quality of the rebuilt images. Pixels are in [0, 1]."""

    mask: float
    noise: float  # 0: none
    row_epsilon: float | None  # of one image's features; None: no guarantee
    mse: float
    of_mean_image: float  # mse / mse of the mean image: 1 is no gain
    psnr_db: float
    ssim: float


class PrivacyReport(Struct, frozen=True, kw_only=True):
    dataset: str
    model: str
    local_blocks: int
    public: int
    held_out: int
    mean_image_psnr_db: float
    mean_image_ssim: float
    probes: list[Probe]


def run_privacy(
    settings: PrivacySettings, picture: Path | None = None, progress: Callable[[str], None] = lambda line: None
) -> PrivacyReport:
    """Fit one attacker for each mask ratio and noise; `picture` gets original and rebuilt images."""
    images, labels = _digits(settings)
    vit = build_vit(SMALL, 10, seed=settings.seed, options={"image_size": settings.size})
    patches = unfold((images[..., None].repeat(3, axis=3) - 0.5) / 0.5, vit.patch_size).astype(np.float32)
    public, held_out = slice(0, settings.public), slice(settings.public, settings.public + settings.held_out)
    _train(vit, patches[public], labels[public], settings)
    mean = images[public].mean(axis=0)
    rows = [("original", images[held_out][:SHOWN])]
    probes = []
    uploads = [(mask, 0.0) for mask in settings.masks] + [(settings.masks[0], noise) for noise in settings.noises]
    for number, (mask, noise) in enumerate(uploads):
        rng = np.random.default_rng([settings.seed, number])
        kept = draw_kept(rng, len(patches), vit.patches, count_kept_patches(vit.patches, mask))
        features = _noisy(_features(vit, patches, kept, settings.local_blocks), noise, public, rng)
        rebuilt = Attacker.fitted(features[public], kept[public], images[public], vit).rebuild(features[held_out])
        probes.append(_probe(images[held_out], rebuilt, mean, mask, noise, settings.delta))
        rows.append((f"mask {mask}, noise {noise}", rebuilt[:SHOWN]))
        progress(f"mask {mask:g}, noise {noise:g}: PSNR {probes[-1].psnr_db:.1f} dB, SSIM {probes[-1].ssim:.2f}")
    rows.append(("mean image", mean[None].repeat(SHOWN, axis=0)))
    if picture:
        _draw(rows, picture)
    nothing = _probe(images[held_out], mean[None].repeat(settings.held_out, axis=0), mean, 1.0, 0.0, settings.delta)
    return PrivacyReport(
        dataset=f"digits, {settings.size} pixels",
        model=SMALL,
        local_blocks=settings.local_blocks,
        public=settings.public,
        held_out=settings.held_out,
        mean_image_psnr_db=nothing.psnr_db,
        mean_image_ssim=nothing.ssim,
        probes=probes,
    )


@dataclass(frozen=True, eq=False)
class Attacker:
    """Three linear maps by ridge regression. Letters: K tokens, D width, V numbers of a patch, N patches."""

    patch_DV: Floats
    position_DN: Floats
    whole_DP: Floats
    side: int  # patches

    @classmethod
    def fitted(cls, features: Floats, kept: Indices, images: Floats, vit: PatchViT) -> "Attacker":
        """Fit to the attacker's own features (n, 1 + K, D), kept patches (n, K) and images (n, S, S)."""
        tokens = _with_one(features[:, 1:].reshape(-1, features.shape[2]))
        own = select(_gray_patches(images, vit.patch_size), kept).reshape(len(tokens), -1)
        positions = np.eye(vit.patches, dtype=np.float32)[kept.reshape(-1)]
        return cls(
            _ridge(tokens, own),
            _ridge(tokens, positions),
            _ridge(_summary(features), images.reshape(len(images), -1)),
            images.shape[1] // vit.patch_size,
        )

    def rebuild(self, features: Floats) -> Floats:
        """(n, S, S) in [0, 1]."""
        tokens = _with_one(features[:, 1:])
        guessed = (_summary(features) @ self.whole_DP).reshape(len(features), -1)
        patch = round((guessed.shape[1] / self.side**2) ** 0.5)
        canvas = _gray_patches(guessed.reshape(len(features), self.side * patch, -1), patch)
        positions = (tokens @ self.position_DN).argmax(axis=2)
        np.put_along_axis(canvas, positions[:, :, None], tokens @ self.patch_DV, axis=1)
        folded = canvas.reshape(-1, self.side, self.side, patch, patch).transpose(0, 1, 3, 2, 4)
        return folded.reshape(len(features), self.side * patch, -1).clip(0, 1)


def _digits(settings: PrivacySettings) -> tuple[Floats, Indices]:
    """(n, S, S) in [0, 1], shuffled, since the data set is sorted by writer."""
    samples = read_digits(settings.size)
    order = np.random.default_rng(settings.seed).permutation(len(samples))[: settings.public + settings.held_out]
    pixels: Pixels = samples.images[order]
    gray: Floats = pixels[..., 0].astype(np.float32) / np.float32(255)
    return gray, samples.labels[order]


def _train(vit: PatchViT, patches: Floats, labels: Indices, settings: PrivacySettings) -> None:
    """Train the encoder to classify digits with half of the patches, as EFTViT does."""
    optimizer = torch.optim.AdamW(vit.vit.parameters(), lr=1e-3)
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.training_steps):
        rows = rng.choice(len(patches), 32, replace=False)
        kept = draw_kept(rng, len(rows), vit.patches, vit.patches // 2)
        batch = torch.from_numpy(select(patches[rows], kept))
        tokens = vit.embed(batch, torch.from_numpy(kept))
        loss = cross_entropy(vit.classify(vit.run_to_class(tokens, 0)), torch.from_numpy(labels[rows])).mean()
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        optimizer.step()


def _features(vit: PatchViT, patches: Floats, kept: Indices, blocks: int) -> Floats:
    """(n, 1 + K, D): the input of the server's first block."""
    made = []
    with torch.no_grad():
        for first in range(0, len(patches), 100):
            rows = slice(first, first + 100)
            tokens = vit.embed(torch.from_numpy(select(patches[rows], kept[rows])), torch.from_numpy(kept[rows]))
            made.append(vit.run_blocks(tokens, 0, blocks).numpy())
    return np.concatenate(made)


def _noisy(features: Floats, noise: float, public: slice, rng: np.random.Generator) -> Floats:
    """Clip rows to the median norm of the public ones and add noise, as devices do."""
    if not noise:
        return features
    flat = features.reshape(len(features), -1)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    clip = float(np.median(lengths[public]))
    flat = flat * np.minimum(1, clip / lengths) + rng.normal(0, noise * clip, flat.shape)
    noised: Floats = flat.astype(np.float32).reshape(features.shape)
    return noised


def _gray_patches(images: Floats, patch: int) -> Floats:
    """(n, S, S) -> (n, N, patch * patch), patches row by row."""
    count, side = len(images), images.shape[1] // patch
    cut = images.reshape(count, side, patch, side, patch).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(cut.reshape(count, side * side, patch * patch))


def _summary(features: Floats) -> Floats:
    return _with_one(np.concatenate([features[:, 0], features[:, 1:].mean(axis=1)], axis=1))


def _with_one(rows: Floats) -> Floats:
    return np.concatenate([rows, np.ones((*rows.shape[:-1], 1), np.float32)], axis=-1)


def _ridge(inputs: Floats, targets: Floats) -> Floats:
    """Ridge regression with a penalty of a thousandth of the inputs' mean square."""
    x, y = inputs.astype(np.float64), targets.astype(np.float64)
    square = x.T @ x
    penalty = 1e-3 * np.trace(square) / len(square)
    solved: Floats = np.linalg.solve(square + penalty * np.eye(len(square)), x.T @ y).astype(np.float32)
    return solved


def _probe(images: Floats, rebuilt: Floats, mean: Floats, mask: float, noise: float, delta: float) -> Probe:
    mse, nothing = float(np.square(images - rebuilt).mean()), float(np.square(images - mean).mean())
    return Probe(
        mask=mask,
        noise=noise,
        row_epsilon=spent_on_rows(1, noise, delta) if noise else None,
        mse=mse,
        of_mean_image=mse / nothing,
        psnr_db=float(-10 * np.log10(mse)),
        ssim=ssim(images, rebuilt),
    )


def ssim(images: Floats, others: Floats) -> float:
    """Structural similarity of pictures (n, S, S) in [0, 1], windows of 7 x 7; 1 for the same.

    Source: Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004, with
    uniform windows.
    """

    def smooth(values: Any) -> Any:
        return uniform_filter(values, size=(1, 7, 7))

    x, y = images.astype(np.float64), others.astype(np.float64)
    mx, my = smooth(x), smooth(y)
    vx, vy, vxy = smooth(x * x) - mx**2, smooth(y * y) - my**2, smooth(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    return float((((2 * mx * my + c1) * (2 * vxy + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


def _draw(rows: list[tuple[str, Floats]], file: Path) -> None:
    """A row of images for each mask ratio and noise, originals on top, the mean image below."""
    grid = np.concatenate([np.concatenate(list(images), axis=1) for _, images in rows], axis=0)
    scaled = Image.fromarray(np.rint(255 * grid.clip(0, 1)).astype(np.uint8))
    scaled.resize((2 * scaled.width, 2 * scaled.height), Image.Resampling.NEAREST).save(file)


def privacy_table(report: PrivacyReport) -> RenderableType:
    """Quality of rebuilt images by mask ratio and noise."""
    table = new_table(
        f"images rebuilt from features: {report.dataset}, {report.local_blocks} local blocks; "
        f"the mean image has PSNR {report.mean_image_psnr_db:.1f} dB, SSIM {report.mean_image_ssim:.2f}"
    )
    for heading in ("mask", "noise", "epsilon\nof a row", "error, share of\nmean image's", "PSNR\ndB", "SSIM"):
        column(table, heading)
    for probe in report.probes:
        epsilon = "-" if probe.row_epsilon is None else f"{probe.row_epsilon:.3g}"
        table.add_row(
            f"{probe.mask:g}", f"{probe.noise:g}", epsilon, f"{probe.of_mean_image:.2f}", f"{probe.psnr_db:.1f}",
            f"{probe.ssim:.2f}",
        )  # fmt: skip
    return table
