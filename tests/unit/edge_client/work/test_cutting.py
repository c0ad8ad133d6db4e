"""The choice of graphs that are cut: those that repeat the same work on the same images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_client.storage.feature_file import count_record_bytes
from edge_client.storage.features import FeatureFolder
from edge_client.work.cutting import Room, cut_graph
from fedvit.program import Role
from tests.support.features import cut_all
from tests.support.settings import Setting


@pytest.mark.parametrize(
    "changed", [{"crop_padding": 2}, {"flip": True}, {"brightness": 0.1}], ids=["crop", "flip", "brightness"]
)
def test_augmented_images_have_no_features_to_keep(
    changed: dict[str, Any], settings: Mapping[str, Setting], tmp_path: Path
) -> None:
    setting = settings["fed_head"]
    batch = msgspec.structs.replace(setting.program.batch, **changed)
    program = msgspec.structs.replace(setting.program, batch=batch)
    assert cut_all(setting, program, FeatureFolder(tmp_path), 10) == {}


def test_room_is_needed_for_each_view_of_an_image(settings: Mapping[str, Setting], tmp_path: Path) -> None:
    setting = settings["fed_head"]
    batch = msgspec.structs.replace(setting.program.batch, flip=True, views=3)
    program = msgspec.structs.replace(setting.program, batch=batch)
    [cut] = cut_all(setting, program, FeatureFolder(tmp_path), 10).values()
    assert cut.most_records == 30
    masked = msgspec.structs.replace(program, batch=msgspec.structs.replace(batch, mask_ratio=0.5))
    assert cut_all(setting, masked, FeatureFolder(tmp_path), 10) == {}


@pytest.mark.parametrize("name", ["fedavg", "fedavg in parts", "eftvit"])
def test_graphs_that_train_their_first_layers_or_mask_images_are_not_cut(
    name: str, settings: Mapping[str, Setting], tmp_path: Path
) -> None:
    assert cut_all(settings[name], settings[name].program, FeatureFolder(tmp_path), 10) == {}


def test_layers_that_a_phase_uses_once_are_not_kept(settings: Mapping[str, Setting], tmp_path: Path) -> None:
    """They change each round, and the phase has one epoch, or fewer than two for each view of an image."""
    setting = settings["fedrep"]
    phases = tuple(msgspec.structs.replace(phase, epochs=1) for phase in setting.program.train)
    program = msgspec.structs.replace(setting.program, train=phases)
    assert cut_all(setting, program, FeatureFolder(tmp_path), 10) == {}
    assert cut_all(setting, setting.program, FeatureFolder(tmp_path), 10)
    for epochs, cut in (3, 0), (4, 1):
        phases = tuple(msgspec.structs.replace(phase, epochs=epochs) for phase in setting.program.train)
        batch = msgspec.structs.replace(setting.program.batch, flip=True, views=2)
        program = msgspec.structs.replace(setting.program, train=phases, batch=batch)
        assert len(cut_all(setting, program, FeatureFolder(tmp_path), 10)) == cut


def test_features_that_have_no_room_are_not_kept(settings: Mapping[str, Setting], tmp_path: Path) -> None:
    setting, folder = settings["fed_head"], FeatureFolder(tmp_path)
    [phase] = setting.program.train
    content = setting.blobs.get(setting.program.graphs[phase.graph].digest)
    size = 10 * count_record_bytes(32, sealed=False)
    assert cut_graph(setting.program, phase, content, Room(folder, 10, size - 1)) is None
    cut = cut_graph(setting.program, phase, content, Room(folder, 10, size))
    assert cut
    assert cut.shapes == {"batch/feature0": (32,)}


def test_frozen_tensors_are_known_by_the_digest_of_their_group(settings: Mapping[str, Setting], tmp_path: Path) -> None:
    """They need not be read for it; tensors that the server trains are."""
    frozen, moving = settings["fed_head"], settings["fedrep"]
    [cut] = cut_all(frozen, frozen.program, FeatureFolder(tmp_path), 10).values()
    [group] = frozen.program.with_role(Role.FROZEN)
    assert cut.initial == {group: frozen.program.groups[group].initial}
    assert cut.changing == ()
    [cut] = cut_all(moving, moving.program, FeatureFolder(tmp_path), 10).values()
    assert cut.initial == {}
    assert "patch_embed.proj.weight" in cut.changing
