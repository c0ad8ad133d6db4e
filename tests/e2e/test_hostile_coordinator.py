"""A coordinator with a valid certificate that wants a device's images, its personal tensors, its memory or its disk.

The device is a real process with the default policy. No attack succeeds, each has its line in the ledger, and the next
honest task is done. Graphs that the flow check refuses one by one: tests/contracts/test_flow.py.
"""

import datetime
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from bench.edge import make_noise_folder
from edge_client.storage.disk import MAX_RUNS
from fedvit.program import Draw, Role, TensorGroup, TensorSpec
from fedvit.publisher import PublisherKey
from fedvit.wire.enrolment import FROM_COORDINATOR, SECRET_BYTES, JoinGranted, Renewed, encode_enrolment, seal
from fedvit.wire.messages import Declined, DeltaStep, Failed, Manifest, Result
from fleet.processes import Fleet
from tests.support.deployments import make_deployment, run_broker
from tests.support.draws import choose_count
from tests.support.hostile_coordinator import (
    HostileCoordinator,
    HostileDevice,
    Order,
    is_scaled_copy,
    make_order,
    read_images,
    sign_order,
)
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
        self.key = PublisherKey.create(folder / "publisher.key")
        self.other_key = PublisherKey.create(folder / "other.key")

    def start(self) -> None:
        self.coordinator = HostileCoordinator(self.deployment, self.folder / "blobs")

    def make_order(self, method: str, **options: object) -> Order:
        folder = self.folder / "programs" / f"{method}-{len(options)}"
        order = make_order(*make_program(method, folder, options, model_options=MODEL, classes=len(CLASSES)))
        return order.change(classes=CLASSES)

    def device(
        self,
        name: str,
        *flags: str,
        images: int = 24,
        train: int | None = None,
        policy: str = "",
        publisher: PublisherKey | None = None,
    ) -> HostileDevice:
        """Return a device; each is started once. `train`: training images that it keeps."""
        if name not in self.devices:
            data = make_noise_folder(self.folder / "data" / name, images=images, size=8)
            for image in [] if train is None else sorted((data / "train").rglob("*.*"))[train:]:
                image.unlink()
            if policy:
                (self.folder / "state" / name).mkdir(parents=True)
                (self.folder / "state" / name / "policy.toml").write_text(policy)
            state = self.folder / "state"
            device = HostileDevice(self.deployment, self._fleet, state, name, data, *flags, publisher=publisher)
            self.devices[name] = device
            self.coordinator.await_device(device)
        return self.devices[name]

    def attack(
        self, device: HostileDevice, order: Order, run: str, *, honest: Order | None = None, **changes: Any
    ) -> Declined | Failed | Result:
        """Give a task, and check what is left of it once it is answered."""
        answer = self.coordinator.ask(device, order, run=run, **changes)
        self.check(device, run, honest)
        return answer

    def find_leaks(self, device: HostileDevice) -> list[str]:
        return list(self.coordinator.find_leaks(device, self.eftvit.program.batch))

    def check(self, device: HostileDevice, run: str, honest: Order | None = None, kind: str = "refused") -> None:
        """Check that nothing leaked, that the ledger has the attempt, and that the device does its next honest task."""
        elapsed_s = self.coordinator.time_honest(device, honest or self.fedper)
        print(
            f"{run}: the next honest task took {elapsed_s:.2f} s; peak {device.peak_bytes / MB:.0f} MB, disk "
            f"{device.disk_bytes() / MB:.1f} MB"
        )
        assert not self.find_leaks(device)
        assert run in {line.get("run") for line in device.read_ledger() if line["kind"] == kind}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Fleet() as fleet:
        scene = Scene(tmp_path_factory.mktemp("hostile"), fleet)
        with run_broker(scene.deployment):
            scene.start()
            yield scene
            scene.coordinator.close()
            for device in scene.devices.values():
                device.terminate()
            for device in scene.devices.values():
                device.check_end()


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


def collect_identity(order: Order) -> Order:
    """Collect the image itself, in the shape of features."""
    [phase] = order.program.train
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
    program = scene.fedper.program
    local = [name for group in program.with_role(Role.LOCAL) for name in program.names(group)]
    name = max(local, key=lambda name: scene.fedper.values[name].size)
    output = name_gradient(scene.fedper, scene.fedper.values[name].size)

    def make(editor: GraphEditor) -> str:
        return editor.copy_to(f"tensor/{name}", editor.shape(f"tensor/{name}"), editor.shape(output), Random(1))

    return edit(scene.fedper, output, make)


def collect_unmasked(scene: Scene) -> Order:
    return scene.make_order("eftvit", mask=0.0, lr=0.5, epochs=1)


LEAKS: dict[str, Callable[[Scene], Order]] = {
    "identity-masked": lambda scene: collect_identity(scene.eftvit),
    "identity": lambda scene: collect_identity(collect_unmasked(scene)),
    "unmasked-features": collect_unmasked,
    "shared-batch": share_batch,
    "gradient-of-sum": differentiate_sum,
    "weight-of-one": weigh_one_image,
    "batch-of-one": lambda scene: scene.make_order("fedper", batch_size=1, micro_batch=1).change_phase(steps=1),
    "personal-copy": copy_personal,
}


def test_copies_would_be_found(scene: Scene) -> None:
    """Put images and a personal tensor among what came, and look for them."""
    device, coordinator = scene.device("plain"), scene.coordinator
    coordinator.time_honest(device, scene.fedper)
    prepared, pixels = read_images(device.data, scene.eftvit.program.batch)
    assert not scene.find_leaks(device)
    for secret in (prepared[5], pixels[7], device.read_personal()[0]):
        coordinator.payloads.append(("control", secret.tobytes()))
        assert scene.find_leaks(device) == ["a copy in control"]
        coordinator.payloads.pop()
    assert is_scaled_copy(np.append(np.ones(3), -0.25 * prepared[2]), prepared.reshape(-1, prepared.shape[-1]))


FAST = ("identity-masked", "shared-batch", "gradient-of-sum")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in LEAKS])
def test_images_and_personal_tensors_stay(scene: Scene, name: str) -> None:
    answer = scene.attack(scene.device("plain"), LEAKS[name](scene), name)
    assert isinstance(answer, Declined)


def test_update_of_a_single_image_is_not_sent(scene: Scene) -> None:
    """The device sends masked features of its only training image, as its policy says, and no update."""
    device = scene.device("one-image", images=4, train=1)
    for name, order in {"one-image": scene.fedper, "one-image-often": scene.fedper.change_phase(epochs=9)}.items():
        assert isinstance(scene.attack(device, order, name, honest=scene.eftvit), Declined)


def collect_nearly_linear(scene: Scene) -> Order:
    """Collect a layer so small that the Tanh behind it changes little: the flow check cannot tell it from others."""
    [phase] = scene.eftvit.program.train
    assert phase.collect
    output = f"collect/{phase.collect.output}"

    def make(editor: GraphEditor) -> str:
        samples, tokens, pixels = editor.shape("batch/patches")
        weight, wanted = "tensor/patch_embed.proj.weight", editor.shape(output)
        width = editor.shape(weight)[0]
        flat = editor.add("Reshape", weight, editor.constant([width, pixels], np.int64))
        small = editor.add("Mul", editor.add("Transpose", flat, perm=[1, 0]), editor.constant(0.01))
        layer = editor.add("Tanh", editor.add("MatMul", "batch/patches", small))
        row = editor.add("Reshape", layer, editor.constant([samples, tokens * width], np.int64))
        size = int(np.prod(wanted[1:]))
        rows = editor.add("Concat", *([row] * -(-size // (tokens * width))), axis=1)
        bounds = [editor.constant([number], np.int64) for number in (0, size, 1, 1)]
        return editor.add("Reshape", editor.add("Slice", rows, *bounds), editor.constant(list(wanted), np.int64))

    return edit(scene.eftvit, output, make, adds=False)


FORGERIES: dict[str, Callable[[Order, Scene], dict[str, Any]]] = {
    "unsigned": lambda order, scene: {},
    "of-another-publisher": lambda order, scene: sign_order(order, scene.other_key),
    "in-its-name": lambda order, scene: {**sign_order(order, scene.other_key), "publisher": scene.key.public},
    "of-another-graph": lambda order, scene: sign_order(scene.eftvit, scene.key),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_device_with_a_publisher_runs_no_invented_graph(scene: Scene, name: str) -> None:
    """The default policy of every device that has joined: graphs that the flow check would allow are refused, too."""
    device = scene.device("with-publisher", publisher=scene.key)
    order = collect_nearly_linear(scene)
    if name == "unsigned":
        assert isinstance(scene.coordinator.ask(scene.device("plain"), order, run="without-publisher"), Result)
    answer = scene.attack(device, order, name, **FORGERIES[name](order, scene))
    assert isinstance(answer, Declined)
    changed = "THE PUBLISHER HAS CHANGED" in answer.reason
    assert changed == (name == "of-another-publisher")


def change_role(order: Order, before: Role, after: Role) -> Order:
    groups = {
        name: msgspec.structs.replace(group, role=after) if group.role is before else group
        for name, group in order.program.groups.items()
    }
    return order.change(groups=groups)


@pytest.mark.parametrize("after", [Role.SHARED, pytest.param(Role.GLOBAL, marks=pytest.mark.slow)])
def test_local_tensors_of_a_run_stay_local(scene: Scene, after: Role) -> None:
    """A second Program of the run that the device takes part in declares its local group as one that is sent."""
    device, run = scene.device("plain"), f"local-to-{after}"
    assert isinstance(scene.coordinator.ask(device, scene.fedper, run=run), Result)
    trained = change_role(scene.fedper, Role.LOCAL, after)
    answer = scene.attack(device, trained, run)
    assert isinstance(answer, Declined)


# --- memory, processor, disk --------------------------------------------------------------------------


def answer_with(order: Order, make: Callable[[GraphEditor], str]) -> Order:
    """Let the graph of an evaluation answer what a few nodes make, and nothing else."""
    name = order.program.evaluate.graph
    editor = GraphEditor(order.graphs[name])
    editor.clear()
    number = editor.add("Reshape", make(editor), editor.constant([1, 1], np.int64))
    shape = editor.constant([order.program.batch.answer_size, len(CLASSES)], np.int64)
    editor.give_output("logits", editor.add("Expand", number, shape))
    return order.change_graph(name, editor.content())


def fill(editor: GraphEditor, *shape: int) -> str:
    return editor.add("ConstantOfShape", editor.constant(list(shape), np.int64))


def add_up(editor: GraphEditor, value: str) -> str:
    return editor.add("ReduceSum", value, editor.constant([0, 1], np.int64), keepdims=0)


def fill_memory(editor: GraphEditor) -> str:
    """Make 900 million numbers, which take 3.6 GB."""
    return add_up(editor, fill(editor, 30_000, 30_000))


def multiply_on(editor: GraphEditor) -> str:
    """Multiply large matrices hundreds of times, which takes minutes."""
    value = factor = fill(editor, 2500, 2500)
    for _ in range(600):
        value = editor.add("MatMul", value, factor)
    return add_up(editor, value)


def test_small_graph_does_not_exceed_the_memory_budget(scene: Scene) -> None:
    device = scene.device("little-memory", "--memory-budget", str(MEMORY))
    order = answer_with(scene.fedper, fill_memory)
    assert len(order.graphs[order.program.evaluate.graph]) < 1000
    answer = scene.attack(device, order, "memory", kind="evaluate")
    assert isinstance(answer, Failed)
    assert answer.broke == "memory"
    assert device.peak_bytes <= MEMORY


@pytest.mark.slow
def test_random_numbers_do_not_exceed_the_memory_budget(scene: Scene) -> None:
    device = scene.device("little-memory", "--memory-budget", str(MEMORY))
    draws = tuple(Draw(name=f"numbers-{number}", low=0, high=9, count=10_000_000) for number in range(40))
    assert isinstance(scene.attack(device, scene.fedper.change_phase(draws=draws), "draws"), Declined)
    assert device.peak_bytes <= MEMORY


@pytest.mark.slow
def test_endless_products_end_at_the_deadline(scene: Scene) -> None:
    order = answer_with(scene.fedper, multiply_on)
    answer = scene.attack(scene.device("plain"), order, "products", kind="evaluate", deadline_s=3.0)
    assert isinstance(answer, Failed)
    assert "deadline" in answer.reason


@pytest.mark.slow
def test_device_ends_by_sigterm_while_a_graph_runs(scene: Scene) -> None:
    device = scene.device("to-end")
    scene.coordinator.give(device, answer_with(scene.fedper, multiply_on), run="sigterm", kind="evaluate")

    def is_at_work() -> bool:
        """Tell whether a process of the device has used half a second of processor time."""
        tree = psutil.Process(device.process.pid).children(recursive=True)
        return any(sum(one.cpu_times()[:2]) > 0.5 for one in tree)

    scene.coordinator.wait(is_at_work, "the graph does not run", device)
    scene.devices.pop(device.name)
    device.terminate()
    device.check_end()


def test_steps_of_delta_chains_in_a_circle_are_refused(scene: Scene) -> None:
    digests = [f"blake3:{number:064x}" for number in range(24)]
    steps = tuple(
        DeltaStep(target, base, Manifest(digests[0], 1, 1024))
        for target in digests
        for base in digests
        if target != base
    )
    [group] = scene.fedper.program.with_role(Role.SHARED)
    answer = scene.attack(
        scene.device("plain"), scene.fedper, "circle", recipes=steps[:200], groups={group: digests[3]}
    )
    assert isinstance(answer, Failed)


def with_ballast(order: Order, size: int) -> Order:
    """Add a local tensor of so many numbers, which no graph reads, to a Program."""
    program = order.program
    tensors = {**program.tensors, "ballast": TensorSpec((size,), "float32", "ballast")}
    changed = order.change(groups={**program.groups, "ballast": TensorGroup(Role.LOCAL)}, tensors=tensors)
    return Order(changed.program, order.graphs, {**order.values, "ballast": np.zeros(size, np.float32)})


@pytest.mark.slow
def test_vaults_of_new_runs_stay_inside_the_disk_budget(scene: Scene) -> None:
    """One blob of 8 MB is sent once; each of twelve runs would keep a copy of it in its vault."""
    device = scene.device("little-disk", "--disk-budget", str(DISK))
    order = with_ballast(scene.fedper, 2 * MB)
    answers = []
    for number in range(12):
        answers.append(scene.coordinator.ask(device, order, run=f"disk-{number}"))
        assert device.disk_bytes() <= DISK
    assert isinstance(answers[-1], Failed)
    scene.check(device, "disk-11")


@pytest.mark.slow
def test_many_run_names_take_little_memory_and_disk(scene: Scene) -> None:
    """More runs than a device remembers: half of them are evaluated alone, and of half no result is acknowledged."""
    device = scene.device("many-runs", "--disk-budget", str(DISK))
    for _ in range(2):
        scene.coordinator.time_honest(device, scene.fedper)
    rounds = set((device.state / "vault" / "honest").glob("round-*"))
    for number in range(choose_count(MAX_RUNS + 40, 2 * MAX_RUNS + 40)):
        kind = "train" if number % 2 else "evaluate"
        scene.coordinator.ask(device, scene.fedper, run=f"run-{number}", kind=kind, acknowledges=number % 4 < 2)
        assert len(list((device.state / "vault").iterdir())) <= MAX_RUNS + 1
    assert set((device.state / "vault" / "honest").glob("round-*")) == rounds
    assert device.disk_bytes() <= DISK
    assert device.peak_bytes <= MEMORY
    scene.check(device, f"run-{number}", kind="update")


# --- policy -------------------------------------------------------------------------------------------


def test_hours_of_the_policy_hold(scene: Scene) -> None:
    """The device trains in one hour of the day, which is not now."""
    begin = datetime.datetime.now() + datetime.timedelta(hours=2)
    device = scene.device("hours", "--hours", f"{begin:%H:%M}-{begin + datetime.timedelta(hours=1):%H:%M}")
    for kind in ("train", "evaluate"):
        answer = scene.coordinator.ask(device, scene.fedper, run=f"hours-{kind}", kind=kind)
        assert isinstance(answer, Declined)
    refused = {line["run"] for line in device.read_ledger() if line["kind"] == "refused"}
    assert refused == {"hours-train", "hours-evaluate"}


def test_policy_does_not_change_over_the_network(scene: Scene) -> None:
    """The coordinator sends the answer of a join with a certificate, as for a token with another policy."""
    policy = '[send]\nfeatures = "none"\nupdates = "none"\n'
    device = scene.device("strict", policy=policy)
    topics, secret = scene.coordinator.topics, b"s" * SECRET_BYTES
    authority = scene.deployment.authority.der
    certificate = ssl.PEM_cert_to_DER_cert((device.state / "identity" / "certificate.pem").read_text())
    granted = seal(JoinGranted(secret, device.name, certificate, authority), secret, FROM_COORDINATOR)
    for payload in (granted, encode_enrolment(Renewed(certificate)), b'[send]\nfeatures = "any"\n'):
        scene.coordinator.transport.publish(topics.certificate_for(device.name), payload)
        scene.coordinator.transport.publish(topics.to_device(device.name), payload)
    for order in (scene.eftvit, scene.fedper):
        answer = scene.coordinator.ask(device, order, run=f"strict-{order.program.method}")
        assert isinstance(answer, Declined)
    assert (device.state / "policy.toml").read_text() == policy
    lines = device.read_ledger()
    assert {line["run"] for line in lines if line["kind"] == "refused"} == {"strict-eftvit", "strict-fedper"}
    assert {line["kind"] for line in lines} == {"hello counts", "refused"}
