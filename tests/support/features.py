"""Graphs that are cut for features of frozen layers."""

from edge_client.storage.features import FeatureFolder
from edge_client.work.cutting import Room, cut_graph
from edge_client.work.frozen_features import CutGraph
from fedvit.program import Program
from tests.support.settings import Setting


def cut_all(setting: Setting, program: Program, folder: FeatureFolder, images: int) -> dict[str, CutGraph]:
    """Return, by digest, the graphs of a program's training that are cut on a device with so many images."""
    cuts = {}
    for phase in program.train:
        digest = program.graphs[phase.graph].digest
        if cut := cut_graph(program, phase, setting.blobs.get(digest), Room(folder, images, None)):
            cuts[digest] = cut
    return cuts
