"""Chooses the graphs whose features are kept on the device's disk, and cuts them.

A phase without masks, whose images are not augmented or in a few views each, runs the layers that it does not train on
the same images in each epoch, and, if they are frozen, in each round. Graphs are checked before they are cut here.
"""

import hashlib
import math
from typing import NamedTuple

from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.features import FeatureFolder
from edge_client.trust.flow import find_sample_shapes
from edge_client.work.frozen_features import SAMPLES, CutGraph
from edge_client.work.steps import FEATURE
from fedvit.errors import BadPayload
from fedvit.onnx_cut import cut_model
from fedvit.onnx_model import Model, read_model, write_model
from fedvit.program import Batch, Program, Role, Train


def cut_graphs(program: Program, storage: DeviceStorage, images: int) -> dict[str, CutGraph]:
    """Return, by digest, the cut graphs of a Program's training on a device with so many training images."""
    if storage.features is None:
        return {}
    room = Room(storage.features, images, storage.disk.find_feature_room())
    cuts = {}
    for phase in program.train:
        digest = program.graphs[phase.graph].digest
        if digest not in cuts and (cut := cut_graph(program, phase, storage.blobs.get(digest), room)):
            cuts[digest] = cut
    return cuts


class Room(NamedTuple):
    """The place for features."""

    folder: FeatureFolder
    images: int  # on the device
    bytes: int | None  # that all features may take; None: any


def cut_graph(program: Program, phase: Train, content: bytes, room: Room) -> CutGraph | None:
    """Cut a phase's graph if its features are worth keeping, and there is room for them."""
    views = count_views(program.batch)
    if views is None:
        return None
    trained = {name for group in phase.groups for name in program.names(group)}
    fixed = [f"tensor/{name}" for name in program.tensors if name not in trained]
    model = read_model(content)
    try:
        cut = cut_model(model, SAMPLES, fixed, FEATURE)
    except BadPayload:  # the file does not describe all shapes
        return None
    found = find_sample_shapes(program, phase, model) if cut else {}
    if cut is None or any(found.get(value) != cut.rest.shape(name) for name, value in cut.inputs.items()):
        return None
    groups = {name: program.groups[program.tensors[name].group] for name in _list_tensors(cut.features)}
    changing = tuple(name for name, group in groups.items() if group.role is not Role.FROZEN)
    if changing and phase.epochs * phase.repeats < 2 * views:  # most features would be of use only once
        return None
    initial = {
        program.tensors[name].group: group.initial or "" for name, group in groups.items() if name not in changing
    }
    features, rest = (b"".join(map(bytes, write_model(part, {}, {}))) for part in (cut.features, cut.rest))
    shapes = {name: cut.rest.shape(name)[1:] for name in cut.inputs}
    digest = hashlib.blake2b(features, digest_size=32).hexdigest()
    records = views * room.images
    file = room.folder.find_file(digest, sum(map(math.prod, shapes.values())), records, room.bytes)
    if file is None:
        return None
    return CutGraph(features, rest, cut.inputs, shapes, cut.share, initial, changing, file, records, room.folder.key)


def _list_tensors(model: Model) -> list[str]:
    return [name.removeprefix("tensor/") for name in model.inputs if name != SAMPLES]


def count_views(batch: Batch) -> int | None:
    """Return in how many forms an image occurs; None: in a new one each time, with other patches, or it is text."""
    if batch.text is not None or batch.kept_patches < batch.patches:
        return None
    return (batch.views or None) if batch.is_augmented else 1
