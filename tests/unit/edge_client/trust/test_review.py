"""A task that would send more than is allowed is declined with a reason before it runs, and the next one is done."""

from random import Random

import msgspec

from edge_client.storage.vault import Vault
from edge_client.trust.pins import PINS
from fedvit.program import GraphSpec, Program, Role
from tests.support.agents import World, with_local_head
from tests.support.program_mutations import GraphEditor
from tests.support.settings import Setting


def with_batch_in_update(setting: Setting) -> Program:
    """Return a Program that adds the batch's pixels to the gradient of a shared tensor."""
    program, output = setting.program, "new/grad/pos_embed"
    editor = GraphEditor(setting.blobs.get(program.graphs["train"].digest))
    copy = editor.copy_to("batch/patches", editor.shape("batch/patches"), editor.shape(output), Random(0))
    editor.insert("Add", (editor.take_output(output), copy), output)
    digest = setting.blobs.put(editor.content()).digest
    return msgspec.structs.replace(program, graphs={**program.graphs, "train": GraphSpec(digest, 1)})


def test_pixels_in_an_update_are_refused_and_the_next_task_is_done(world: World, parts: Setting) -> None:
    device = world.device()
    reason = world.refusal(parts, program=with_batch_in_update(parts))
    assert "graph 'train' is not allowed" in reason
    assert device.vault.pending() == []
    assert world.result(parts, round=2).samples == 20


def test_a_personal_tensor_that_becomes_shared_is_refused(world: World, fedavg: Setting) -> None:
    """The first task of the run has pinned it as local; a restart does not change that."""
    device = world.device()
    personal = with_local_head(fedavg)
    world.server.acknowledge(world.result(fedavg, program=personal))
    head = msgspec.structs.replace(personal.groups["head"], role=Role.SHARED, initial=None)
    stolen = msgspec.structs.replace(personal, groups={**personal.groups, "head": head})
    reason = world.refusal(fedavg, program=stolen, round=2)
    assert "was local and would become shared" in reason
    assert (Vault(device.vault.folder).path("run") / PINS).exists()
    assert world.result(fedavg, program=personal, round=3).samples == 20


def test_an_update_of_one_image_is_refused(world: World, fedavg: Setting) -> None:
    """One step on one image; an evaluation on the same Program sends no update, and is done."""
    [phase] = fedavg.program.train
    once = msgspec.structs.replace(phase, steps=0)
    program = msgspec.structs.replace(fedavg.program, train=(once,))
    world.device()
    assert "an update of 0 training images" in world.refusal(fedavg, program=program)
    assert world.result(fedavg, program=program, kind="evaluate").samples == 12
