"""Training on kept features is training on the images."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.sandbox import Sandbox
from edge_client.storage.feature_file import count_record_bytes
from edge_client.storage.features import FeatureFolder
from edge_client.work import frozen_features
from edge_client.work.runtime import GraphRunner, Runtime, Seeds, Trained
from fedvit.data.folder import DeviceData, Split
from fedvit.data.images import DECODING
from profiles.cost import graph_cost
from profiles.kept_features import price_cuts
from profiles.program_cost import PricedProgram
from tests.support.agents import SILENT, assert_same_bits
from tests.support.features import cut_all
from tests.support.settings import Setting

SEEDS = Seeds(run=1, round=1, device="pi")
KEY = bytes(range(32))
NAMES = ("fed_head", "fedrep")


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> FeatureFolder:
    return FeatureFolder(tmp_path / "features", request.param)


@pytest.fixture
def own(data: DeviceData, tmp_path: Path) -> DeviceData:
    """The training images in a folder that a test may change."""
    for path in data.train.paths:
        copy = tmp_path / "images" / "train" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "images" / "test").mkdir()
    return DeviceData.open(tmp_path / "images").relabel(data.classes)


def train(
    setting: Setting,
    images: Split,
    folder: FeatureFolder | None = None,
    runner: GraphRunner | None = None,
    **given: Any,
) -> Trained:
    """Train a round, with features in `folder` if there is one; `program`, `seeds` or `start` as given."""
    runner, program = runner or Runtime(1), given.pop("program", setting.program)
    cuts = cut_all(setting, program, folder, len(images)) if folder else {}
    for graph in program.graphs.values():
        runner.open(graph.digest, setting.blobs.path(graph.digest), cuts.get(graph.digest))
    given = {"start": setting.start(), "seeds": SEEDS, "lr_scale": 1.0, "watch": SILENT, **given}
    return runner.train(program, images=images, **given)


def assert_close(got: Trained, want: Trained) -> None:
    assert got.tensors.keys() == want.tensors.keys()
    for name, value in want.tensors.items():
        np.testing.assert_allclose(got.tensors[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert (got.samples, got.steps) == (want.samples, want.steps)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_on_images(
    name: str, settings: Mapping[str, Setting], data: DeviceData, folder: FeatureFolder
) -> None:
    setting = settings[name]
    want = train(setting, data.train)
    first = train(setting, data.train, folder)
    assert_close(first, want)
    assert first.flops < want.flops


def test_augmented_images_have_features_in_each_of_their_views(
    settings: Mapping[str, Setting], data: DeviceData, folder: FeatureFolder
) -> None:
    """Training is that on the same views of the images; when all were seen, the frozen layers are not run again."""
    setting = settings["fed_head"]
    batch = msgspec.structs.replace(setting.program.batch, crop_padding=3, flip=True, brightness=0.3, views=2)
    program = msgspec.structs.replace(setting.program, batch=batch)
    whole = train(setting, data.train, program=program)
    assert_close(train(setting, data.train, folder, program=program), whole)
    assert whole.loss != train(setting, data.train).loss
    for number in range(2, 20):  # a view of 40 images is missed with a chance below 40 * 2 / 2**19
        train(setting, data.train, folder, program=program, seeds=Seeds(run=1, round=number, device="pi"))
    again = train(setting, data.train, folder, program=program)
    assert_close(again, whole)
    assert again.flops < 0.02 * whole.flops


def test_a_later_round_does_the_frozen_layers_no_more(
    settings: Mapping[str, Setting], own: DeviceData, folder: FeatureFolder
) -> None:
    """Nor does another process: the result is the same to the last bit, and no image is decoded."""
    setting = settings["fed_head"]
    whole = train(setting, own.train)
    first = train(setting, own.train, folder)
    for path in own.train.paths:
        now = path.stat()
        path.write_bytes(bytes(now.st_size))  # no image any more, but by its stamp the same file
        os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    again = train(setting, DeviceData.open(own.folder, before=own).train, folder)
    assert_same_bits(again.tensors, first.tensors)
    assert again.samples == len(own.train)
    assert again.flops < 0.02 * whole.flops


@pytest.mark.parametrize("name", NAMES)
def test_flops_with_features_are_known_beforehand(
    name: str, settings: Mapping[str, Setting], data: DeviceData, folder: FeatureFolder
) -> None:
    """In the first round and in a later one. A device counts by shares of the work, in which norms have some."""
    setting = settings[name]
    contents = {graph: setting.blobs.get(spec.digest) for graph, spec in setting.program.graphs.items()}
    costs = {graph: graph_cost(content) for graph, content in contents.items()}
    priced = PricedProgram(setting.program, {}, costs, price_cuts(setting.program, contents, graph_cost))
    cost = priced.cost(images=len(data.train), test_images=0, feature_bytes=10**9)
    first = train(setting, data.train, folder)
    changed = {name: value + 1e-3 for name, value in setting.start().items()} if name == "fedrep" else setting.start()
    later = train(setting, data.train, folder, start=changed)
    assert cost.flops_round == pytest.approx(first.flops, rel=0.03)
    assert cost.later_flops_round
    whole_flops = priced.cost(images=len(data.train), test_images=0).flops_round
    assert cost.flops_round < 0.8 * whole_flops
    assert cost.later_flops_round == pytest.approx(later.flops, rel=0.03, abs=0.01 * whole_flops)
    assert priced.cost(images=len(data.train), test_images=0, feature_bytes=100).later_flops_round is None


def test_features_do_not_depend_on_the_batch(settings: Mapping[str, Setting], own: DeviceData, tmp_path: Path) -> None:
    """A round that finds some features kept has the result of one that makes all of them."""
    setting = settings["fed_head"]
    one, other = FeatureFolder(tmp_path / "one"), FeatureFolder(tmp_path / "other")
    want = train(setting, own.train, one)
    train(setting, own.train, other, seeds=Seeds(run=9, round=3, device="pi"))  # another order
    assert_same_bits(train(setting, own.train, other).tensors, want.tensors)


def test_a_changed_image_has_new_features(
    settings: Mapping[str, Setting], own: DeviceData, folder: FeatureFolder
) -> None:
    setting = settings["fed_head"]
    train(setting, own.train, folder)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(own.train.paths[0])
    changed = DeviceData.open(own.folder).relabel(own.classes)
    assert_close(train(setting, changed.train, folder), train(setting, changed.train))


def test_images_that_are_decoded_in_another_way_have_new_features(
    settings: Mapping[str, Setting], own: DeviceData, folder: FeatureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update no old feature is in a batch with new ones."""
    setting = settings["fed_head"]
    first = train(setting, own.train, folder)
    known = train(setting, own.train, folder)
    monkeypatch.setattr(frozen_features, "DECODING", f"{DECODING}, another way")
    again = train(setting, own.train, folder)
    assert known.flops < again.flops == first.flops


def test_other_weights_have_other_features(
    settings: Mapping[str, Setting], data: DeviceData, folder: FeatureFolder
) -> None:
    """Also features of a phase that follows one which trains the layers, too: FedRep's body of the next round."""
    setting = settings["fedrep"]
    train(setting, data.train, folder)
    moved = {name: value * np.float32(1.1) for name, value in setting.start().items()}
    assert_close(train(setting, data.train, folder, start=moved), train(setting, data.train, start=moved))


def test_damaged_features_are_made_again(
    settings: Mapping[str, Setting], data: DeviceData, folder: FeatureFolder
) -> None:
    setting = settings["fed_head"]
    want = train(setting, data.train, folder)
    [file] = folder.folder.iterdir()
    content = bytearray(file.read_bytes())
    size = count_record_bytes(32, sealed=folder.key is not None)
    for place in range(size // 2, len(content), 3 * size):
        content[place] ^= 0xFF
    file.write_bytes(content)
    again = train(setting, data.train, folder)
    assert_same_bits(again.tensors, want.tensors)
    assert file.read_bytes() != bytes(content)


def test_an_image_that_cannot_be_read_is_left_out(
    settings: Mapping[str, Setting], own: DeviceData, folder: FeatureFolder
) -> None:
    setting = settings["fed_head"]
    own.train.paths[3].write_bytes(own.train.paths[3].read_bytes()[:60])
    want = train(setting, own.train)
    for number in range(2):
        images = DeviceData.open(own.folder, before=own).train if number else own.train
        got = train(setting, images, folder)
        assert got.samples == len(own.train) - 1
        assert_close(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_the_confined_process_keeps_features_in_files_that_it_may_not_open(
    name: str, settings: Mapping[str, Setting], own: DeviceData, folder: FeatureFolder, launcher: Launcher, made: Path
) -> None:
    setting = settings[name]
    want = train(setting, own.train, FeatureFolder(folder.folder.parent / "other", folder.key))
    sandbox = Sandbox(launcher, threads=1, readable=(made, own.folder))
    try:
        for _ in range(2):
            assert_same_bits(train(setting, own.train, folder, sandbox).tensors, want.tensors)
            [file] = folder.folder.iterdir()
            assert file.stat().st_size == len(own.train) * count_record_bytes(32, sealed=folder.key is not None)
        without = train(setting, own.train, None, sandbox)  # the same process, and the whole graph again
        assert without.flops > want.flops
        assert_close(without, want)
    finally:
        sandbox.release()
