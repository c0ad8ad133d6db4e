"""The model of a device for a bundle: the tensors of its newest task in a run, and its personal tensors.

They are combined as for an evaluation, so that a bundle gives the same answers as the device's last test: personal
tensors from the vault, tuned on the device's images if the method tunes, with the features of its images if the
method stores them.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from edge_client.retention import given_blob, own_groups
from edge_client.runtime import Runtime, Seeds, Watch
from edge_client.vault import TaskNote, Vault
from edge_client.vault_key import VaultKey
from export.bundle.card import Origin
from export.bundle.measure import RunGraph, pictures_of
from export.bundle.write import Trained
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, ConfigError
from fedvit.program import Gather, Program, decode_program
from fedvit.tensors import Array, Tensors, check_tensors, mapped


def trained_here(
    run: str,
    *,
    device: str,
    state: Path,
    data: DeviceData | None,
    threads: int,
    made_by: str,
    vault_key: Path | None = None,
) -> tuple[Trained, DeviceData | None]:
    """The device's model of a run, and its images under the run's classes.

    Raises ConfigError when the run's tensors are not here, or images are needed and `data` is None;
    StorageFailed when the vault is damaged.
    """
    key = VaultKey.load(vault_key, make=False) if vault_key else None
    vault, blobs = Vault(state / "vault", key), BlobStore(state / "blobs")
    note = _note(vault, run)
    try:
        program = decode_program(blobs.get(note.program))
        values, personal = _values(note, program, vault, blobs)
        graphs = {name: blobs.get(program.graphs[name].digest) for name in program.graphs_for("evaluate")}
    except BadPayload as error:
        newest = vault.runs()[0]
        if newest != run:
            why = f"this device has worked for run {newest!r} since, and keeps only the blobs of its newest run"
            raise ConfigError(f"run {run!r} cannot be exported here any more: {why}") from error
        raise ConfigError(f"run {run!r} cannot be exported now (is its next task arriving?): {error}") from error
    if vault.noted(run) != note:
        raise ConfigError(f"the device started another task of run {run!r} while its tensors were read; try again")
    evaluate = program.evaluate
    needs = "tunes the model on" if evaluate.adapt else "compares pictures with" if evaluate.gather else None
    if needs and data is None:
        raise ConfigError(f"method {program.method!r} {needs} the device's images: name their folder with --data")
    images = data.relabelled(program.classes) if data else None
    seeds = Seeds(note.seed, note.round, device)
    if evaluate.adapt and images:
        values |= _adapted(program, values, images, seeds, blobs, threads)
    inputs: dict[str, Array] = {f"tensor/{name}": value for name, value in values.items()}
    remembered = 0
    if evaluate.gather and images:
        gathered = _gathered(evaluate.gather, graphs[evaluate.gather.graph], inputs, program, images, seeds, threads)
        inputs |= gathered
        remembered = int(gathered["gathered/weight"].sum())
    origin = Origin(
        run=run,
        method=program.method,
        model=program.model,
        round=note.round,
        device=device,
        made_by=made_by,
        personal_tensors=personal,
        adapted=bool(evaluate.adapt),
        remembered=remembered,
    )
    graph = graphs[evaluate.graph]
    return Trained(graph=graph, values=inputs, batch=program.batch, classes=program.classes, origin=origin), images


def _note(vault: Vault, run: str) -> TaskNote:
    try:
        note = vault.noted(run)
    except BadPayload as error:  # no run can have this name
        raise ConfigError(str(error)) from error
    if note is None:
        known = ", ".join(vault.runs()[:5]) or "none yet"
        raise ConfigError(f"no run {run!r} in {vault.folder}; this device has worked for: {known}")
    return note


def _values(note: TaskNote, program: Program, vault: Vault, blobs: BlobStore) -> tuple[Tensors, int]:
    """Every tensor as in the device's next evaluation, and how many of them are personal."""
    values: Tensors = {}
    stored = vault.local(note.run) or {}
    own = own_groups(program, note, vault)
    personal = 0
    for group in program.groups:
        tensors = {name: stored[name] for name in program.names(group) if group in own and name in stored}
        personal += len(tensors)
        if not tensors:  # not trained here yet
            digest = given_blob(program, note, group)
            if digest is None:
                raise BadPayload(f"group {group!r} has no value")
            tensors = mapped(blobs.path(digest))
        check_tensors(tensors, program.expected([group]), f"group {group!r} of run {note.run!r}")
        values |= tensors
    return values, personal


def _adapted(
    program: Program, values: Mapping[str, Array], images: DeviceData, seeds: Seeds, blobs: BlobStore, threads: int
) -> Tensors:
    """The tensors after tuning as for an evaluation, with the same random draws."""
    runtime = Runtime(threads)
    tuning = msgspec.structs.replace(program, train=program.evaluate.adapt)
    for name in tuning.graphs_for("train"):
        digest = program.graphs[name].digest
        runtime.open(digest, blobs.path(digest))
    watch = Watch(lambda *_: None, lambda: False)
    return runtime.train(tuning, values, images.train, seeds, 1.0, watch).tensors


def _gathered(
    gather: Gather,
    graph: bytes,
    inputs: Mapping[str, Array],
    program: Program,
    images: DeviceData,
    seeds: Seeds,
    threads: int,
) -> Tensors:
    """The features of training images as gathered by an evaluation, with the same draws; empty rows have weight 0."""
    *_, choice_rng = seeds.generators(6)
    rows = np.arange(len(images.train))
    if len(rows) > gather.capacity:
        rows = np.sort(choice_rng.choice(len(rows), gather.capacity, replace=False))
    run = RunGraph(graph, inputs, program.batch, threads)
    values = np.zeros((gather.capacity, *gather.shape), np.float32)
    labels, weight = np.zeros(gather.capacity, np.int64), np.zeros(gather.capacity, np.float32)
    filled = 0
    for pictures in pictures_of(images.train, program.batch, rows):
        assert pictures.labels is not None  # a device knows its own
        target = slice(filled, filled + len(pictures.images))
        values[target] = run(pictures.images, f"collect/{gather.output}")
        labels[target], weight[target] = pictures.labels, 1.0
        filled += len(pictures.images)
    return {f"gathered/{gather.output}": values, "gathered/labels": labels, "gathered/weight": weight}
