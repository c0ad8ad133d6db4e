"""What a device sends back, coded as its Program says, and what that leaves for the next time."""

import numpy as np

from fedvit.program import LABELS, Program, Role
from fedvit.tensors import Tensors
from fedvit.updates import NONE, decode_one, make_codec


def coded_upload(program: Program, deltas: Tensors, collected: Tensors, owed: Tensors) -> tuple[Tensors, Tensors]:
    """A result's tensors, and what coding leaves out of the deltas: what the next deltas are to be added to.

    `owed` is what earlier results left out (error feedback); `deltas` is used up, so that no two copies of a model
    are held. Features are coded without a memory: the next round's are others. Raises BadPayload for numbers that the
    codec cannot hold.
    """
    upload: Tensors = {}
    left: Tensors = {name: value for name, value in owed.items() if name not in deltas}
    for group in program.with_role(*(role for role in Role if role.sent_back)):
        codec = make_codec(program.groups[group].up)
        for name in program.names(group):
            total = deltas.pop(name)
            if name in owed and owed[name].shape == total.shape:
                total = np.add(total, owed[name])
            parts = codec.encode({name: total}) if codec.name != NONE else {name: total}
            if set(parts) != {name} or parts[name].dtype != total.dtype:
                left[name] = np.subtract(total, decode_one(name, parts, total.shape))
            upload |= parts
    for phase in program.train:
        if phase.collect:
            codec, output = make_codec(phase.collect.codec), phase.collect.output
            features = {output: collected[output]}
            upload |= codec.encode(features, samples=True) if codec.name != NONE else features
            upload[LABELS] = collected[LABELS]
    return upload, left
