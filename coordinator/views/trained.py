"""The model for a bundle: the newest state of a run, and tensors generated for one device.

It only has what the server has: a model that needs a device's personal tensors or images must be exported on that
device.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.config import make_config
from coordinator.record.record import Record
from coordinator.record.retention import run_mirror
from coordinator.record.scores import BEST, find_round
from coordinator.record.tables import RunRecord
from coordinator.run_view import RunView, read_run
from export.bundle.card import Origin, Reported, Training
from export.bundle.write import TrainedModel
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, ConfigError, StorageFailed
from fedvit.hints import command
from fedvit.policy import find_needs
from fedvit.precision import as_specified
from fedvit.program import Program, Role, decode_program
from fedvit.tensors import Tensors, check_tensors, unpack

if TYPE_CHECKING:
    from coordinator.record.mirror import Mirror


class ExportedProgram(NamedTuple):
    """The Program of a run whose engine needed no graphs, exported after it."""

    digest: str
    blobs: BlobStore


class RunFiles:
    """The files of a run: those of its folder, or, where they are missing or damaged there, of its mirror."""

    def __init__(self, folder: Path, record: RunRecord, exported: ExportedProgram | None = None) -> None:
        self.folder = folder
        self.record = record
        self.program = exported.digest if exported else record.program
        self._exported = exported.blobs if exported else None
        self._blobs = VerifiedBlobs(folder / "blobs")

    @cached_property
    def _mirror(self) -> "Mirror | None":
        return run_mirror(self.record)

    def blob(self, digest: str) -> bytes:
        """Raises StorageFailed if it is nowhere, or the mirror cannot be used."""
        if self._exported and self._exported.has(digest):
            return self._exported.get(digest)
        try:
            return self._blobs.get(digest)
        except StorageFailed as error:
            return self._in_mirror(error, lambda mirror: mirror.blob(digest))

    def result(self, name: str) -> bytes | None:
        """A file that the run wrote at its end; None if it is nowhere. Raises StorageFailed."""
        file = self.folder / name
        if file.is_file():
            return file.read_bytes()
        return self._mirror.result(name) if self._mirror else None

    def _in_mirror(self, error: StorageFailed, read: "Callable[[Mirror], bytes]") -> bytes:
        if self._mirror is None:
            raise error
        try:
            return read(self._mirror)
        except StorageFailed as other:
            raise StorageFailed("FV1019", f"{error}, and in the run's mirror: {other}") from other


def read_trained_model(
    store: Record, files: RunFiles, device: str | None, made_by: str, round: str | int | None = None
) -> TrainedModel:
    """Read the model of a run, or of one device of it, after a round that `find_round` takes.

    Files that are not on this disk are read from the run's mirror, if it has one. Raises ConfigError if there is no
    such run, round or device, or if only a device has what the model needs; StorageFailed if files are damaged, or
    missing, and its mirror cannot be used.
    """
    record, run = files.record, files.record.id
    kept = find_round(store, run, round)
    last = store.rounds.read_newest_closed(run)
    if files.program is None or kept.state is None or last is None:
        raise ConfigError("FV1623", f"run {run!r} has closed no round: there is nothing to export yet")
    saved = kept.state
    try:
        program = decode_program(files.blob(files.program))
        graph = files.blob(program.graphs[program.evaluate.graph].digest)
        frozen = [group.initial for group in program.groups.values() if group.role is Role.FROZEN and group.initial]
        values: Tensors = {}
        for digest in (*frozen, *saved.groups.values()):
            values |= unpack(files.blob(digest))
    except BadPayload as error:
        raise StorageFailed(error.code, f"run {run!r}: {error}") from error
    if why := _why_on_device(program):
        raise ConfigError("FV1904", _elsewhere(program, run, why))
    summary = read_run(store, run)
    part = "" if kept.round == last.round else f"{BEST}/"
    values |= _read_generated(program, record, summary, files, device, part)
    for name in (name for group in program.with_role(Role.ASSIGNED) for name in program.names(group)):
        values[name] = np.zeros(program.tensors[name].shape, program.tensors[name].dtype)  # an answer does not need it
    held = as_specified({name: values[name] for name in program.tensors if name in values}, program.tensors)
    check_tensors(held, program.forms_of([*program.groups]), f"run {run!r}")
    origin = Origin(
        run=run,
        method=program.method,
        model=program.model,
        round=kept.round,
        device=device,
        made_by=made_by,
    )
    return TrainedModel(
        graph=graph,
        values={f"tensor/{name}": value for name, value in held.items()},
        batch=program.batch,
        classes=program.classes,
        origin=origin,
        reported=_find_accuracy(summary, device, kept.round),
        training=Training(
            devices=len(summary.devices),
            train_images=sum(entry.train_samples for entry in summary.devices),
            test_images=sum(entry.test_samples for entry in summary.devices),
            policy=tuple(_describe_policy(program, record, summary)),
        ),
        options=record.config.get("options", {}),
        model_options=record.config.get("model_options", {}),
    )


def _describe_policy(program: Program, record: RunRecord, summary: RunView) -> Iterator[str]:
    """Yield what limited the data that left devices."""
    yield f"devices allowed: {find_needs(program)}"
    if program.secure:
        yield "updates were added up in secret, the server saw their sums alone"
    delta = record.config.get("privacy", {}).get("delta")
    for what, epsilon in (("updates", summary.epsilon), ("features", summary.feature_epsilon)):
        if epsilon is not None:
            yield f"differential privacy of {what}: epsilon {epsilon:.3g}" + (f", delta {delta:g}" if delta else "")


def export_hint(store: Record, runs: Path, run: str) -> str:
    """Return the command that exports a model of a run. Raises StorageFailed if the run's program cannot be read."""
    record = store.runs.read(run)
    program = decode_program(RunFiles(runs / run, record).blob(record.program or ""))
    on_device = command("edge-client", "export", run, "--data", "IMAGES")
    if _why_on_device(program):
        return on_device
    device: tuple[str, ...] = ()
    if program.with_role(Role.GENERATED):
        names = (entry.device for entry in read_run(store, run).devices)
        name = next((name for name in names if _find_variant(record, name) is None), None)
        if name is None:
            return on_device
        device = ("--device", name)
    return command("coordinator", "export", run, *device, "--out", "bundle", runs=runs)


def _why_on_device(program: Program) -> str | None:
    """Reason why only a device has the whole model; None if the server has it."""
    evaluate = program.evaluate
    if evaluate.adapt:
        return "a device tunes it on its own images before it answers"
    if evaluate.gather:
        return "a device answers with features of its own images"
    if evaluate.kept and not evaluate.kept_of_this_round:
        return "a device answers with the tensors that it last trained itself"
    if personal := [name for group in program.with_role(Role.LOCAL) for name in program.names(group)]:
        return f"{len(personal)} of its tensors never leave a device, the first is {personal[0]!r}"
    return None


def _elsewhere(program: Program, run: str, why: str) -> str:
    return (
        f"the server has no whole model of method {program.method!r}: {why}; "
        f"export it there, by `edge-client export {run} --data IMAGES`"
    )


def _find_variant(record: RunRecord, device: str) -> str | None:
    """Return the name or pattern of a device's own variant; None if it has none."""
    variants = make_config(record.config, f"run {record.id}").run.variants
    return next((entry for entry in variants if fnmatchcase(device, entry) or entry == device), None)


def _read_generated(
    program: Program, record: RunRecord, summary: RunView, files: RunFiles, device: str | None, part: str
) -> Tensors:
    """The tensors that the server generated for the device at the run's end, in a part of the run's folder."""
    known = [entry.device for entry in summary.devices]
    if device is not None and device not in known:
        raise ConfigError("FV1904", f"no device {device!r} in run {record.id!r}; its devices are: {', '.join(known)}")
    if not program.with_role(Role.GENERATED):
        if device is not None:
            raise ConfigError(
                "FV1904",
                f"method {program.method!r} makes one model for all devices: --device {device} has none of its own",
            )
        return {}
    if device is None:
        raise ConfigError(
            "FV1904",
            f"method {program.method!r} makes a model for each device: choose one by --device; "
            f"the run's devices are: {', '.join(known)}",
        )
    if pattern := _find_variant(record, device):
        raise ConfigError(
            "FV1904", _elsewhere(program, record.id, f"device {device!r} has a variant of its own ({pattern!r})")
        )
    name = f"{part}generated/{device}.safetensors"
    content = files.result(name) if record.status == "finished" else None
    if content is None:
        resume = command("coordinator", "start", "--resume", record.id, runs=files.folder.parent)
        raise ConfigError(
            "FV1904",
            f"run {record.id!r} is {record.status}: tensors for device {device!r} are written at its end, "
            f"to {files.folder / name}; resume it with `{resume}`",
        )
    try:
        return unpack(content)
    except BadPayload as error:
        raise StorageFailed("FV1704", f"{files.folder / name} is damaged: {error}") from error


def _find_accuracy(summary: RunView, device: str | None, number: int) -> Reported | None:
    """The newest measured accuracy up to a round: of the device, or the mean of all devices."""
    for entry in reversed([entry for entry in summary.rounds if entry.round <= number]):
        accuracy = entry.accuracy if device is None else {k: v for k, v in entry.accuracy.items() if k == device}
        if accuracy:
            mean = sum(accuracy.values()) / len(accuracy)
            return Reported(accuracy=mean, devices=len(accuracy), round=entry.round, protocol=summary.protocol)
    return None
