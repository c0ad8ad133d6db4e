"""A vault's rounds, as small as they can be."""

from pathlib import Path

import numpy as np

from edge_client.storage.vault import Vault
from fedvit.blobs import digest_of
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors
from fedvit.wire.messages import Manifest, Result, Task
from tests.support.devices import result as make_result

RUN = "run"
UPLOAD = b"what the device sends of round " * 40


def result(number: int, run: str = RUN) -> Result:
    upload = Manifest(digest_of(UPLOAD), len(UPLOAD), 126_976)
    return make_result(number, run=run, use=ResourceUse(train_s=1.5, steps=3), upload=upload)


def personal(value: float) -> Tensors:
    return {"w": np.full(4, value, np.float32)}


def task(number: int, run: str = RUN) -> Task:
    program, groups = "blake3:" + "ef" * 32, {"model": "blake3:" + "cd" * 32}
    return Task("instance", 1, run, number, "train", 7, program, groups, (), 60.0, 1.0)


def content(vault: Vault, run: str = RUN) -> tuple[int, float | None, list[tuple[str, int]]]:
    """Return the round, the personal tensors' value, and the results without an acknowledgement."""
    local = vault.local(run)
    value = None if local is None else float(local["w"][0])
    return vault.round_of(run), value, [(pending.run, pending.round) for pending in vault.pending()]


def residual(vault: Vault) -> dict[str, float]:
    return {name: float(value[0]) for name, value in vault.residual(RUN).tensors.items()}


def work(vault: Vault, number: int, left: float) -> None:
    """Commit a round's result, coded with the residual of the rounds before."""
    coded = {"w": np.full(3, left, np.float32)}
    vault.commit(result(number), personal(number), coded, vault.residual(RUN))


def round_folder(vault: Vault, number: int) -> Path:
    [folder] = (vault.folder / RUN).glob(f"round-{number}-*")
    return folder
