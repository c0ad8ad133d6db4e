"""Limits that the first task of a run sets: no later Program of the run may send more than its first one said.

Pinned are the roles of tensors, the codecs of what is sent, and how features are masked and noised. Three changes of a
role are part of methods and of plans for a smaller budget: a tensor from the server is trained in some rounds
(FedBFPT), what is trained of it is sent in some (FedRA), and a local block is left to the server (EFTViT). A run that
sends no updates never sends a trained copy. A tensor that was local is never sent. Graphs are not pinned: a plan may
change the batch and with it all graphs, and the flow check is made for every Program anyway.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_client.storage.sums import add_digest, check_digest, read_file
from edge_client.storage.vault import Vault
from fedvit.errors import BadPayload, Damaged, NotAllowed
from fedvit.files import atomic_write
from fedvit.program import Program, Role

PINS = "PINS"
"""File of a run's folder in the vault. It is removed with the run."""
CHANGED = "FV1442"
"""Code of a Program that its run's first task does not allow."""
_BY_ROUND = {Role.GLOBAL, Role.SHARED}
"""Roles between which a tensor may change as long as it was never local; in a run with updates also Role.SEEDED."""


class Pins(Struct, frozen=True):
    """The facts of a run's Programs so far."""

    roles: dict[str, list[Role]]  # by tensor: every role that it had
    codecs: dict[str, str]  # by tensor: how its delta is coded, once it is sent
    features: tuple[str, float | None, float] | None  # codec, clip, noise; None: none are sent
    mask_ratio: float  # of the first Program
    secure: bool = False  # results are added up in secret


def pin_program(vault: Vault, run: str, program: Program) -> None:
    """Pin a run's first Program; compare a later one with what is pinned.

    Raises NotAllowed for a later Program that sends more, StorageFailed, Damaged.
    """
    file = vault.path(run) / PINS
    pinned = _read_pins(file)
    if pinned and (trouble := next(find_changes(pinned, program), None)):
        raise NotAllowed(CHANGED, f"run {run}: {trouble}")
    pins = make_pins(pinned, program)
    if pins != pinned:
        atomic_write(file, add_digest(msgspec.msgpack.encode(pins)), private=True)


def _read_pins(file: Path) -> Pins | None:
    if not file.exists():
        return None
    try:
        return msgspec.msgpack.decode(check_digest(read_file(file)), type=Pins)
    except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged("FV1704", f"{file} is damaged: {error}; remove it to fix the roles of the run anew") from error


def make_pins(pinned: Pins | None, program: Program) -> Pins:
    """Return what a run has pinned once it has this Program, too."""
    before = pinned or Pins({}, {}, _read_features(program), program.batch.mask_ratio, program.secure)
    roles, codecs = dict(before.roles), dict(before.codecs)
    for name, spec in program.tensors.items():
        group = program.groups[spec.group]
        roles[name] = sorted({*roles.get(name, ()), group.role})
        if group.role.is_sent_back:
            codecs.setdefault(name, group.up)
    return Pins(roles, codecs, before.features, before.mask_ratio, before.secure)


def _read_features(program: Program) -> tuple[str, float | None, float] | None:
    """Return how features are coded, clipped and noised; None if none are sent."""
    collecting = [phase.collect for phase in program.train if phase.collect]
    return (collecting[0].codec, collecting[0].clip, collecting[0].noise) if collecting else None


def find_changes(pinned: Pins, program: Program) -> Iterator[str]:
    """Yield how a Program would send more than the run's first one."""
    if pinned.secure and not program.secure:
        yield "results were added up in secret, and would be sent alone"
    sends_updates = any(Role.SHARED in roles for roles in pinned.roles.values())
    by_round = _BY_ROUND | {Role.SEEDED} if sends_updates else _BY_ROUND
    for name, spec in program.tensors.items():
        group = program.groups[spec.group]
        roles = {*pinned.roles.get(name, ()), group.role}
        if name not in pinned.roles and group.role.is_sent_back:
            yield f"tensor {name!r} would be sent, which the run's first task did not have"
        was_local = Role.LOCAL in pinned.roles.get(name, ())
        may_change = group.role in (Role.LOCAL, Role.GLOBAL) if was_local else group.role is Role.LOCAL
        if len(roles) > 1 and not may_change and (was_local or not roles <= by_round):
            yield f"tensor {name!r} was {'/'.join(pinned.roles[name])} and would become {group.role}"
        if group.role.is_sent_back and pinned.codecs.get(name, group.up) != group.up:
            yield f"tensor {name!r} was sent as {pinned.codecs[name]!r} and would be sent as {group.up!r}"
    for phase in program.train:
        if phase.collect is None:
            continue
        if pinned.features is None:
            yield f"features {phase.collect.output!r} would be sent, which the run's first task did not send"
        elif (phase.collect.codec, phase.collect.clip, phase.collect.noise) != pinned.features:
            yield f"features {phase.collect.output!r} would be coded, clipped or noised in another way than before"
        elif program.batch.mask_ratio < pinned.mask_ratio:
            yield f"the mask of features would fall from {pinned.mask_ratio:g} to {program.batch.mask_ratio:g}"
