"""A coordinator with a valid certificate that wants a device's images, its personal tensors, its memory or its disk.

The device is a real process with the default policy. No attack succeeds, each has its line in the ledger, and the next
honest task is done. Graphs that the flow check refuses one by one: tests/contracts/test_flow.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from bench.edge import make_noise_folder
from fedvit.program import Draw, Role
from fedvit.tensors import Tensors
from fedvit.wire.messages import Declined, DeltaStep, Failed, Manifest, Result
from fleet.processes import Fleet
from tests.support.deployments import make_deployment, run_broker
from tests.support.hostile_coordinator import HostileCoordinator, HostileDevice, Order, make_order
from tests.support.program_mutations import GraphEditor
from tests.support.tiny_programs import make_program

MODEL = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0}
MB = 10**6
MEMORY, DISK = 400 * MB, 40 * MB
CLASSES = ("class-0", "class-1")


class Scene:
    """A deployment with its broker, the hostile coordinator, and honest orders."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.folder, self._fleet = folder, fleet
        self.deployment = make_deployment(folder / "deployment")
        self.fedper = self.make_order("fedper")
        self.eftvit = self.make_order("eftvit")
        self.devices: dict[str, HostileDevice] = {}

    def start(self) -> None:
        self.coordinator = HostileCoordinator(self.deployment, self.folder / "blobs")

    def make_order(self, method: str, **options: object) -> Order:
        folder = self.folder / "programs" / f"{method}-{len(options)}"
        order = make_order(*make_program(method, folder, options, model_options=MODEL, classes=len(CLASSES)))
        return order.change(classes=CLASSES)

    def device(self, name: str, *flags: str, images: int = 24) -> HostileDevice:
        """Return a device; each is started once."""
        if name not in self.devices:
            data = make_noise_folder(self.folder / "data" / name, images=images, size=8)
            device = HostileDevice(self.deployment, self._fleet, self.folder / "state", name, data, *flags)
            self.devices[name] = device
            self.coordinator.await_device(device)
        return self.devices[name]

    def attack(self, device: HostileDevice, order: Order, run: str, **changes: object) -> Declined | Failed | Result:
        """Give a task that must not be done, and check that nothing of it is left."""
        answer = self.coordinator.ask(device, order, run=run, **changes)
        print(run, "->", str(answer)[:300])
        self.check(device, run)
        return answer

    def check(self, device: HostileDevice, run: str) -> None:
        """Check that nothing leaked, that the ledger has the attempt, and that the device does its next honest task."""
        elapsed_s = self.coordinator.time_honest(device, self.fedper)
        print(f"{run}: the next honest task took {elapsed_s:.2f} s; peak {device.peak_bytes / MB:.0f} MB, disk "
              f"{device.disk_bytes() / MB:.1f} MB")
        assert not list(self.coordinator.find_leaks(device, self.eftvit.program.batch, find_personal(self.fedper)))
        assert run in {line.get("run") for line in device.read_ledger() if line["kind"] == "refused"}


def find_personal(order: Order) -> Tensors:
    """Return the first values of local tensors of more than a few numbers."""
    names = [name for group in order.program.with_role(Role.LOCAL) for name in order.program.names(group)]
    return {name: order.values[name] for name in names if order.values[name].size > 4}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Fleet() as fleet:
        scene = Scene(tmp_path_factory.mktemp("hostile"), fleet)
        with run_broker(scene.deployment):
            scene.start()
            yield scene
            scene.coordinator.close()
            for device in scene.devices.values():
                device.stop()


# --- images and personal tensors ----------------------------------------------------------------------


def edit(order: Order, output: str, make: Callable[[GraphEditor], str], *, adds: bool = True) -> Order:
    """Let a training graph send another value, for a gradient in addition to the honest one."""
    [phase] = order.program.train
    editor = GraphEditor(order.graphs[phase.graph])
    before = editor.take_output(output)
    made = make(editor)
    editor.give_output(output, editor.add("Add", before, made) if adds else made)
    return order.change_graph(phase.graph, editor.content())


def copy_images(editor: GraphEditor, output: str) -> str:
    shape = editor.shape("batch/patches")
    return editor.copy_to("batch/patches", shape, editor.shape(output), Random(1))


def name_gradient(order: Order, at_least: int) -> str:
    """Return the output of a shared tensor's gradient of so many numbers."""
    program = order.program
    shared = [name for group in program.with_role(Role.SHARED) for name in program.names(group)]
    name = next(name for name in shared if np.prod(program.tensors[name].shape) >= at_least)
    return f"new/grad/{name}"


def collect_identity(scene: Scene) -> Order:
    """What is collected is the image, in the shape of features."""
    order, [phase] = scene.eftvit, scene.eftvit.program.train
    assert phase.collect
    output = f"collect/{phase.collect.output}"

    def make(editor: GraphEditor) -> str:
        shape, wanted = editor.shape("batch/patches"), editor.shape(output)
        flat = editor.add("Reshape", "batch/patches", editor.constant([shape[0], shape[1] * shape[2]], np.int64))
        bounds = [editor.constant([number], np.int64) for number in (0, int(np.prod(wanted[1:])), 1, 1)]
        return editor.add("Reshape", editor.add("Slice", flat, *bounds), editor.constant(list(wanted), np.int64))

    return edit(order, output, make, adds=False)


def share_batch(scene: Scene) -> Order:
    output = name_gradient(scene.fedper, 384)
    return edit(scene.fedper, output, lambda editor: copy_images(editor, output))


def differentiate_sum(scene: Scene) -> Order:
    """The gradient of loss = sum(W * x) is the sum of a batch's images."""
    output = name_gradient(scene.fedper, 192)

    def make(editor: GraphEditor) -> str:
        axes = editor.constant([0], np.int64)
        total = editor.add("ReduceSum", "batch/patches", axes, keepdims=0)
        return editor.copy_to(total, editor.shape("batch/patches")[1:], editor.shape(output), Random(1))

    return edit(scene.fedper, output, make)


def weigh_one_image(scene: Scene) -> Order:
    [phase] = scene.fedper.program.train
    editor = GraphEditor(scene.fedper.graphs[phase.graph])
    weights = editor.constant(np.arange(editor.shape("batch/weight")[0]) == 0)
    editor.insert("Mul", ("batch/weight", weights), "one.weight", first=True)
    editor.read_instead("batch/weight", "one.weight")
    return scene.fedper.change_graph(phase.graph, editor.content())


def copy_personal(scene: Scene) -> Order:
    name = max(find_personal(scene.fedper), key=lambda name: scene.fedper.values[name].size)
    output = name_gradient(scene.fedper, scene.fedper.values[name].size)

    def make(editor: GraphEditor) -> str:
        return editor.copy_to(f"tensor/{name}", editor.shape(f"tensor/{name}"), editor.shape(output), Random(1))

    return edit(scene.fedper, output, make)


def collect_unmasked(scene: Scene) -> Order:
    return scene.make_order("eftvit", mask=0.0, lr=0.5, epochs=1)


LEAKS: dict[str, Callable[[Scene], Order]] = {
    "identity-masked": collect_identity,
    "unmasked-features": collect_unmasked,
    "shared-batch": share_batch,
    "gradient-of-sum": differentiate_sum,
    "weight-of-one": weigh_one_image,
    "batch-of-one": lambda scene: scene.make_order("fedper", batch_size=1, micro_batch=1).change_phase(steps=1),
    "personal-copy": copy_personal,
}


@pytest.mark.parametrize("name", LEAKS)
def test_images_and_personal_tensors_stay(scene: Scene, name: str) -> None:
    answer = scene.attack(scene.device("plain"), LEAKS[name](scene), name)
    assert isinstance(answer, Declined)


def test_update_of_a_single_image_is_not_sent(scene: Scene) -> None:
    """A device with one training image sends its features at most; another order of batches does not help."""
    device = scene.device("one-image", images=3)
    answer = scene.coordinator.ask(device, scene.fedper, run="one-image")
    assert isinstance(answer, Declined), answer
    assert not list(scene.coordinator.find_leaks(device, scene.eftvit.program.batch, find_personal(scene.fedper)))
    assert "one-image" in {line.get("run") for line in device.read_ledger() if line["kind"] == "refused"}


def change_role(order: Order, before: Role, after: Role) -> Order:
    groups = {
        name: msgspec.structs.replace(group, role=after) if group.role is before else group
        for name, group in order.program.groups.items()
    }
    return order.change(groups=groups)


@pytest.mark.parametrize("after", [Role.SHARED, Role.GLOBAL])
def test_local_tensors_of_a_run_stay_local(scene: Scene, after: Role) -> None:
    """A second Program of the run that the device takes part in declares its local group as one that is sent."""
    device, run = scene.device("plain"), f"local-to-{after}"
    assert isinstance(scene.coordinator.ask(device, scene.fedper, run=run), Result)
    trained = change_role(scene.fedper, Role.LOCAL, after)
    answer = scene.attack(device, trained, run)
    assert isinstance(answer, Declined)
