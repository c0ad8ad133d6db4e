"""Roles, codecs and masks of a run are those of its first task, also after kill -9 and until the run is removed."""

from pathlib import Path

import msgspec
import pytest

from edge_client.storage.vault import Vault, remove_run
from edge_client.trust.pins import PINS, pin_program
from fedvit.errors import Damaged, NotAllowed
from fedvit.program import Program, Role
from tests.support.codes import has_code
from tests.support.settings import Setting


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "vault")


def with_role(program: Program, group: str, role: Role) -> Program:
    changed = msgspec.structs.replace(program.groups[group], role=role)
    return msgspec.structs.replace(program, groups={**program.groups, group: changed})


def refused(vault: Vault, program: Program, reason: str) -> None:
    before = (vault.path("run") / PINS).read_bytes()
    with pytest.raises(NotAllowed, check=has_code("FV1442", reason)):
        pin_program(vault, "run", program)
    assert (vault.path("run") / PINS).read_bytes() == before


def test_the_same_program_is_accepted_every_round(vault: Vault, fedavg: Setting) -> None:
    for _ in range(2):
        pin_program(vault, "run", fedavg.program)


def test_a_personal_tensor_does_not_become_shared(vault: Vault, eftvit: Setting) -> None:
    """Nor by way of a role that is not sent, nor after a restart: the file is read anew each time."""
    pin_program(vault, "run", eftvit.program)
    for role in (Role.SHARED, Role.GENERATED, Role.SEEDED, Role.FROZEN):
        refused(vault, with_role(eftvit.program, "local", role), f"would become {role}")
    pin_program(vault, "run", with_role(eftvit.program, "local", Role.GLOBAL))
    refused(Vault(vault.folder), with_role(eftvit.program, "local", Role.SHARED), "was global/local")
    pin_program(vault, "run", eftvit.program)


def test_blocks_that_are_trained_in_some_rounds_are_accepted(vault: Vault, fedavg: Setting) -> None:
    """FedBFPT's are like that: from the server in every round, trained and sent in some."""
    for role in (Role.SHARED, Role.GLOBAL, Role.SHARED):
        pin_program(vault, "run", with_role(fedavg.program, "model", role))
    pin_program(vault, "run", with_role(fedavg.program, "model", Role.LOCAL))
    refused(vault, fedavg.program, "would become shared")


def test_a_trained_copy_is_sent_only_in_a_run_of_updates(vault: Vault, fedavg: Setting, eftvit: Setting) -> None:
    """FedRA sends additions of other blocks in every round. EFTViT's head stays: its run sends features alone."""
    program = fedavg.program
    [(name, spec)] = list(program.tensors.items())[:1]

    def with_copy(role: Role) -> Program:
        tensors = {**program.tensors, name: msgspec.structs.replace(spec, group="copy")}
        copy = msgspec.structs.replace(program.groups["model"], role=role)
        return msgspec.structs.replace(program, tensors=tensors, groups={**program.groups, "copy": copy})

    for role in (Role.SEEDED, Role.SHARED, Role.SEEDED):
        pin_program(vault, "run", with_copy(role))
    remove_run(vault, "run")
    pin_program(vault, "run", with_copy(Role.LOCAL))
    refused(vault, with_copy(Role.SEEDED), "was local and would become seeded")
    remove_run(vault, "run")
    [head] = eftvit.program.with_role(Role.SEEDED)
    pin_program(vault, "run", eftvit.program)
    refused(vault, with_role(eftvit.program, head, Role.SHARED), "was seeded and would become shared")


def test_a_tensor_that_was_not_there_is_not_sent(vault: Vault, fedavg: Setting) -> None:
    program = fedavg.program
    pin_program(vault, "run", program)
    more = {**program.tensors, "more": next(iter(program.tensors.values()))}
    refused(vault, msgspec.structs.replace(program, tensors=more), "tensor 'more' would be sent")


def test_a_codec_that_keeps_more_is_refused(vault: Vault, fedavg: Setting) -> None:
    program = fedavg.program
    coded = msgspec.structs.replace(program.groups["model"], up="int8")
    pin_program(vault, "run", msgspec.structs.replace(program, groups={**program.groups, "model": coded}))
    refused(vault, program, "was sent as 'int8'")


def test_the_mask_may_rise_and_not_fall(vault: Vault, eftvit: Setting) -> None:
    def masked(share: float) -> Program:
        batch = msgspec.structs.replace(eftvit.program.batch, mask_ratio=share)
        return msgspec.structs.replace(eftvit.program, batch=batch)

    for share in (0.5, 0.75, 0.5):
        pin_program(vault, "run", masked(share))
    refused(vault, masked(0.25), "from 0.5 to 0.25")


def test_features_are_not_sent_later_nor_with_less_noise(vault: Vault, eftvit: Setting) -> None:
    phase = eftvit.program.train[0]
    assert phase.collect

    def collecting(**changes: float) -> Program:
        collect = msgspec.structs.replace(phase.collect, **changes)
        return msgspec.structs.replace(eftvit.program, train=(msgspec.structs.replace(phase, collect=collect),))

    plain = msgspec.structs.replace(eftvit.program, train=(msgspec.structs.replace(phase, collect=None),))
    pin_program(vault, "run", plain)
    refused(vault, eftvit.program, "which the run's first task did not send")
    remove_run(vault, "run")
    pin_program(vault, "run", collecting(clip=1.0, noise=1.0))
    refused(vault, collecting(clip=1.0, noise=0.5), "in another way")


def test_pins_end_with_their_run(vault: Vault, eftvit: Setting) -> None:
    pin_program(vault, "run", eftvit.program)
    pin_program(vault, "other", with_role(eftvit.program, "local", Role.SHARED))
    remove_run(vault, "run")
    pin_program(vault, "run", with_role(eftvit.program, "local", Role.SHARED))


def test_damaged_pins_are_not_forgotten(vault: Vault, fedavg: Setting) -> None:
    pin_program(vault, "run", fedavg.program)
    file = vault.path("run") / PINS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, check=has_code("FV1704", str(file))):
        pin_program(vault, "run", fedavg.program)
