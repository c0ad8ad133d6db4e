"""Codes the upload of a device as its Program says, with error feedback."""

import numpy as np

from fedvit.program import LABELS, Program, Role
from fedvit.tensors import Tensors
from fedvit.updates import NONE, decode_one, make_codec


def encode_upload(program: Program, deltas: Tensors, collected: Tensors, residual: Tensors) -> tuple[Tensors, Tensors]:
    """Return a result's coded tensors, and the residual that coding left out and that is added to the next deltas.

    `residual` is that of earlier results; `deltas` is consumed, so that no two copies of a model are held. Features
    are coded without a residual, as the next round has other features. Raises BadPayload for numbers that the
    codec cannot hold.
    """
    upload: Tensors = {}
    new_residual: Tensors = {name: value for name, value in residual.items() if name not in deltas}
    for group in program.with_role(*(role for role in Role if role.is_sent_back)):
        codec = make_codec(program.groups[group].up)
        for name in program.names(group):
            total = deltas.pop(name)
            if name in residual and residual[name].shape == total.shape:
                total = np.add(total, residual[name])
            parts = codec.encode({name: total}) if codec.name != NONE else {name: total}
            if set(parts) != {name} or parts[name].dtype != total.dtype:
                new_residual[name] = np.subtract(total, decode_one(name, parts, total.shape))
            upload |= parts
    for phase in program.train:
        if phase.collect:
            codec, output = make_codec(phase.collect.codec), phase.collect.output
            features = {output: collected[output]}
            upload |= codec.encode(features, samples=True) if codec.name != NONE else features
            upload[LABELS] = collected[LABELS]
    return upload, new_residual
