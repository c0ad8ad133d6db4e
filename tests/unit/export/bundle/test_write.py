"""A bundle is there whole or not at all; what is read from it is what was written."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from export.bundle.assemble import USUAL, Precision, quantise
from export.bundle.card import Origin
from export.bundle.read import Bundle
from export.bundle.write import Bench, TrainedModel, write_bundle
from export.formats import write_format
from fedvit.data.images import normalise, read_image, unfold
from fedvit.errors import BadPayload, ConfigError, DataError, ExportMismatch, StorageFailed
from fedvit.label_forms import LabelForm
from tests.support.codes import has_code
from tests.support.tiny import TINY_CLASSES, Tiny

BENCH = Bench(images=None, described="", threads=1, machine="test", cores=1)
LABELS = tuple(f"class {number}" for number in range(TINY_CLASSES))


@pytest.fixture(scope="session")
def trained(tiny: Callable[[str], Tiny]) -> TrainedModel:
    made = tiny("fedavg")
    values = {f"tensor/{name}": value.numpy() for name, value in made.method.tensors(made.vit).items()}
    origin = Origin(run="run", method="fedavg", model="tiny", round=3, device=None, made_by="test 1")
    return TrainedModel(
        graph=made.graphs["predict"].content, values=values, batch=made.batch, classes=LABELS, origin=origin
    )


@pytest.fixture(scope="session")
def written(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is not to be changed."""
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(out, trained, BENCH)
    return out


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    """A bundle that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


# --- writing ------------------------------------------------------------------------------------------


def dead_feature(trained: TrainedModel) -> TrainedModel:
    """A huge weight for a feature that is always zero: of 8 bits nothing is left for the others."""
    values = {name: value.copy() for name, value in trained.values.items()}
    values["tensor/norm.weight"][0] = values["tensor/norm.bias"][0] = 0
    values["tensor/head.weight"][:, 0] = 1e4
    return replace(trained, values=values)


def test_a_file_too_far_from_the_original_leaves_nothing(trained: TrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportMismatch):
        write_bundle(tmp_path / "bundle", dead_feature(trained), BENCH)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["timm", "huggingface", "peft"])
def test_formats_of_one_class_refuse_other_tasks(trained: TrainedModel, tmp_path: Path, name: str) -> None:
    """Their cards say "image-classification", and nothing would name the range of a regression."""
    form = LabelForm(task="regression", low=0.0, high=9.0)
    other = replace(trained, batch=msgspec.structs.replace(trained.batch, labels=form), classes=("height",))
    with pytest.raises(ConfigError, check=has_code("FV2490", "regression")):
        write_format(name, tmp_path / "out", other)
    assert not (tmp_path / "out").exists()


def test_the_other_files_can_still_be_had(trained: TrainedModel, tmp_path: Path) -> None:
    """In whatever order they are asked for, fp32 is first: the others are compared with it."""
    wanted = (Precision.FP16, Precision.FP32)
    card = write_bundle(tmp_path / "bundle", dead_feature(trained), BENCH, precisions=wanted)
    assert [*card.files] == ["fp32", "fp16"]
    assert card.files["fp16"].agreement is not None


def test_a_folder_that_is_there_is_left_alone(trained: TrainedModel, bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    with pytest.raises(ConfigError, check=has_code("FV1905", str(bundle))):
        write_bundle(bundle, trained, BENCH)
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_a_place_that_cannot_be_written_is_named(trained: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, check=has_code("FV1701", str(tmp_path / "file" / "bundle"))):
        write_bundle(tmp_path / "file" / "bundle", trained, BENCH)


def test_a_tensor_without_value_is_named(trained: TrainedModel, tmp_path: Path) -> None:
    values = {name: value for name, value in trained.values.items() if name != "tensor/head.bias"}
    with pytest.raises(BadPayload, check=has_code("FV2310", "'tensor/head.bias'")):
        write_bundle(tmp_path / "bundle", replace(trained, values=values), BENCH)
    assert not [*tmp_path.iterdir()]


def test_weights_too_large_for_half_stay_float32(trained: TrainedModel, tmp_path: Path) -> None:
    """65504 is the largest float16."""
    values = dict(trained.values)
    values["tensor/norm.weight"] = np.zeros_like(values["tensor/norm.weight"])
    values["tensor/head.weight"] = np.full_like(values["tensor/head.weight"], 65536)
    wanted = (Precision.FP16,)
    usual = write_bundle(tmp_path / "usual", trained, BENCH, precisions=wanted).files["fp16"]
    large = write_bundle(tmp_path / "large", replace(trained, values=values), BENCH, precisions=wanted).files["fp16"]
    assert large.tensors_not_float32 == usual.tensors_not_float32 - 1


def test_rounding_is_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(5, 3, 2, 2)).astype(np.float32)
    scale, rounded = quantise(weight)
    assert (scale.shape, rounded.shape, rounded.dtype) == ((5,), weight.shape, np.dtype(np.int8))
    apart = np.abs(rounded * scale[:, None, None, None] - weight).reshape(5, -1).max(axis=1)
    assert (apart <= scale / 2 * 1.0001).all()


# --- reading ------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_run(trained: TrainedModel, written: Path, photo: Path) -> None:
    """The picture prepared as a device prepares its own, through the run's graph: the same class, likeliest first."""
    from export.bundle.measure import RunGraph

    batch = trained.batch
    pixels = read_image(photo, batch.image_size)[None]
    patches = unfold(normalise(pixels, batch), batch.patch_size)
    whole = normalise(pixels, batch).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(patches, unfold(whole.transpose(0, 2, 3, 1), batch.patch_size))
    [logits] = RunGraph(trained.graph, trained.values, batch, 1)(whole)
    raised = np.exp(logits - logits.max())
    got = Bundle.open(written, None, 1).answer(photo, TINY_CLASSES)
    assert [answer.label for answer in got] == [LABELS[index] for index in np.argsort(-logits)]
    np.testing.assert_allclose([answer.probability for answer in got], np.sort(raised / raised.sum())[::-1], rtol=1e-4)
    for precision in USUAL:
        assert len(Bundle.open(written, precision, 1).answer(photo, 3)) == 3


def test_a_picture_that_is_none_is_named(written: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(written, None, 1)
    with pytest.raises(DataError, check=has_code("FV1403", str(tmp_path / "none.png"))):
        bundle.answer(tmp_path / "none.png", 1)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1908", str(tmp_path))):
        Bundle.open(tmp_path, None, 1)


def change_file(bundle: Path, file: str, **values: Any) -> None:
    content = json.loads((bundle / file).read_text())
    (bundle / file).write_text(json.dumps({**content, **values}))


def test_damaged_files_are_named(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"no model")
    with pytest.raises(BadPayload, check=has_code("FV2306", "model.onnx")):
        Bundle.open(bundle, Precision.FP32, 1)
    for damaged in (b"{", b'{"\xff": 1}'):
        (bundle / "preprocessing.json").write_bytes(damaged)
        with pytest.raises(BadPayload, check=has_code("FV1704", "preprocessing.json")):
            Bundle.open(bundle, Precision.INT8, 1)
    (bundle / "labels.json").write_text('["one"]')
    with pytest.raises(BadPayload):
        Bundle.open(bundle, None, 1)
    os.unlink(bundle / "labels.json")
    with pytest.raises(ConfigError):
        Bundle.open(bundle, None, 1)
    change_file(bundle, "card.json", v=2)
    with pytest.raises(BadPayload, check=has_code("FV1908")):
        Bundle.open(bundle, None, 1)


def test_a_precision_that_is_not_there(bundle: Path) -> None:
    files = json.loads((bundle / "card.json").read_text())["files"]
    change_file(bundle, "card.json", files={"int8": files["int8"]})
    with pytest.raises(ConfigError):
        Bundle.open(bundle, Precision.FP16, 1)
    Bundle.open(bundle, None, 1)
