"""What a task starts from: the vault's tensors for the groups that are the device's own, else the server's."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from edge_client.storage.evaluation import blobs_of_model, own_groups, start_values
from edge_client.storage.vault import NO_RESIDUAL, TaskNote, Vault
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.program import Batch, Evaluate, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train
from fedvit.resources import ResourceUse
from fedvit.tensors import Array, pack
from fedvit.wire.messages import Result

HALF = (0.5, 0.5, 0.5)
GRAPHS = {name: GraphSpec("blake3:" + number * 64, 1) for name, number in (("train", "a"), ("predict", "b"))}


class Device(NamedTuple):
    vault: Vault
    blobs: BlobStore
    program: Program
    note: TaskNote  # of the newest task, in round 2

    def trained(self, round_number: int, **tensors: float) -> None:
        """The device finished a training."""
        result = Result("r", round_number, "train", 4, {"loss": 1.0}, ResourceUse())
        kept = {name: full(value) for name, value in tensors.items()}
        self.vault.commit(result, kept, {}, NO_RESIDUAL)

    def start(self, own: set[str]) -> tuple[dict[str, float], int]:
        values, personal = start_values(self.program, self.note, own, self.vault, self.blobs)
        return {name: float(value[0]) for name, value in values.items()}, personal


def full(value: float) -> Array:
    return np.full(2, value, np.float32)


def device_of(tmp_path: Path, **evaluate: Any) -> Device:
    """The server sends 1 for `body`, a first value of 2 for `own`, and 3 for `base`."""
    blobs = BlobStore(tmp_path / "blobs")
    body, own, base = (
        blobs.put(pack({name: full(value)})).digest for name, value in (("b", 1.0), ("o", 2.0), ("f", 3.0))
    )
    program = Program(
        method="fedper",
        model="made",
        classes=("ant",),
        groups={
            "body": TensorGroup(Role.SHARED),
            "own": TensorGroup(Role.LOCAL, own),
            "base": TensorGroup(Role.FROZEN, base),
        },
        tensors={
            name: TensorSpec((2,), "float32", group) for name, group in zip("bof", ("body", "own", "base"), strict=True)
        },
        graphs=GRAPHS,
        train=(Train(graph="train", groups=("body", "own"), lr=0.1),),
        evaluate=Evaluate(graph="predict", **evaluate),
        batch=Batch(image_size=8, patch_size=4, batch_size=2, mean=HALF, std=HALF),
    )
    note = TaskNote("r", 2, "evaluate", 7, "blake3:" + "c" * 64, {"body": body})
    return Device(Vault(tmp_path / "vault"), blobs, program, note)


def test_start_values_are_those_of_the_server_before_the_first_training(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    own = own_groups(device.program, device.note, device.vault)
    assert own == set()
    assert device.start(own) == ({"b": 1.0, "o": 2.0, "f": 3.0}, 0)


def test_start_values_take_local_groups_from_the_vault(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    device.trained(1, o=5.0)
    own = own_groups(device.program, device.note, device.vault)
    assert own == {"own"}
    assert device.start(own) == ({"b": 1.0, "o": 5.0, "f": 3.0}, 1)


@pytest.mark.parametrize(("of_this_round", "newest", "body"), [(False, 1, 6.0), (True, 1, 1.0), (True, 2, 6.0)])
def test_start_values_of_groups_that_are_tested_as_trained(
    tmp_path: Path, of_this_round: bool, newest: int, body: float
) -> None:
    """Where only this round's training counts, the server's are used after an earlier one."""
    device = device_of(tmp_path, kept=("body",), kept_of_this_round=of_this_round)
    device.trained(newest, o=5.0, b=6.0)
    values, personal = device.start(own_groups(device.program, device.note, device.vault))
    assert values == {"b": body, "o": 5.0, "f": 3.0}
    assert personal == (2 if body == 6.0 else 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"groups": {}}, r"group 'body' of round 2: the task does not name it"),
        ({"initial": None}, r"group 'own' of round 2: it has no initial value"),
    ],
)
def test_start_values_name_a_group_without_a_value(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    device = device_of(tmp_path)
    program, note = device.program, device.note
    if "groups" in changed:
        note = msgspec.structs.replace(note, **changed)
    else:
        program = msgspec.structs.replace(program, groups={**program.groups, "own": TensorGroup(Role.LOCAL)})
    with pytest.raises(BadPayload, match=words):
        start_values(program, note, set(), device.vault, device.blobs)


def test_blobs_of_the_model_are_what_its_export_reads(tmp_path: Path) -> None:
    """Not the first value of a group that the device has trained since, nor the graph of the training."""
    device = device_of(tmp_path)
    program, groups = device.program, device.program.groups
    always = {device.note.program, GRAPHS["predict"].digest, device.note.groups["body"], groups["base"].initial}
    assert blobs_of_model(program, device.note, device.vault) == always | {groups["own"].initial}
    device.trained(2, o=5.0)
    assert blobs_of_model(program, device.note, device.vault) == always
