import io
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedvit.data.images import (
    Pixels,
    augment,
    draw_kept,
    draw_variation,
    find_views,
    header_problem,
    is_image_name,
    limit_decoded_bytes,
    normalise,
    read_image,
    read_size,
    read_thumbnail,
    select,
    unfold,
)
from fedvit.errors import DataError
from fedvit.program import Batch
from tests.support.children import run_child
from tests.support.codes import has_code

PLAIN = {"image_size": 4, "patch_size": 2, "batch_size": 2, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

_PEAK_CHILD = """
import json, resource, sys
from pathlib import Path
from fedvit.data.images import read_image
path, most = Path(sys.argv[1]), int(sys.argv[2])
read_image(path.with_name("small.jpg"), 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mean = float(read_image(path, 224, decoded_bytes=most).mean())
print(json.dumps([mean, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]))
"""


def save_image(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def png(width: int, height: int, bits: int, rows: bytes) -> bytes:
    """A PNG of three colours with this header and these rows, whether or not they fit."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def gray(values: list[list[int]], mode: str = "L") -> Image.Image:
    return Image.fromarray(np.array(values, dtype=np.uint8)).convert(mode)


class TestReadImage:
    def test_keeps_the_pixels_of_an_image_that_has_the_right_size(self, tmp_path: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        path = save_image(tmp_path / "a.png", Image.fromarray(pixels))
        np.testing.assert_array_equal(read_image(path, 8), pixels)

    def test_the_result_is_the_callers_own(self, tmp_path: Path) -> None:
        path = save_image(tmp_path / "a.png", gray([[0, 0], [0, 0]]))
        read_image(path, 2)[:] = 7
        assert read_image(path, 2).sum() == 0

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
    def test_every_mode_of_png_becomes_rgb(self, tmp_path: Path, mode: str) -> None:
        """Black and white exist exactly in all of these modes, opaque."""
        path = save_image(tmp_path / "a.png", gray([[0, 255], [255, 0]], mode))
        np.testing.assert_array_equal(read_image(path, 2)[:, :, 1], [[0, 255], [255, 0]])

    def test_cmyk(self, tmp_path: Path) -> None:
        """No ink is white: (0, 0, 0, 0) -> 255; full black ink is black. TIFF keeps it without loss."""
        ink = Image.fromarray(np.array([[[0, 0, 0, 0], [0, 0, 0, 255]]] * 2, dtype=np.uint8), "CMYK")
        path = save_image(tmp_path / "a.tif", ink)
        np.testing.assert_array_equal(read_image(path, 2)[0, :, 0], [255, 0])

    @pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
    def test_deep_gray_is_scaled_not_clipped(self, tmp_path: Path, suffix: str) -> None:
        """16 bits to 8: 65535 // 256 = 255, 32768 // 256 = 128, 300 // 256 = 1, 0 -> 0."""
        deep = Image.fromarray(np.array([[65535, 32768], [300, 0]], dtype=np.uint16))
        path = save_image(tmp_path / f"a.{suffix}", deep)
        np.testing.assert_array_equal(read_image(path, 2)[:, :, 0], [[255, 128], [1, 0]])

    @pytest.mark.parametrize(
        ("orientation", "upright"),
        [
            (1, [[1, 2], [3, 4]]),
            (2, [[2, 1], [4, 3]]),
            (3, [[4, 3], [2, 1]]),
            (6, [[3, 1], [4, 2]]),
            (8, [[2, 4], [1, 3]]),
        ],
    )
    def test_exif_orientation(self, tmp_path: Path, orientation: int, upright: list[list[int]]) -> None:
        """Orientation 6: the camera was turned, the stored left column is the top row, read upwards."""
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = save_image(tmp_path / "a.png", gray([[1, 2], [3, 4]]), exif=exif)
        np.testing.assert_array_equal(read_image(path, 2)[:, :, 0], upright)

    def test_resizes_bilinearly(self, tmp_path: Path) -> None:
        """Columns 0 and 200 at centres .25 and .75 of the width; the four new centres lie at .125, .375, .625, .875:
        the outer ones are clamped, the inner ones a quarter and three quarters of the way: 50 and 150."""
        path = save_image(tmp_path / "a.png", gray([[0, 200], [0, 200]]))
        np.testing.assert_array_equal(read_image(path, 4)[0, :, 0], [0, 50, 150, 200])

    def test_other_shapes_are_squeezed_not_cut(self, tmp_path: Path) -> None:
        """4x2, left half black, right half white: both halves are still there in 2x2."""
        path = save_image(tmp_path / "a.png", gray([[0, 0, 255, 255]] * 2))
        image = read_image(path, 2)
        assert image.shape == (2, 2, 3)
        assert image[0, 0, 0] < 64
        assert image[0, 1, 0] > 191

    @pytest.mark.parametrize("factor", [1, 2, 4, 8, 25])
    def test_a_large_jpeg_gives_nearly_what_full_decoding_gives(self, tmp_path: Path, factor: int) -> None:
        """Random gray cells, one for each of the 32 x 32 result pixels. Decoding below that resolution would mix
        neighbours, 85 levels apart on average; JPEG's own loss and another order of averaging is a few levels."""
        cells = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
        full = Image.fromarray(cells.repeat(factor, 0).repeat(factor, 1)).convert("RGB")
        path = save_image(tmp_path / "a.jpg", full, quality=95)
        expected = np.asarray(full.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(read_image(path, 32).astype(int) - expected).mean() <= 5

    def test_the_first_picture_of_a_camera_that_stores_two(self, tmp_path: Path) -> None:
        """Phones write MPO, two JPEGs in one file, under the name .jpg."""
        white, black = Image.new("RGB", (16, 16), (255,) * 3), Image.new("RGB", (16, 16))
        white.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[black])
        assert header_problem(tmp_path / "a.jpg") is None
        assert read_image(tmp_path / "a.jpg", 16).min() >= 250

    @pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "gif", "tif", "tiff", "ppm"])
    def test_every_suffix_can_be_read(self, tmp_path: Path, suffix: str) -> None:
        path = save_image(tmp_path / f"a.{suffix}", Image.new("RGB", (16, 16), (255, 255, 255)))
        assert is_image_name(path.name)
        assert header_problem(path) is None
        assert read_image(path, 16).min() >= 250

    def test_bytes_from_elsewhere(self) -> None:
        content = io.BytesIO()
        gray([[9, 9], [9, 9]]).save(content, "PNG")
        content.seek(0)
        assert read_image(Path("member.png"), 2, content).max() == 9

    def test_a_file_that_is_no_image(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_text("hello")
        assert header_problem(path) == "not a PNG, JPEG, BMP, WebP, GIF, TIFF, PGM or PPM image"
        with pytest.raises(DataError):
            read_image(path, 2)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError):
            read_image(tmp_path / "gone.png", 2)

    @pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "tif", "bmp"])
    def test_a_file_that_ends_early(self, tmp_path: Path, suffix: str) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        path = save_image(tmp_path / f"a.{suffix}", Image.fromarray(noise))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DataError, check=has_code("FV1403", suffix)):
            read_image(path, 2)

    @pytest.mark.parametrize("inside", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
    def test_the_content_counts_and_not_the_name(self, tmp_path: Path, inside: str) -> None:
        path = tmp_path / ("a.png" if inside == "JPEG" else "a.jpg")
        Image.new("RGB", (16, 16), (255, 255, 255)).save(path, inside)
        assert header_problem(path) is None
        assert read_image(path, 16).min() >= 250

    def test_deep_colours_are_scaled(self, tmp_path: Path) -> None:
        """16 bits of each colour: 65535 -> 255, 32768 -> 128, 300 -> 1."""
        rows = np.array([[[65535, 32768, 300]] * 2] * 2, dtype=">u2")
        path = tmp_path / "a.png"
        path.write_bytes(png(2, 2, 16, b"".join(b"\0" + row.tobytes() for row in rows)))
        np.testing.assert_array_equal(read_image(path, 2)[0, 0], [255, 128, 1])

    def test_cmyk_of_a_printer(self, tmp_path: Path) -> None:
        """Photoshop stores such JPEGs inverted; no ink is white nevertheless."""
        path = save_image(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (0, 0, 0, 0)))
        assert read_image(path, 16).min() >= 250

    @pytest.mark.parametrize("suffix", ["png", "webp", "gif", "tif"])
    def test_the_first_frame_of_an_animation_or_page_of_a_document(self, tmp_path: Path, suffix: str) -> None:
        frames = [Image.new("RGB", (16, 16), (value,) * 3) for value in (255, 0)]
        path = save_image(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:])
        assert read_image(path, 16).min() >= 250

    def test_damaged_exif_block_leaves_the_pixels(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        path = save_image(tmp_path / "a.jpg", Image.new("RGB", (16, 16), (255, 255, 255)), exif=exif)
        content = bytearray(path.read_bytes())
        block = content.index(b"Exif\0\0") + 6
        content[block : block + 8] = b"\xff" * 8
        path.write_bytes(content)
        assert read_image(path, 16).min() >= 250

    def test_photo_of_any_size_can_be_read(self, tmp_path: Path) -> None:
        """81 megapixels: a JPEG is decoded at an eighth of its width and height, the same pixels as PNG are refused."""
        photo = Image.new("L", (9000, 9000), 200)
        path = save_image(tmp_path / "a.jpg", photo)
        assert header_problem(path) is None
        assert abs(int(read_image(path, 32).mean()) - 200) <= 1

    @pytest.mark.parametrize(("side", "limit"), [(9_000, "take 308 MiB, at most 256 MiB"), (60_000, "take 13732 MiB")])
    def test_bomb_is_refused_by_its_header(self, tmp_path: Path, side: int, limit: str) -> None:
        """A few hundred bytes that say that they are a huge image."""
        path = tmp_path / "a.png"
        path.write_bytes(png(side, side, 8, b"\0" * 1000))
        problem = header_problem(path)
        assert problem is not None
        assert problem.startswith("too large: ")
        assert limit in problem
        with pytest.raises(DataError, check=has_code("FV1403")):
            read_image(path, 32)

    def test_progressive_photo_is_kept_whole_by_its_decoder(self, tmp_path: Path) -> None:
        """1 megapixel with halved colours has 1.5 million coefficients of 2 bytes, also if it is decoded smaller."""
        photo = Image.new("RGB", (1024, 1024))
        assert header_problem(save_image(tmp_path / "a.jpg", photo), decoded_bytes=1 << 20) is None
        problem = header_problem(save_image(tmp_path / "b.jpg", photo, progressive=True), decoded_bytes=1 << 20)
        assert problem == "too large: 1024 x 1024 pixels of a progressive JPEG take 3 MiB, at most 1 MiB may be"
        with pytest.raises(DataError):
            read_image(tmp_path / "b.jpg", 32, decoded_bytes=1 << 20)

    def test_photo_whose_first_scan_lacks_components_is_kept_whole_too(self, tmp_path: Path) -> None:
        """Its decoder needs the other scans before it can show a line."""
        path = save_image(tmp_path / "a.jpg", Image.new("RGB", (1024, 1024)))
        content = bytearray(path.read_bytes())
        scan = content.index(b"\xff\xda")
        assert content[scan + 4] == 3
        content[scan + 2 : scan + 14] = b"\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(4)
        path.write_bytes(content)
        problem = header_problem(path, decoded_bytes=1 << 20)
        assert problem is not None
        assert problem.startswith("too large: ")

    def test_photo_of_200_megapixels_fits_into_the_smallest_allowance(self, tmp_path: Path) -> None:
        """16 MiB for the decoded image, with a copy of it; pillow itself refuses so many pixels."""
        path = save_image(tmp_path / "a.jpg", Image.new("L", (16_320, 12_240), 200))
        save_image(tmp_path / "small.jpg", Image.new("L", (16, 16)))
        least = limit_decoded_bytes(1)
        assert header_problem(path, decoded_bytes=least) is None
        child = run_child([sys.executable, "-c", _PEAK_CHILD, str(path), str(least)], check=True)
        mean, grown_bytes = json.loads(child.stdout)
        assert abs(mean - 200) <= 1
        assert grown_bytes < 3 * least

    def test_eps_under_another_name_is_refused(self, tmp_path: Path) -> None:
        """Pillow would start ghostscript to decode it."""
        path = tmp_path / "a.png"
        Image.new("RGB", (2, 2)).save(path, "EPS")
        assert header_problem(path) is not None

    @pytest.mark.filterwarnings("ignore")  # pillow complains about the damage, rightly
    @settings(max_examples=200)
    @given(st.data())
    def test_damage_never_raises_anything_but_data_error(self, data: st.DataObject) -> None:
        """Any byte of a real file may be any other."""
        content = io.BytesIO()
        Image.new("RGB", (16, 16), (9, 80, 200)).save(
            content, data.draw(st.sampled_from(["PNG", "JPEG", "TIFF", "GIF"]))
        )
        raw = bytearray(content.getvalue())
        for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=20)):
            raw[place] = data.draw(st.integers(0, 255))
        try:
            image = read_image(Path("damaged"), 8, io.BytesIO(raw))
        except DataError:
            return
        assert image.shape == (8, 8, 3)


def test_thumbnail_keeps_its_proportions(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", Image.new("RGB", (200, 100)))
    assert read_thumbnail(path, 40, 40).shape == (20, 40, 3)


def test_thumbnail_of_a_very_long_image_is_not_empty(tmp_path: Path) -> None:
    for side, shape in (((5000, 1), (1, 40, 3)), ((1, 5000), (40, 1, 3))):
        path = save_image(tmp_path / "a.png", Image.new("RGB", side))
        assert read_thumbnail(path, 40, 40).shape == shape


def draw_and_augment(images: Pixels, batch: Batch, rng: np.random.Generator) -> Pixels:
    return augment(images, batch, draw_variation(np.arange(len(images)), batch, rng))


class TestAugment:
    IMAGES = np.random.default_rng(1).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)

    def test_nothing_asked_nothing_drawn(self) -> None:
        rng = np.random.default_rng(0)
        untouched = rng.bit_generator.state
        np.testing.assert_array_equal(draw_and_augment(self.IMAGES, Batch(**PLAIN), rng), self.IMAGES)
        assert rng.bit_generator.state == untouched

    def test_flip_mirrors_about_half_of_the_samples_whole(self) -> None:
        """64 fair coins: fewer than 16 or more than 48 heads has a chance below 1e-4; the seed is fixed anyway."""
        result = draw_and_augment(self.IMAGES, Batch(**PLAIN, flip=True), np.random.default_rng(0))
        mirrored = np.array([np.array_equal(a, b[:, ::-1]) for a, b in zip(result, self.IMAGES, strict=True)])
        kept = np.array([np.array_equal(a, b) for a, b in zip(result, self.IMAGES, strict=True)])
        assert (mirrored ^ kept).all()
        assert 16 <= mirrored.sum() <= 48

    def test_crop_is_a_window_of_the_reflected_image_and_every_window_occurs(self) -> None:
        """Padding 1 has 3 x 3 windows; in 512 draws each is missed with a chance of 9 (8/9)^512 < 1e-24."""
        image = self.IMAGES[0]
        padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="reflect")
        windows = {padded[y : y + 8, x : x + 8].tobytes() for y in range(3) for x in range(3)}
        many = np.broadcast_to(image, (512, 8, 8, 3))
        result = draw_and_augment(many, Batch(**PLAIN, crop_padding=1), np.random.default_rng(0))
        assert {cropped.tobytes() for cropped in result} == windows

    def test_brightness_scales_each_sample_by_one_factor_within_its_range(self) -> None:
        """100 in every pixel times a factor in [.75, 1.25], rounded: one value per sample, 75..125."""
        flat = np.full((200, 4, 4, 3), 100, dtype=np.uint8)
        result = draw_and_augment(flat, Batch(**PLAIN, brightness=0.25), np.random.default_rng(0)).reshape(200, -1)
        assert (result == result[:, :1]).all()
        assert result.min() >= 75
        assert result.max() <= 125
        assert result.min() < 80 < 120 < result.max()

    def test_brightness_clips_and_does_not_wrap_around(self) -> None:
        bright = np.full((50, 2, 2, 3), 250, dtype=np.uint8)
        result = draw_and_augment(bright, Batch(**PLAIN, brightness=0.5), np.random.default_rng(0))
        assert result.min() >= 125
        assert result.max() == 255

    def test_an_image_is_seen_in_its_views_and_in_all_of_them(self) -> None:
        """In 60 draws one of three views is missed with a chance of 3 (2/3)^60 < 1e-10."""
        batch = Batch(**PLAIN, crop_padding=3, flip=True, brightness=0.3, views=3)
        rows = np.repeat([7], 3)
        views = {view.tobytes() for view in augment(self.IMAGES[rows], batch, find_views(rows, np.arange(3), batch))}
        rng = np.random.default_rng(0)
        seen = {augment(self.IMAGES[[7]], batch, draw_variation(rows[:1], batch, rng)).tobytes() for _ in range(60)}
        assert len(views) == 3
        assert seen == views

    def test_views_of_an_image_do_not_depend_on_the_others(self) -> None:
        batch = Batch(**PLAIN, crop_padding=2, flip=True, brightness=0.3, views=5)
        rows, views = np.array([4, 9, 2]), np.array([1, 0, 4])
        whole, part = find_views(rows, views, batch), find_views(rows[1:], views[1:], batch)
        for together, alone in zip(whole, part, strict=True):
            assert np.array_equal(together[1:], alone)
        assert not np.array_equal(whole.top, find_views(rows + 1, views, batch).top)

    def test_input_stays_as_it_was_and_the_seed_decides(self) -> None:
        batch = Batch(**PLAIN, crop_padding=2, flip=True, brightness=0.3)
        before = self.IMAGES.copy()
        first, again, other = (draw_and_augment(self.IMAGES, batch, np.random.default_rng(seed)) for seed in (5, 5, 6))
        np.testing.assert_array_equal(self.IMAGES, before)
        np.testing.assert_array_equal(first, again)
        assert first.dtype == np.uint8
        assert first.shape == before.shape
        assert not np.array_equal(first, other)


def test_normalise() -> None:
    """255 -> (1 - .5) / .25 = 2; 0 -> -2 for red; green (0 - .4) / .2 = -2; blue (51 / 255 - 0) / 1 = .2."""
    batch = Batch(image_size=1, patch_size=1, batch_size=2, mean=(0.5, 0.4, 0.0), std=(0.25, 0.2, 1.0))
    images = np.array([[[[255, 0, 51]]], [[[0, 255, 0]]]], dtype=np.uint8)
    result = normalise(images, batch)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[:, 0, 0], [[2, -2, 0.2], [-2, 3, 0]], atol=1e-6)


class TestUnfold:
    @pytest.mark.torch
    @pytest.mark.parametrize(("side", "patch"), [(32, 4), (30, 4), (16, 16), (224, 16)])
    def test_a_linear_layer_over_patches_is_the_convolution(self, side: int, patch: int) -> None:
        """The patch embedding of ViT: Conv2d(3, D, P, stride P), then flatten(2).transpose(1, 2). 30 leaves 2 over."""
        import torch

        torch.manual_seed(0)
        conv = torch.nn.Conv2d(3, 5, patch, stride=patch).double()
        images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
        expected = conv(torch.from_numpy(images).double().permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        patches = torch.from_numpy(unfold(images, patch)).double()
        torch.testing.assert_close(patches @ conv.weight.flatten(1).T + conv.bias, expected, rtol=0, atol=1e-12)


class TestMasking:
    @given(st.integers(0, 5), st.integers(1, 30), st.data())
    def test_rows_are_ascending_subsets(self, samples: int, patches: int, data: st.DataObject) -> None:
        keep = data.draw(st.integers(1, patches))
        kept = draw_kept(np.random.default_rng(0), samples, patches, keep)
        assert kept.shape == (samples, keep)
        assert kept.dtype == np.int64
        assert (np.diff(kept, axis=1) > 0).all()
        assert ((kept >= 0) & (kept < patches)).all()

    def test_every_subset_is_equally_likely(self) -> None:
        """2 of 4 patches: 6 subsets, each 1000 times in 6000; sigma = sqrt(6000 * 5/36) = 29, 5 sigma = 145."""
        kept = draw_kept(np.random.default_rng(0), 6000, 4, 2)
        _, counts = np.unique(kept, axis=0, return_counts=True)
        assert len(counts) == 6
        assert np.abs(counts - 1000).max() < 145

    def test_fresh_in_every_call(self) -> None:
        rng = np.random.default_rng(0)
        assert not np.array_equal(draw_kept(rng, 4, 100, 25), draw_kept(rng, 4, 100, 25))

    def test_keeping_all_draws_nothing(self) -> None:
        rng = np.random.default_rng(0)
        untouched = rng.bit_generator.state
        np.testing.assert_array_equal(draw_kept(rng, 2, 3, 3), [[0, 1, 2], [0, 1, 2]])
        assert rng.bit_generator.state == untouched

    def test_select(self) -> None:
        patches = np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
        result = select(patches, np.array([[0, 2], [1, 2]]))
        np.testing.assert_array_equal(result, [[[0, 1], [4, 5]], [[8, 9], [10, 11]]])


def test_image_names() -> None:
    assert all(map(is_image_name, ("x.PNG", "x.Jpeg", "x.y.webp")))
    assert not any(map(is_image_name, ("x.txt", "png", ".x.png", "x.png.part", "Thumbs.db")))


def test_size_is_that_of_the_upright_picture(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (8, 4)).save(file, exif=exif)
    assert read_size(file) == (4, 8)
    Image.new("RGB", (8, 4)).save(file)
    assert read_size(file) == (8, 4)
    file.write_bytes(b"none")
    with pytest.raises(DataError, check=has_code("FV1403", str(file))):
        read_size(file)


def test_a_picture_of_any_size_gets_no_mask_of_any_size(tmp_path: Path) -> None:
    """A JPEG is decoded at an eighth of its sides, a mask would have all of its pixels: 4 GB of 65,000 x 65,000."""
    file = tmp_path / "large.jpg"
    Image.new("RGB", (8, 8)).save(file)
    content = file.read_bytes()
    sides = content.index(b"\xff\xc0") + 5
    file.write_bytes(content[:sides] + struct.pack(">HH", 65_000, 65_000) + content[sides + 4 :])
    with pytest.raises(DataError, check=has_code("FV1403", "65000 x 65000 pixels")):
        read_size(file)
