"""The attacker of the bench: it must find what is there, or its failure would say nothing."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.privacy import Attacker, PrivacySettings, run_privacy, ssim


def test_similarity_of_the_same_and_of_noise() -> None:
    images = np.random.default_rng(0).random((3, 16, 16), np.float32)
    assert ssim(images, images) == pytest.approx(1.0)
    assert ssim(images, images[::-1]) < 0.5


def test_patches_land_where_they_were() -> None:
    """Tokens that are (patch, place) themselves, linear maps that read them off: the image comes back exactly."""
    image = np.arange(16, dtype=np.float32).reshape(1, 4, 4) / 16
    patches = np.float32([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]) / 16
    tokens = np.concatenate([patches, np.eye(4, dtype=np.float32)], axis=1)
    features = np.concatenate([np.zeros((1, 8), np.float32), tokens])[None]
    read = np.eye(9, dtype=np.float32)
    attacker = Attacker(read[:, :4], read[:, 4:8], np.zeros((17, 16), np.float32), 2)
    np.testing.assert_array_equal(attacker.rebuild(features), image)
    np.testing.assert_array_equal(attacker.rebuild(features[:, [0, 3, 1]])[0, 2:, :2], image[0, 2:, :2])


def test_less_is_rebuilt_of_less(tmp_path: Path) -> None:
    """Everything, almost nothing, and everything under noise; each better than the mean image or hardly worse."""
    settings = PrivacySettings(size=16, public=200, held_out=50, training_steps=2, masks=(0.0, 0.9), noises=(0.1,))
    report = run_privacy(settings, tmp_path / "grid.png")
    whole, masked, noisy = report.probes
    assert whole.mse < 0.5 * min(masked.mse, noisy.mse)
    assert whole.ssim > max(masked.ssim, noisy.ssim, report.mean_image_ssim)
    assert (whole.row_epsilon, masked.row_epsilon) == (None, None)
    assert noisy.row_epsilon is not None
    assert noisy.row_epsilon > 10, "noise that leaves a picture is no promise"
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 * 10 * 16, 2 * 5 * 16)
