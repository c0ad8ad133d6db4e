"""Cuts the graphs whose features are kept on the device's disk. Graphs are checked before they are cut here."""

import hashlib
from typing import NamedTuple

from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.features import FeatureFolder
from edge_client.trust.flow import find_sample_shapes
from edge_client.work.frozen_features import CutGraph
from fedvit.frozen_part import find_frozen_part
from fedvit.onnx_model import read_model, write_model
from fedvit.program import Program, Train


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
    model = read_model(content)
    part = find_frozen_part(program, phase, model)
    if part is None or not part.is_worth_keeping(phase):
        return None
    cut = part.cut
    found = find_sample_shapes(program, phase, model)
    if any(found.get(value) != cut.rest.shape(name) for name, value in cut.inputs.items()):
        return None
    groups = {program.tensors[name].group for name in part.tensors if name not in part.changing}
    initial = {group: program.groups[group].initial or "" for group in groups}
    features, rest = (b"".join(map(bytes, write_model(each, {}, {}))) for each in (cut.features, cut.rest))
    digest = hashlib.blake2b(features, digest_size=32).hexdigest()
    records = part.views * room.images
    file = room.folder.find_file(digest, part.numbers, records, room.bytes)
    if file is None:
        return None
    changing, key = part.changing, room.folder.key
    return CutGraph(features, rest, cut.inputs, part.shapes, cut.share, initial, changing, file, records, key)
