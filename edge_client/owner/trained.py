"""The model of a device for a bundle: the tensors of its newest task in a run, and its personal tensors.

They are combined as for an evaluation, so that a bundle gives the same answers as the device's last test: personal
tensors from the vault, tuned on the device's images if the method tunes, with the features of its images if the
method stores them.
"""

from pathlib import Path

from edge_client.storage.best_round import best_task
from edge_client.storage.evaluation import own_groups, start_values
from edge_client.storage.task_notes import TaskNote
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from edge_client.work.comparing import make_model
from edge_client.work.runtime import ModelSource, ModelTest, Runtime, Seeds, Watch
from export.bundle.write import TrainedModel
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, ConfigError
from fedvit.program import decode_program
from fedvit.tensors import Tensors


def load_own_model(
    run: str,
    *,
    device: str,
    state: Path,
    data: DeviceData | None,
    threads: int,
    vault_key: Path | None = None,
    round: str | int | None = None,
) -> tuple[TrainedModel, DeviceData | None]:
    """The device's model of a run, and its images under the run's classes.

    `round`: "last", "best" or a number; None: the best if the device keeps it, else the last. Raises ConfigError when
    the tensors are not here, or images are needed and `data` is None; StorageFailed when the vault is damaged.
    """
    key = VaultKey.load(vault_key, make=False) if vault_key else None
    vault, blobs = Vault(state / "vault", key), BlobStore(state / "blobs")
    note, upto = _find_model(vault, run, round)
    try:
        program = decode_program(blobs.get(note.program))
        evaluate = program.evaluate
        own = own_groups(program, note, vault, upto)
        values, personal = start_values(program, note, own, vault, blobs, upto)
        graph = blobs.get(program.graphs[evaluate.graph].digest)
        runtime = Runtime(threads)
        for name in program.graphs_for("evaluate") if evaluate.adapt or evaluate.gather else ():
            runtime.open(program.graphs[name].digest, blobs.path(program.graphs[name].digest))
    except BadPayload as error:
        newest = vault.notes.list_runs()[0]
        if newest != run:
            why = f"this device has worked for run {newest!r} since, and keeps only the blobs of its newest run"
            raise ConfigError("FV1424", f"run {run!r} cannot be exported here any more: {why}") from error
        raise ConfigError(
            "FV1424", f"run {run!r} cannot be exported now (is its next task arriving?): {error}"
        ) from error
    if _find_model(vault, run, round) != (note, upto):
        raise ConfigError(
            "FV1424", f"the device started another task of run {run!r} while its tensors were read; try again"
        )
    needs = "tunes the model on" if evaluate.adapt else "compares pictures with" if evaluate.gather else None
    if needs and data is None:
        raise ConfigError(
            "FV1424", f"method {program.method!r} {needs} the device's images: name their folder with --data"
        )
    images = data.relabel(program.classes).fit_to(program.batch) if data else None
    inputs: Tensors = {f"tensor/{name}": value for name, value in values.items()}
    if needs and images:
        seeds, silent = Seeds(note.seed, note.round, device), Watch(lambda *_: None, lambda: False)
        inputs, _ = runtime.prepare(ModelTest(program, values, images, seeds), silent)
    trained = make_model(program, graph, inputs, ModelSource(run, note.round, device, personal))
    return trained, images


def _find_model(vault: Vault, run: str, asked: str | int | None) -> tuple[TaskNote, int | None]:
    """Return the task whose model is asked for, and the newest round whose personal tensors it uses; None: of all."""
    newest = _note(vault, run)
    best = best_task(vault, run)
    if asked == "last" or asked == newest.round or (asked is None and best is None):
        return newest, None
    if best and asked in (None, "best", best.round):
        return best, best.round
    kept = f"it keeps round {newest.round}, its last" + (f", and round {best.round}, its best" if best else "")
    if asked == "best":
        why = (
            "its best round: it did not test it, or the run's configuration has neither accuracy nor patience in [stop]"
        )
    else:
        why = f"round {asked}"
    raise ConfigError("FV1424", f"this device does not keep the model of run {run!r} after {why}; {kept}")


def _note(vault: Vault, run: str) -> TaskNote:
    try:
        note = vault.notes.find_newest(run)
    except BadPayload as error:  # no run can have this name
        raise ConfigError(error.code, str(error)) from error
    if note is None:
        runs = ", ".join(vault.notes.list_runs()[:5]) or "none yet"
        raise ConfigError("FV1424", f"no run {run!r} in {vault.folder}; this device has worked for: {runs}")
    return note
