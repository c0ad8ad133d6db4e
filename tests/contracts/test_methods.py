"""What every federated method must keep, whoever adds it: the table `METHODS` is walked, nothing is listed here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

import fedvit.methods
from edge_client.vault import Vault
from export.graphs import PREDICT
from export.verify import reference_step
from fedvit.data.digits import read_digits
from fedvit.data.images import draw_kept, normalise, select, unfold
from fedvit.data.samples import Samples
from fedvit.methods import METHODS, make_method
from fedvit.methods.base import Method, trained_names
from fedvit.methods.step import example_inputs, predict
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Program, Role, Train, decode_program
from fedvit.tensors import Tensors, unpack
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import CoordinatorState, Hello, Result, Task, decode
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import decode_chunk
from fleet.partition import write_device_folders
from fleet.simulate import simulate

SHARED_FILES = {"__init__", "base", "optimizers", "step"}
"""Files of fedvit/methods that are no method."""

TINY_MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "mlp_ratio": 4.0}
"""That of tests/conftest.py, so that its graphs serve here."""
STEPS = 20
TEST_IMAGES = 200
DEVICES, ROUNDS, RUN = 3, 2, "run-1"

each_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="session")
def digits() -> Samples:
    return read_digits(32)


# --- the table ----------------------------------------------------------------------------------------


def test_every_file_has_a_line_in_the_table() -> None:
    folder = Path(fedvit.methods.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - SHARED_FILES
    assert {f"fedvit.methods.{stem}" for stem in files} == {method.__module__ for method in METHODS.values()}


@each_method
def test_a_method_says_where_it_comes_from(name: str) -> None:
    assert METHODS[name].source
    assert METHODS[name].__doc__


# --- groups -------------------------------------------------------------------------------------------


def registers() -> PatchViT:
    with torch.device("meta"):
        return build_vit("vit_small_patch14_reg4_dinov2", 5, seed=0, options={"image_size": 56})


@pytest.mark.parametrize("make", [lambda tiny: tiny.vit, lambda tiny: registers()], ids=["tiny", "registers"])
@each_method
def test_groups_partition_the_tensors(name: str, make: Callable[[Any], PatchViT], tiny: Any) -> None:
    vit = make(tiny(name))
    groups = make_method(name).groups(vit)
    members = [tensor for _, names in groups.values() for tensor in names]
    assert sorted(members) == sorted(vit.tensors())
    assert all(isinstance(role, Role) for role, _ in groups.values())


@each_method
def test_phases_move_what_the_roles_allow(name: str, tiny: Any) -> None:
    """Every group that the device trains is moved by some phase, and no other."""
    method, vit = tiny(name).method, tiny(name).vit
    groups = method.groups(vit)
    moved = {group for phase in method.phases(vit) for group in phase.groups}
    assert moved == {group for group, (role, names) in groups.items() if role.trained_on_device and names}


# --- the graphs ---------------------------------------------------------------------------------------


class Session:
    """A graph on onnxruntime, fed with torch tensors."""

    def __init__(self, graph: bytes) -> None:
        self._session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        fed = {name: inputs[name].numpy() for name in self._inputs}
        values = self._session.run(self._outputs, fed)
        return {name: torch.from_numpy(np.asarray(v)) for name, v in zip(self._outputs, values, strict=True)}


def assert_agree(got: Tensor, want: Tensor, start: Tensor | None, key: str) -> None:
    """Within 1e-3 of the tensor's largest change, or of its largest value where it has no start; and, as new values
    are rounded to float32, one last digit."""
    want = want.detach()
    scale = (want if start is None else want - start).abs().max()
    assert scale > 0, f"{key} did not move"
    apart = (got - want).abs()
    if start is not None:
        apart = apart - torch.from_numpy(np.spacing(want.abs().numpy()))
    assert apart.max() <= 1e-3 * scale, key


@pytest.mark.parametrize("real", [8, 5, 1], ids=["full batch", "5 of 8", "1 of 8"])
@each_method
def test_the_graph_trains_what_torch_trains(name: str, real: int, tiny: Any) -> None:
    """Loss, what is collected, and every update, from slots in the middle of a phase. Padding is zeros, as a device
    fills up its last batch."""
    method, vit, batch, graphs = tiny(name)
    for phase in method.phases(vit):
        inputs = example_inputs(method, vit, batch, phase, seed=real)
        inputs["batch/weight"] = (torch.arange(8) < real).float()
        for key in ("batch/patches", "batch/kept", "batch/labels"):
            if key in inputs:
                inputs[key][real:] = 0
        want = reference_step(method, vit, phase)(inputs)
        got = Session(graphs[phase.graph].content)(inputs)
        assert got.keys() == want.keys()
        for key, value in want.items():
            start = inputs[key.removeprefix("new/")] if key.startswith("new/") else None
            assert_agree(got[key], value, start, key)


@each_method
def test_padding_is_as_if_it_were_not_there(name: str, tiny: Any) -> None:
    """Three samples padded to eight give the loss and the updates of the three alone, which eager torch computes
    without padding."""
    method, vit, batch, graphs = tiny(name)
    for phase in method.phases(vit):
        inputs = example_inputs(method, vit, batch, phase, seed=3)
        inputs["batch/weight"] = (torch.arange(8) < 3).float()
        alone = {key: value[:3] if key.startswith("batch/") else value for key, value in inputs.items()}
        want = reference_step(method, vit, phase)(alone)
        got = Session(graphs[phase.graph].content)(inputs)
        assert_agree(got["metric/loss"], want["metric/loss"], None, "metric/loss")
        for moved in trained_names(method, vit, phase):
            key = f"new/tensor/{moved}"
            assert_agree(got[key], want[key], inputs[f"tensor/{moved}"], key)


class Trained(NamedTuple):
    tensors: dict[str, Tensor]
    losses: list[float]


def batches(samples: Samples, method: Method, batch: Batch) -> list[dict[str, Tensor]]:
    """Four passes over the first 40 digits, as a device makes its batches of them: masked anew in every pass."""
    draw, made = np.random.default_rng(0), []
    for number in range(STEPS):
        rows = np.arange(8) + 8 * (number % 5)
        patches = unfold(normalise(samples.images[rows], batch), batch.patch_size)
        feeds = {"batch/labels": samples.labels[rows], "batch/weight": np.ones(8, np.float32)}
        if batch.kept_patches < batch.patches:
            feeds["batch/kept"] = draw_kept(draw, 8, batch.patches, batch.kept_patches)
            patches = select(patches, feeds["batch/kept"])
        made.append({key: torch.from_numpy(value) for key, value in {**feeds, "batch/patches": patches}.items()})
    return made


@pytest.fixture(scope="session")
def half_taught(digits: Samples, tiny: Any) -> dict[str, Tensor]:
    """Values from which 20 steps lead somewhere: plain torch on 1597 digits, stopped early. A new model would take
    hundreds of steps before it gives more than one answer, and two that always say 3 agree on nothing."""
    vit = build_vit(SMALL, 10, seed=0, options=TINY_MODEL).vit
    batch, draw = tiny("fedavg").batch, torch.Generator().manual_seed(0)
    images = torch.from_numpy(normalise(digits.images[np.arange(len(digits))], batch)).permute(0, 3, 1, 2)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=2e-3)
    for _ in range(200):
        rows = torch.randint(TEST_IMAGES, len(digits), (32,), generator=draw)
        loss = torch.nn.functional.cross_entropy(vit(images[rows]), torch.from_numpy(digits.labels)[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in vit.named_parameters()}


def train(
    method: Method,
    vit: PatchViT,
    start: dict[str, Tensor],
    feeds: list[dict[str, Tensor]],
    step_of: Callable[[Train], Any],
) -> Trained:
    """20 steps, shared out among the phases; slots are empty when a phase begins."""
    rate = 1e-3 if method.optimizer == "adamw" else 0.03
    tensors = {name: value.clone() for name, value in start.items()}
    anchors = {f"anchor/{name}": value.clone() for name, value in tensors.items()}
    losses: list[float] = []
    phases = method.phases(vit)
    for number, phase in enumerate(phases):
        step, moved = step_of(phase), trained_names(method, vit, phase)
        state = {f"slot/{slot}/{name}": torch.zeros_like(tensors[name]) for slot in phase.slots for name in moved}
        for count, feed in enumerate(feeds[number :: len(phases)], start=1):
            hyper = {"hyper/lr": torch.tensor(rate), "hyper/step": torch.tensor(float(count))}
            fed = {f"tensor/{name}": value for name, value in tensors.items()}
            outputs = step({**anchors, **fed, **state, **feed, **hyper})
            losses.append(float(outputs["metric/loss"]))
            tensors |= {name: outputs[f"new/tensor/{name}"].detach() for name in moved}
            state = {key: outputs[f"new/{key}"].detach() for key in state}
    return Trained(tensors, losses)


@each_method
def test_twenty_steps_on_digits_end_where_torchs_end(
    name: str, tiny: Any, digits: Samples, half_taught: dict[str, Tensor]
) -> None:
    """The same batches, once on onnxruntime and once with backward() and torch.optim: losses close in every step, and
    equally many answers right on 200 images, 40 of which were trained on. The last pass has a lower loss than the
    first, and twice as many answers are right as a guess would get."""
    method, vit, batch, graphs = tiny(name)
    feeds = batches(digits, method, batch)
    ours = train(method, vit, half_taught, feeds, lambda phase: Session(graphs[phase.graph].content))
    torchs = train(method, vit, half_taught, feeds, lambda phase: reference_step(method, vit, phase))
    np.testing.assert_allclose(ours.losses, torchs.losses, rtol=1e-3)
    assert np.mean(ours.losses[-5:]) < np.mean(ours.losses[:5]) - 0.1
    answer, right = Session(graphs[PREDICT].content), {"onnxruntime": 0, "torch": 0}
    for first in range(0, TEST_IMAGES, 8):
        rows = np.arange(first, first + 8)
        patches = torch.from_numpy(unfold(normalise(digits.images[rows], batch), batch.patch_size))
        for which, trained in (("onnxruntime", ours), ("torch", torchs)):
            inputs = {f"tensor/{key}": value for key, value in trained.tensors.items()} | {"batch/patches": patches}
            with torch.no_grad():
                logits = (answer if which == "onnxruntime" else predict(method, vit))(inputs)["logits"]
            right[which] += int((logits.argmax(dim=1).numpy() == digits.labels[rows]).sum())
    assert right["onnxruntime"] == right["torch"]
    assert right["torch"] >= TEST_IMAGES // 5


# --- whole rounds -------------------------------------------------------------------------------------


class Recorder(MemoryTransport):
    """Hears every message of a federation, and looks into a device's vault whenever it tells a result."""

    def __init__(self, broker: MemoryBroker, state: Path) -> None:
        super().__init__(SimpleQueue(), broker, "recorder")
        self.heard: list[tuple[str, bytes]] = []
        self.local: dict[tuple[str, int], Tensors] = {}  # (device, round) -> what stays there
        self._state = state
        self._topics = Topics("home")

    def deliver(self, topic: str, payload: bytes) -> None:
        super().deliver(topic, payload)
        self.heard.append((topic, payload))
        if topic.endswith("/up/ctl") and isinstance(result := decode(payload), Result) and result.kind == "train":
            device = self._topics.device_of(topic)
            local = Vault(self._state / device / "vault").local(RUN)
            assert local is not None
            self.local[device, result.round] = local


@dataclass
class Recorded:
    """One run: what was said, what was moved, and what is left."""

    model: bytes
    local: dict[tuple[str, int], Tensors]
    vaults: dict[str, Tensors]  # at the end
    payloads: list[bytes]
    up: dict[str, bytes] = field(default_factory=dict)  # digest -> blob that a device sent
    down: dict[str, bytes] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    results: dict[tuple[str, int, str], Result] = field(default_factory=dict)  # by device, round and kind

    @property
    def program(self) -> Program:
        return decode_program(self.down[self.tasks[0].program])


def whole_blobs(chunks: list[bytes]) -> dict[str, bytes]:
    parts: dict[str, dict[int, bytes]] = {}
    for raw in chunks:
        chunk = decode_chunk(raw)
        parts.setdefault(chunk.digest, {})[chunk.index] = chunk.payload
    return {digest: b"".join(pieces[index] for index in sorted(pieces)) for digest, pieces in parts.items()}


def record(name: str, seed: int, folders: list[Path], out: Path, cache: Path) -> Recorded:
    """Two rounds on three devices over the memory transport, with one more client that listens to everything."""
    broker = MemoryBroker()
    state = out / RUN / "state"
    recorder = Recorder(broker, state)
    recorder.subscribe("#", 1)
    recorder.open()
    values = {
        "method": name,
        "options": {"batch_size": 8, "epochs": 2, "lr": 0.003},
        "model": SMALL,
        "model_options": TINY_MODEL,
        "rounds": ROUNDS,
        "seed": seed,
        "accelerator": "cpu",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleet.simulate.MemoryBroker", lambda: broker)
        simulate(folders, values, out=out, run=RUN, graph_cache=cache)
    heard = recorder.heard
    run = Recorded(
        model=(out / RUN / "model.safetensors").read_bytes(),
        local=recorder.local,
        vaults={folder.name: Vault(state / folder.name / "vault").local(RUN) or {} for folder in folders},
        payloads=[payload for _, payload in heard],
        up=whole_blobs([payload for topic, payload in heard if "/up/b/" in topic]),
        down=whole_blobs([payload for topic, payload in heard if "/all/b/" in topic]),
    )
    for topic, payload in heard:
        if "/b/" in topic:
            continue
        match decode(payload):
            case Task() as task:
                run.tasks.append(task)
            case Result() as result:
                run.results[topic.split("/")[3], result.round, result.kind] = result
            case Hello() | CoordinatorState():
                pass
    return run


@pytest.fixture(scope="session")
def device_folders(digits: Samples, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """90 digits on three devices of different size: 20, 30 and 40 images, a fifth of them for tests."""
    out = tmp_path_factory.mktemp("parts") / "devices"
    parts = np.split(np.random.default_rng(0).permutation(90), [20, 50])
    write_device_folders(digits, parts, out, test_share=0.2, seed=0)
    return [out / f"device-{number}" for number in range(DEVICES)]


Record = Callable[[str, str], Recorded]


@pytest.fixture(scope="session")
def recorded(
    device_folders: list[Path], graph_cache: Path, tmp_path_factory: pytest.TempPathFactory, tiny: Any
) -> Record:
    """A method's recorded run: 'first', 'again' with the same seed, 'other' with another."""
    seeds = {"first": 0, "again": 0, "other": 1}
    done: dict[tuple[str, str], Recorded] = {}

    def run(name: str, which: str) -> Recorded:
        if (name, which) not in done:
            tiny(name)  # the graphs are those of the tiny model
            out = tmp_path_factory.mktemp("runs")
            done[name, which] = record(name, seeds[which], device_folders, out, graph_cache)
        return done[name, which]

    return run


def names_with(name: str, tiny: Any, *roles: Role) -> set[str]:
    """Tensors of the groups that have one of the roles, as the method's own table says."""
    groups = make_method(name).groups(tiny(name).vit)
    return {tensor for role, names in groups.values() if role in roles for tensor in names}


@each_method
def test_a_run_asks_everybody_and_hears_everybody(name: str, recorded: Record) -> None:
    """Two rounds, three devices, training and evaluation: twelve tasks and twelve results."""
    run = recorded(name, "first")
    assert len(run.tasks) == len(run.results) == ROUNDS * DEVICES * 2
    assert {(task.round, task.kind) for task in run.tasks} == {
        (number, kind) for number in (1, 2) for kind in ("train", "evaluate")
    }


@each_method
def test_what_is_sent_up_is_what_the_roles_say(name: str, recorded: Record, tiny: Any) -> None:
    """In every round: deltas of the shared and the generated tensors, what a phase collects, and nothing else. The
    names are read from the header of what was really sent."""
    run = recorded(name, "first")
    expected = names_with(name, tiny, Role.SHARED, Role.GENERATED)
    collected = {phase.collect.output for phase in tiny(name).method.phases(tiny(name).vit) if phase.collect}
    expected |= collected | ({"labels"} if collected else set())
    sent = set()
    for (_, _, kind), result in run.results.items():
        if kind == "evaluate":
            assert result.upload is None
        elif expected:
            assert result.upload is not None
            assert set(unpack(run.up[result.upload.digest])) == expected
            sent.add(result.upload.digest)
    assert set(run.up) == sent, "something else was sent up"
    assert len(sent) == (ROUNDS * DEVICES if expected else 0)


@each_method
def test_what_is_sent_down_is_what_the_roles_say(name: str, recorded: Record, tiny: Any) -> None:
    """In every round the values of global, seeded, shared and generated tensors; of frozen and local ones only the
    first value, once, by the digest that the Program names."""
    run = recorded(name, "first")
    each_round = names_with(name, tiny, Role.GLOBAL, Role.SEEDED, Role.SHARED, Role.GENERATED)
    digests = {(task.round, task.kind): set(task.groups.values()) for task in run.tasks}
    for task in run.tasks:
        sent = [set(unpack(run.down[digest])) for digest in task.groups.values()]
        assert set().union(*sent) == each_round
        assert sum(map(len, sent)) == len(each_round)
        assert digests[task.round, task.kind] == set(task.groups.values())  # the same for all
    assert digests[1, "train"].isdisjoint(digests[1, "evaluate"]), "the first round moved nothing"
    assert digests[1, "evaluate"] == digests[2, "train"]
    once = {group.initial: group.role for group in run.program.groups.values() if group.initial}
    assert set(once.values()) <= {Role.FROZEN, Role.LOCAL}
    first = [set(unpack(run.down[digest])) for digest in once]
    assert set().union(*first) == names_with(name, tiny, Role.FROZEN, Role.LOCAL)
    graphs = {graph.digest for graph in run.program.graphs.values()}
    assert set(run.down) == {run.tasks[0].program} | graphs | set(once) | set().union(*digests.values())


@each_method
def test_what_is_local_stays(name: str, recorded: Record, tiny: Any) -> None:
    """The raw numbers of no local tensor, as any round left it on any device, are in anything that was said: not in a
    message, not in a chunk, not in a blob that chunks made. Nor are there names of local tensors in what devices
    sent. The same search does find what the server sent."""
    run = recorded(name, "first")
    everything = b"\0".join([*run.payloads, *run.up.values(), *run.down.values()])
    from_server = unpack(run.down[next(iter(run.tasks[0].groups.values()))])
    assert all(value.tobytes() in everything for value in from_server.values())
    local = names_with(name, tiny, Role.LOCAL)
    initial = {
        tensor: value
        for group in run.program.groups.values()
        if group.role is Role.LOCAL and group.initial
        for tensor, value in unpack(run.down[group.initial]).items()
    }
    assert len(run.local) == ROUNDS * DEVICES
    for (device, number), tensors in run.local.items():
        assert set(tensors) == local
        for tensor, value in tensors.items():
            assert value.tobytes() != initial[tensor].tobytes(), f"{tensor} was not trained on {device}"
            assert value.tobytes() not in everything, f"{tensor} of {device} left it in round {number}"
    for device, tensors in run.vaults.items():
        assert bits(tensors) == bits(run.local[device, ROUNDS])
    sent = b"\0".join(run.up.values())
    assert not [tensor for tensor in local if f'"{tensor}"'.encode() in sent]


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


@each_method
def test_the_same_seed_gives_the_same_bits(name: str, recorded: Record) -> None:
    """The model, every device's own tensors after every round, every upload, and all metrics: whoever was faster."""
    first, again = recorded(name, "first"), recorded(name, "again")
    assert again.model == first.model
    assert {key: bits(value) for key, value in again.local.items()} == {k: bits(v) for k, v in first.local.items()}
    assert {key: bits(value) for key, value in again.vaults.items()} == {k: bits(v) for k, v in first.vaults.items()}
    assert set(again.up) == set(first.up)
    assert set(again.down) == set(first.down)
    assert {key: result.metrics for key, result in again.results.items()} == {
        key: result.metrics for key, result in first.results.items()
    }


@each_method
def test_another_seed_gives_another_model(name: str, recorded: Record, tiny: Any) -> None:
    first, other = recorded(name, "first"), recorded(name, "other")
    assert unpack(other.model).keys() == unpack(first.model).keys()
    assert bits(unpack(other.model)) != bits(unpack(first.model))
    for device, tensors in first.vaults.items():
        for tensor, value in bits(tensors).items():
            assert value != bits(other.vaults[device])[tensor], f"{tensor} of {device} does not depend on the seed"


@each_method
def test_the_model_that_is_kept_is_the_servers_part(name: str, recorded: Record, tiny: Any) -> None:
    run = recorded(name, "first")
    model = unpack(run.model)
    assert set(model) == names_with(name, tiny, Role.GLOBAL, Role.SEEDED, Role.SHARED, Role.GENERATED)
    last = next(task for task in run.tasks if (task.round, task.kind) == (ROUNDS, "evaluate"))
    sent = {key: value for digest in last.groups.values() for key, value in unpack(run.down[digest]).items()}
    assert bits(model) == bits(sent)
