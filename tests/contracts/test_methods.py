"""The contract of every federated method: of fedvit and of installed packages, with the options below that change
what is computed or what travels. One method alone: `make test-method METHOD=NAME`."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

import fedvit.methods
from coordinator.compute.checkpoint import load_state
from coordinator.compute.engine import Engine
from coordinator.compute.planning.catalogue import catalogue
from coordinator.compute.planning.eager_flops import count_flops
from coordinator.config import make_config
from coordinator.record.record import open_record
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.display import Display
from coordinator.rounds.parts import RunSetup
from coordinator.run_view import RunView, read_run
from coordinator.security.broker import start_broker
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore, digest_of
from fedvit.methods import METHODS, build_model, make_method, method_names
from fedvit.methods.analytic import Analytic
from fedvit.methods.base import PREDICT, Method, list_trained
from fedvit.methods.calculus import TorchCalculus
from fedvit.methods.optimizers import AdamW
from fedvit.methods.step import example_inputs, steps_of, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.onnx_cut import cut_model
from fedvit.onnx_model import read_model, write_model
from fedvit.policy import find_needs
from fedvit.program import Program, Role, Train, decode_program
from fedvit.tensors import Tensors, check_tensors, unpack
from fedvit.transport.address import Address
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import CoordinatorState, Hello, Result, Task, decode
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import decode_chunk
from fleet.contracts.methods import name_its_source
from fleet.contracts.training import measure_distance
from fleet.datasets.digits import read_digits
from fleet.datasets.samples import Samples
from fleet.partition import write_device_folders
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.cost import graph_cost
from profiles.program_cost import PricedProgram
from tests.support.steps import Run, Session, assert_names_of_the_contract, in_parts, whole
from tests.support.tiny import TINY_MODEL, Tiny, make_tiny

SHARED_FILES = {
    "__init__",
    "aggregators",
    "base",
    "calculus",
    "class_sums",
    "failures",
    "hyperparameters",
    "linear_term",
    "losses",
    "novel",
    "one_of_k",
    "sketch",
    "optimizers",
    "packed",
    "parts",
    "private_mean",
    "products",
    "server_optimizers",
    "step",
    "twins",
}
"""Files of fedvit/methods that are no method."""

DEPTH = 2
MODEL = {**TINY_MODEL, "depth": DEPTH}
OPTIONS = {"batch_size": 8, "micro_batch": 3, "epochs": 2, "lr": 0.003}
"""A batch is worked off in parts of 3, 3 and 2 samples, where a method's step is one gradient."""
DEVICES, ROUNDS = 3, 2

CUT = {"analytic", "caff", "fed_head", "fedala", "fedpac", "fedproto", "fedra", "fedrep", "ifca", "personal_analytic"}
"""Methods with a phase whose graph a device can cut."""

SMALLEST: dict[str, dict[str, Any]] = {
    "caff": {"layers": 1},
    "eftvit": {"local_blocks": 1},
    "fedbfpt": {"local_blocks": 2},
    "feddf": {"server_steps": 4},
}
"""Options that suit a model of two blocks, and runs of seconds."""

MORE: dict[str, list[dict[str, Any]]] = {
    "apfl": [{"form": "code"}],
    "fedperfix": [{"mode": "concat"}],
    "flexlora": [{"own_rank": 2}],
    "fedtp": [{"parts": "encoder"}, {"head": "rod", "knn_weight": 0.6, "capacity": 20}],
    "per_fedavg": [{"order": "hessian_free"}],
    "eftvit": [{"local_blocks": 1, "sampler": "balanced"}],
    "pfedhn": [{"personal_head": True}],
    "pfedpg": [{"evaluate_with": "base"}],
}
"""Options beside the defaults that give a method graphs, roles or a server step of another kind."""
ON_SERVER_IMAGES = {"feddf"}
"""Methods whose server has images: here those of a device."""
ALIKE_AT_FIRST = {"fedala", "fedas", "fedcp", "feddyn", "fedpac", "moon", "scaffold"}
"""Methods whose server makes tensors of single devices from their updates, so that all get the same at first."""


class Case(NamedTuple):
    """A method with some options; the name of a run, too."""

    id: str
    name: str
    options: dict[str, Any]
    updates: dict[str, Any] | None = None  # how tensors are coded on their way

    def method(self) -> Method:
        return make_method(self.name, {**OPTIONS, **self.options})

    def __repr__(self) -> str:
        return self.id


def _cases() -> list[Case]:
    cases = [Case(name, name, SMALLEST.get(name, {})) for name in method_names()]
    for name, more in MORE.items():
        for options in more:
            label = "-".join(f"{key}={value}" for key, value in options.items())
            cases.append(
                Case(f"{name}-{label}".replace("_", "-").replace("=", "-").replace(".", "").lower(), name, options)
            )
    return cases


CASES = _cases()
NOVEL = [
    Case("apfl-novel", "apfl", {"novel": "own"}),
    Case("apfl-code-novel", "apfl", {"form": "code", "novel": "own"}),
    Case("eftvit-novel", "eftvit", {"local_blocks": 1, "novel": "own"}),
    Case("pfedme-novel", "pfedme", {"novel": "own"}),
]
"""On novel devices, whose shared tensors stand still: methods of which a step or a phase is another then."""
DROPPING = [
    Case("fedtp-dropout", "fedtp", {"dropout": 0.3}),
    Case("fedavg-dropout-recompute", "fedavg", {"dropout": 0.3, "mask": 0.5, "recompute": True}),
    Case("per-fedavg-dropout", "per_fedavg", {"dropout": 0.3}),
]
"""Steps that draw masks from a number for each sample."""
each_method = pytest.mark.parametrize("name", method_names())
each_case = pytest.mark.parametrize("case", CASES, ids=repr)


@pytest.fixture(scope="session")
def tiny(graph_cache: Path) -> Callable[[Case], Tiny]:
    """A case on the tiny model; its graphs are exported when first asked for."""
    made: dict[str, Tiny] = {}

    def make(case: Case) -> Tiny:
        if case.id not in made:
            made[case.id] = make_tiny(case.method(), graph_cache, depth=DEPTH)
        return made[case.id]

    return make


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
    name_its_source(name)


# --- phases -------------------------------------------------------------------------------------------


OWN_PHASES = [case for case in CASES if type(case.method()).phases is not Method.phases]
"""Of the others `Method.phases` makes one phase of all that the device trains."""


@pytest.mark.parametrize("case", OWN_PHASES, ids=repr)
def test_phases_move_what_the_device_trains(case: Case) -> None:
    """Every group that the device trains is moved by some phase, and no other."""
    with torch.device("meta"):
        method = case.method()
        vit = build_model(method, SMALL, 5, seed=0, options=MODEL)
        groups = method.groups(vit)
        updated = {group for phase in method.phases(vit) for group in phase.groups}
    assert updated == {group for group, (role, names) in groups.items() if role.is_trained_on_device and names}


# --- the graphs ---------------------------------------------------------------------------------------


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


open_graph = functools.lru_cache(maxsize=8)(Session)
"""Open a graph of the case that is tested now."""


def training(method: Method, vit: PatchViT) -> list[Train]:
    """The phases that have graphs of their own, those of evaluations included."""
    return [phase for phase in steps_of(method, vit).values() if isinstance(phase, Train)]


def step_of(made: Tiny, phase: Train) -> Run:
    """A whole optimizer step by a phase's graphs, in parts where it has gradients that are added up."""
    graph = open_graph(made.graphs[phase.graph].content)
    if not phase.update:
        return graph
    update, names = open_graph(made.graphs[phase.update].content), list_trained(made.method, made.vit, phase)
    return in_parts(phase, names, graph, update, made.batch.run_size)


def reference(made: Tiny, phase: Train) -> Run:
    """The step on the whole batch with backward() and torch.optim."""
    return whole_step(made.method, made.vit, phase, TorchCalculus)


@each_case
def test_graphs_have_the_names_of_the_contract(case: Case, tiny: Any) -> None:
    """Of every graph that the method's phases and its evaluation name, and there is no other."""
    method, vit, _, graphs = tiny(case)
    evaluate, serves = method.evaluate(vit), steps_of(method, vit)
    phases = (*method.phases(vit), *evaluate.adapt)
    named = {phase.graph for phase in phases} | {phase.update for phase in phases if phase.update} | {evaluate.graph}
    named |= {evaluate.gather.graph} if evaluate.gather else set()
    assert set(graphs) == set(serves) == named
    for name, exported in graphs.items():
        graph = onnx.load_from_string(exported.content).graph
        inputs, outputs = ({value.name for value in values} for values in (graph.input, graph.output))
        assert_names_of_the_contract(method, vit, serves[name], inputs, outputs)


@each_case
def test_a_graph_that_a_device_cuts_computes_what_the_whole_one_does(case: Case, tiny: Any) -> None:
    """The phases whose features a device keeps, in front of what they train."""
    made, cuts = tiny(case), {}
    for phase in training(made.method, made.vit):
        content = made.graphs[phase.graph].content
        model, trained = read_model(content), list_trained(made.method, made.vit, phase)
        fixed = [name for name in model.inputs if name.startswith("tensor/") and name[7:] not in trained]
        if not (cut := cut_model(model, "batch/patches", fixed, "batch/feature")):
            continue
        cuts[phase.graph] = list(cut.inputs.values())
        inputs = example_inputs(made.method, made.vit, made.batch, phase)
        features = Session(b"".join(map(bytes, write_model(cut.features, {}, {}))))(inputs)
        given = {name: features[value] for name, value in cut.inputs.items()}
        got = Session(b"".join(map(bytes, write_model(cut.rest, {}, {}))))({**inputs, **given})
        for key, want in open_graph(content)(inputs).items():
            torch.testing.assert_close(got[key], want, rtol=1e-4, atol=1e-6)
    assert bool(cuts) == (case.name in CUT), cuts


@each_case
def test_a_batch_is_worked_off_in_parts_where_a_step_is_one_gradient(case: Case, tiny: Any) -> None:
    """Gradients for 3 samples at a time; whole steps for all of them; answers for 3 images at a time in any case."""
    method, vit, batch, graphs = tiny(case)
    size = {phase.graph: 3 if method.one_gradient else batch.batch_size for phase in training(method, vit)}
    for name in (*size, PREDICT):
        graph = onnx.load_from_string(graphs[name].content).graph
        [rows] = {v.type.tensor_type.shape.dim[0].dim_value for v in graph.input if v.name.startswith("batch/p")}
        assert rows == size.get(name, 3), name


@pytest.mark.parametrize("real", ["full batch", "1 of 8"])
@pytest.mark.parametrize("case", [*CASES, *NOVEL, *DROPPING], ids=repr)
def test_the_graph_trains_what_torch_trains(case: Case, real: str, tiny: Any) -> None:
    """Loss, what is collected, and every update, from slots in the middle of a phase: gradients added up over the
    batch's parts and then one update are the step on the whole batch. Padding is zeros, as a device fills up its last
    batch."""
    made = tiny(case)
    method, vit, batch, _ = made
    rows = batch.batch_size if real == "full batch" else 1
    for phase in training(method, vit):
        inputs = example_inputs(method, vit, batch, whole(phase), seed=rows)
        inputs["batch/weight"] = (torch.arange(batch.batch_size) < rows).float()
        for key in ("batch/patches", "batch/kept", "batch/labels"):
            if key in inputs:
                inputs[key][rows:] = 0
        want = reference(made, phase)(inputs)
        got = step_of(made, phase)(inputs)
        assert got.keys() == want.keys()
        for key, value in want.items():
            if key.startswith("collect/"):  # of samples; padding is not recorded
                assert_agree(got[key][:rows], value[:rows], None, key)
                continue
            start = inputs[key.removeprefix("new/")] if key.startswith("new/") else None
            if start is not None and torch.equal(value, start):  # nothing but padding in a half that decides
                assert torch.equal(got[key], start), key
            else:
                assert_agree(got[key], value, start, key)


@pytest.mark.parametrize("case", [*CASES, *DROPPING], ids=repr)
def test_padding_is_as_if_it_were_not_there(case: Case, tiny: Any) -> None:
    """Six samples, and behind them zeros for the rest of the batch, give the loss and the updates of the six alone,
    which eager torch computes without padding."""
    made = tiny(case)
    method, vit, batch, _ = made
    real = torch.arange(batch.batch_size) < 6
    for phase in training(method, vit):
        inputs = example_inputs(method, vit, batch, whole(phase), seed=3)
        inputs["batch/weight"] = real.float()
        alone = {key: value[real] if key.startswith("batch/") else value for key, value in inputs.items()}
        want = reference(made, phase)(alone)
        got = step_of(made, phase)(inputs)
        assert_agree(got["metric/loss"], want["metric/loss"], None, "metric/loss")
        copies = method.names_with(vit, Role.SEEDED)
        for updated in list_trained(method, vit, phase):
            key, start = f"new/tensor/{updated}", inputs[f"tensor/{updated}"]
            if updated in copies and torch.equal(want[key], start):  # FedRA: of a block that was not drawn
                assert torch.equal(got[key], start), key
            else:
                assert_agree(got[key], want[key], start, key)


@pytest.mark.parametrize("case", [*CASES, *DROPPING], ids=repr)
def test_flops_are_those_that_torch_counts(case: Case, tiny: Any) -> None:
    """Each graph's function is run eagerly, with gradients by backward(): nothing was lost or added on the way to the
    graph that ships and is priced."""
    method, vit, batch, graphs = tiny(case)
    assert count_flops(method, vit, batch) == {name: graph_cost(made.content).flops for name, made in graphs.items()}


# --- whole rounds -------------------------------------------------------------------------------------


class Recorder(MemoryTransport):
    """Hears every message of a federation, and looks into a device's vault whenever it tells a result."""

    def __init__(self, broker: MemoryBroker, state: Path, run: str) -> None:
        super().__init__(SimpleQueue(), broker, "recorder")
        self.heard: list[tuple[str, bytes]] = []
        self.vaults: dict[tuple[str, int], Tensors] = {}  # (device, round) -> what stays there
        self._state = state
        self._run = run
        self._topics = Topics("home")

    def deliver(self, topic: str, payload: bytes) -> None:
        super().deliver(topic, payload)
        self.heard.append((topic, payload))
        if topic.endswith("/up/ctl") and isinstance(result := decode(payload), Result) and result.kind == "train":
            device = self._topics.device_of(topic)
            kept = Vault(self._state / device / "vault").local(self._run)
            assert kept is not None
            self.vaults[device, result.round] = kept


@dataclass
class Recorded:
    """One run: what was said, what was moved, and what is left."""

    summary: RunView
    folder: Path
    model: bytes
    vaults: dict[tuple[str, int], Tensors]
    payloads: list[bytes]
    up: dict[str, bytes] = field(default_factory=dict)  # digest -> blob that a device sent, in chunks or in its result
    down: dict[str, bytes] = field(default_factory=dict)  # likewise, in chunks or in tasks
    tasks: list[tuple[str, Task]] = field(default_factory=list)  # with the device
    results: dict[tuple[str, int, str], Result] = field(default_factory=dict)  # by device, round and kind

    def program(self, task: Task) -> Program:
        return decode_program(self.down[task.program])


def settings(case: Case, seed: int, folders: list[Path]) -> dict[str, Any]:
    server_data = {"server_data": str(folders[0])} if case.name in ON_SERVER_IMAGES else {}
    return {
        "method": case.name,
        "options": {**OPTIONS, **case.options},
        "model": SMALL,
        "model_options": MODEL,
        "rounds": ROUNDS,
        "seed": seed,
        "accelerator": "cpu",
        "updates": case.updates or {},
        **server_data,
    }


def whole_blobs(chunks: list[bytes]) -> dict[str, bytes]:
    parts: dict[str, dict[int, bytes]] = {}
    for raw in chunks:
        chunk = decode_chunk(raw)
        parts.setdefault(chunk.digest, {})[chunk.index] = chunk.payload
    return {digest: b"".join(pieces[index] for index in sorted(pieces)) for digest, pieces in parts.items()}


def record(case: Case, seed: int, folders: list[Path], out: Path, cache: Path) -> Recorded:
    """Some rounds on three devices over the memory transport, with one more client that listens to everything."""
    broker = MemoryBroker()
    recorder = Recorder(broker, out / case.id / "state", case.id)
    recorder.subscribe("#", 1)
    recorder.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleet.simulate.MemoryBroker", lambda: broker)
        outcome = simulate(RunRequest(folders, settings(case, seed, folders), out=out, run=case.id, graph_cache=cache))
    heard = recorder.heard
    run = Recorded(
        summary=outcome.summary,
        folder=outcome.folder,
        model=(outcome.folder / "model.safetensors").read_bytes(),
        vaults=recorder.vaults,
        payloads=[payload for _, payload in heard],
        up=whole_blobs([payload for topic, payload in heard if "/up/b/" in topic]),
        down=whole_blobs([payload for topic, payload in heard if "/all/b/" in topic]),
    )
    for topic, payload in heard:
        if "/b/" in topic:
            continue
        match decode(payload):
            case Task() as task:
                run.tasks.append((topic.split("/")[3], task))
                run.down |= {digest_of(content): content for content in task.inline}
            case Result() as result:
                run.results[topic.split("/")[3], result.round, result.kind] = result
                run.up |= {digest_of(result.inline): result.inline} if result.inline else {}
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


Record = Callable[..., Recorded]


@pytest.fixture(scope="session")
def recorded(device_folders: list[Path], graph_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A case's recorded run, with seed 0 or another."""
    done: dict[tuple[str, int], Recorded] = {}

    def run(case: Case, seed: int = 0) -> Recorded:
        if (case.id, seed) not in done:
            done[case.id, seed] = record(case, seed, device_folders, tmp_path_factory.mktemp("runs"), graph_cache)
        return done[case.id, seed]

    return run


def with_roles(case: Case, number: int, *roles: Role) -> set[str]:
    """Tensors of the groups that have one of the roles in a round, as the method's own table says."""
    method = case.method().in_round(number, ROUNDS)
    vit = build_model(method, SMALL, 10, seed=0, options=MODEL)
    return set(method.names_with(vit, *roles))


@each_case
def test_a_run_asks_everybody_and_hears_everybody(case: Case, recorded: Record) -> None:
    """In each round every device has a training and an evaluation, brings a result of both, and none is refused."""
    run = recorded(case)
    assert len(run.tasks) == len(run.results) == ROUNDS * DEVICES * 2
    assert {(task.round, task.kind) for _, task in run.tasks} == {
        (number, kind) for number in range(1, ROUNDS + 1) for kind in ("train", "evaluate")
    }
    assert not run.summary.refusals
    assert run.summary.protocol


@each_case
def test_counts_by_class_leave_a_device_where_the_program_asks_for_them(case: Case, recorded: Record) -> None:
    run = recorded(case)
    for (device, number, kind), result in run.results.items():
        if kind == "evaluate":
            [task] = [one for name, one in run.tasks if (name, one.round, one.kind) == (device, number, kind)]
            asked = run.program(task).evaluate.counts_classes
            assert asked == (case.name != "eftvit")
            assert bool(result.by_class) == asked


@each_case
def test_needs_of_the_catalogue_are_those_of_the_programs(case: Case, recorded: Record) -> None:
    run = recorded(case)
    [entry] = catalogue([case.name], SMALL, 10, options={}, model_options={})
    found = [find_needs(run.program(task)) for _, task in run.tasks if task.kind == "train"]
    assert {(needs.updates, needs.features) for needs in found} == {(entry.needs.updates, entry.needs.features)}


@pytest.mark.parametrize("case", [*CASES, *DROPPING[:2]], ids=repr)
def test_torch_engine_makes_the_same_run(
    case: Case, recorded: Record, device_folders: list[Path], graph_cache: Path, tmp_path: Path
) -> None:
    """All devices side by side on torch, with the numbers of onnxruntime on each device alone: what the server has,
    what devices keep, losses, FLOPs, and the answers to test images, of which one between two equal logits may differ.
    """
    ours, slack = recorded(case), 1e-3
    if case.updates:
        slack = 0.05  # a code's rounding may go the other way
    elif isinstance(case.method().optimizer_rule(), AdamW) or case.name in ON_SERVER_IMAGES:
        slack = 1e-2  # gradients that are zero but for rounding become whole steps
    elif isinstance(case.method(), Analytic):
        slack = 1e-2  # a regression over few images amplifies what features differ by
    elif case.name == "flexlora":
        slack = 1e-2  # rounding decides the directions of the smallest singular values
    theirs = simulate(
        RunRequest(
            device_folders,
            settings(case, 0, device_folders),
            out=tmp_path,
            run=case.id,
            engine="torch",
            at_once=1,
            graph_cache=graph_cache,
        )
    )
    assert measure_distance(unpack(ours.model), load_file(theirs.folder / "model.safetensors")) <= slack
    kept = load_file(theirs.folder / "state" / f"devices-{ROUNDS}.safetensors")
    for folder in device_folders:
        mine = {name.split("/", 2)[2]: value for name, value in kept.items() if name.startswith(f"kept/{folder.name}/")}
        assert measure_distance(ours.vaults[folder.name, ROUNDS], mine) <= slack
    for one, other in zip(ours.summary.rounds, theirs.summary.rounds, strict=True):
        assert (one.cohort, one.accepted, one.flops) == (other.cohort, other.accepted, other.flops)
        assert one.train_loss == pytest.approx(other.train_loss, rel=slack)
        assert one.accuracy.keys() == other.accuracy.keys()
        assert all(abs(one.accuracy[name] - other.accuracy[name]) <= 0.25 for name in one.accuracy)
    assert [device.train_samples for device in ours.summary.devices] == [
        device.train_samples for device in theirs.summary.devices
    ]


@each_case
def test_bytes_and_flops_of_a_round_are_known_beforehand(case: Case, recorded: Record) -> None:
    """From the Program alone: what a device with nothing at all fetches for its first round, what it sends back, and
    the FLOPs that it reports."""
    run = recorded(case)
    for device, task in run.tasks:
        if (task.round, task.kind) != (1, "train"):
            continue
        program, result = run.program(task), run.results[device, 1, "train"]
        use = result.use
        graphs = {name: graph_cost(run.down[spec.digest]) for name, spec in program.graphs.items()}
        cost = PricedProgram(program, {}, graphs).cost(images=result.samples, test_images=0)
        assert cost.bytes_once + cost.bytes_down == use.fetched_bytes
        assert cost.flops_round == use.flops
        assert cost.steps == use.steps
        if not any(phase.collect for phase in program.train):  # of that more or less is sent with the classes' sizes
            assert cost.bytes_up == use.upload_bytes


@each_case
def test_what_is_sent_down_is_what_the_roles_say(case: Case, recorded: Record) -> None:
    """In every round the values of global, seeded and shared tensors, the same for all, and of generated and assigned
    ones, made for each device; of frozen and local ones only the first value, once, by the Program's digest."""
    run, asked, once = recorded(case), set(), set()
    common: dict[tuple[int, str], dict[str, str]] = {}
    for device, task in run.tasks:
        program = run.program(task)
        own = program.own_groups()
        for group, digest in task.groups.items():
            assert set(unpack(run.down[digest])) == set(program.names(group))
            if group not in own:
                assert common.setdefault((task.round, task.kind), {}).setdefault(group, digest) == digest
        assert {name for group in task.groups for name in program.names(group)} == with_roles(
            case, task.round, *(role for role in Role if role.from_server_each_round)
        )
        for group in own:
            if case.name in ALIKE_AT_FIRST and (task.round, task.kind) == (1, "train"):
                continue
            if group == "share" and (task.round, task.kind) != (ROUNDS, "evaluate"):
                continue  # FedALA's shares move when a device's last head is another than the shared one
            same = [
                other for d, other in run.tasks if d != device and (other.round, other.kind) == (task.round, task.kind)
            ]
            assert task.groups[group] not in [other.groups[group] for other in same]
        initial = [group for group in program.groups if program.groups[group].initial]
        assert {name for group in initial for name in program.names(group)} == with_roles(
            case, task.round, Role.FROZEN, Role.LOCAL
        )
        once |= {program.groups[group].initial for group in initial}
        asked |= {task.program, *task.groups.values(), *(graph.digest for graph in program.graphs.values())}
    assert common.get((1, "evaluate")) == common.get((2, "train"))
    if common:
        assert common[1, "train"] != common[1, "evaluate"], "the first round moved nothing"
    assert set(run.down) == asked | once


@each_case
def test_what_is_local_stays(case: Case, recorded: Record) -> None:
    """The raw numbers of no local tensor, as any round left it on any device, are in anything that was said: not in a
    message, not in a chunk, not in a blob that chunks made. Nor are there names of local tensors in what devices
    sent. The same search does find what the server sent."""
    run = recorded(case)
    everything = b"\0".join([*run.payloads, *run.up.values(), *run.down.values()])
    _, task = run.tasks[0]
    for digest in task.groups.values():
        assert all(value.tobytes() in everything for value in unpack(run.down[digest]).values())
    program = run.program(task)
    initial = {
        tensor: value
        for group in program.groups.values()
        if group.role is Role.LOCAL and group.initial
        for tensor, value in unpack(run.down[group.initial]).items()
    }
    kept = {name for group in program.evaluate.kept for name in program.names(group)}
    assert len(run.vaults) == ROUNDS * DEVICES
    for (device, number), tensors in run.vaults.items():
        assert set(tensors) == set(initial) | kept
        for name in initial:
            value = tensors[name]
            assert value.tobytes() != initial[name].tobytes(), f"{name} was not trained on {device}"
            # a shorter pattern could occur by chance; a twin of the shared model moves as it does in the first round,
            # and a bias of features as the last norm's
            if value.nbytes >= 64 and not (number == 1 and name.startswith(("twin.", "own_bias"))):
                assert value.tobytes() not in everything, f"{name} of {device} left it in round {number}"
    sent = b"\0".join(run.up.values())
    assert not [name for name in initial if f'"{name}"'.encode() in sent]


@each_case
def test_the_model_that_is_kept_is_the_servers_part(case: Case, recorded: Record) -> None:
    """What all devices share in one file, what was made for one device in a file of its own."""
    run = recorded(case)
    assert set(unpack(run.model)) == with_roles(case, ROUNDS, Role.GLOBAL, Role.SEEDED, Role.SHARED)
    generated = with_roles(case, ROUNDS, Role.GENERATED, Role.ASSIGNED)
    files = sorted(run.folder.glob("generated/*.safetensors"))
    assert [file.stem for file in files] == ([f"device-{number}" for number in range(DEVICES)] if generated else [])
    for device, task in run.tasks:
        if (task.round, task.kind) != (ROUNDS, "evaluate"):
            continue
        sent = {key: value for digest in task.groups.values() for key, value in unpack(run.down[digest]).items()}
        mine = unpack((run.folder / "generated" / f"{device}.safetensors").read_bytes()) if generated else {}
        assert bits(sent) == bits(unpack(run.model) | mine)


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


# --- real edge processes over a real broker -----------------------------------------------------------


class Fleet:
    """mosquitto and three edge processes that take part in one run after the other."""

    def __init__(self, folder: Path, parts: list[Path], cache: Path) -> None:
        self.folder = folder
        self._cache = cache
        self._parts = parts
        self._broker = start_broker("mosquitto", folder / "broker", port=0)
        self._logs = [folder / f"{part.name}.log" for part in parts]
        self._devices = [self._device(part, log) for part, log in zip(parts, self._logs, strict=True)]

    def _device(self, part: Path, log: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", "from edge_client.cli import main; main()", "--data", str(part), "--id"]
        command += [part.name, "--broker", str(self._broker.address), "--threads", "1"]
        command += ["--state", str(self.folder / "state" / part.name), "--features", "any", "--class-counts"]
        with open(log, "ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def run(self, case: Case) -> tuple[RunView, bytes]:
        """A run of the case, coordinated from here; the summary, and the tensors at its end."""
        config = make_config({**settings(case, 0, self._parts), "devices": DEVICES}, "contract").run
        out = self.folder / "runs"
        store = open_record(out)
        store.runs.create(case.id, msgspec.to_builtins(config))
        coordinator = Coordinator(
            RunSetup(
                run=case.id,
                config=config,
                transport=MqttTransport(SimpleQueue(), Address.parse(str(self._broker.address)), case.id),
                store=store,
                folder=out / case.id,
                display=Display(),
                compute=Engine(run=case.id, config=config, store=store, folder=out / case.id, graph_cache=self._cache),
            )
        )
        coordinator.serve()
        store.close()
        return read_run(open_record(out), case.id), (out / case.id / "model.safetensors").read_bytes()

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in self._logs)

    def running(self) -> bool:
        return all(device.poll() is None for device in self._devices)

    def close(self) -> None:
        for device in self._devices:
            device.kill()
            device.wait()
        self._broker.stop()


@pytest.fixture(scope="session")
def fleet(device_folders: list[Path], graph_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), device_folders, graph_cache)
    yield fleet
    fleet.close()


REAL_NAMES = (
    "analytic", "apfl", "eftvit", "fedavg", "fedbfpt", "fedperfix", "fedrep", "fedtp", "knn_per", "per_fedavg",
    "pfedme", "pfedpg", "scaffold",
)  # fmt: skip
REAL = [case for case in CASES if case.id in REAL_NAMES]
"""A method for each kind of work that a Program can ask of a device; agents and their code are those of all others."""


def kinds_of_work(case: Case) -> set[str]:
    """What is special about what a device does in the case."""
    method = case.method()
    with torch.device("meta"):
        vit = build_model(method, SMALL, 5, seed=0, options=MODEL)
        groups, phases, evaluate = method.groups(vit), method.phases(vit), method.evaluate(vit)
        rounds = {method.in_round(number, ROUNDS) for number in range(1, ROUNDS + 1)}
    found = {f"role {role.value}" for role, names in groups.values() if names}
    found |= {
        f"{name} of a phase"
        for phase in phases
        for name in ("collect", "draws", "slots", "update")
        if getattr(phase, name)
    }
    found |= {"a phase with repeats" for phase in phases if phase.repeats > 1}
    found |= {f"{name} of the evaluation" for name in ("adapt", "gather", "kept") if getattr(evaluate, name)}
    found |= {"several phases"} if len(phases) > 1 else set()
    found |= {"a program for each round"} if len(rounds) > 1 else set()
    found |= {"masked images"} if method.mask else set()
    return found


def test_real_devices_do_every_kind_of_work() -> None:
    """Which methods train on real devices below: those that have between them all that any method has."""
    assert set().union(*map(kinds_of_work, REAL)) == set().union(*map(kinds_of_work, CASES))


@pytest.mark.parametrize("case", REAL, ids=repr)
def test_real_devices_train_it_bit_for_bit_as_in_memory(case: Case, fleet: Fleet, recorded: Record) -> None:
    """Two rounds on three `edge-client` processes over mosquitto: every result counts, and tensors, losses and answers
    are those of the run in memory. The same processes serve every method, one after the other: no method needs
    another device software."""
    assert_as_in_memory(case, fleet, recorded)


def assert_as_in_memory(case: Case, fleet: Fleet, recorded: Record) -> None:
    calm = recorded(case)
    summary, model = fleet.run(case)
    assert fleet.running(), fleet.logs()
    assert (summary.status, summary.refusals) == ("finished", [])
    assert [entry.accepted for entry in summary.rounds] == [DEVICES] * ROUNDS
    assert [entry.accuracy for entry in summary.rounds] == [entry.accuracy for entry in calm.summary.rounds]
    assert [entry.train_loss for entry in summary.rounds] == [entry.train_loss for entry in calm.summary.rounds]
    assert model == calm.model
    assert json.dumps(msgspec.to_builtins(summary.devices))  # no figure that cannot be written down


CODED = [
    Case("fedper-coded", "fedper", {}, {"up": "int8", "down": "int8"}),
    Case("fedtp-coded", "fedtp", {}, {"up": "top_k:share=0.1", "down": "int8", "down_whole": "fp16"}),
    Case("eftvit-coded", "eftvit", SMALLEST["eftvit"], {"features": "fp16", "down": "int8"}),
]
each_coded = pytest.mark.parametrize("case", CODED, ids=repr)


@each_coded
def test_real_devices_train_coded_updates_bit_for_bit_as_in_memory(case: Case, fleet: Fleet, recorded: Record) -> None:
    """What is left out by coding and what is made by recipes included; and it is another model than uncoded."""
    assert_as_in_memory(case, fleet, recorded)
    [plain] = [other for other in CASES if other.id == case.name]
    assert recorded(case).model != recorded(plain).model


@each_coded
def test_coded_bytes_are_known_beforehand(case: Case, recorded: Record) -> None:
    """Of the first round, and of the second, in which a device makes the server's tensors from those that it has; the
    evaluation of round 1 fetched them. Uploads hold what the Program says, and decode to its tensors."""
    run = recorded(case)
    for device, task in run.tasks:
        if task.kind != "train":
            continue
        program, result = run.program(task), run.results[device, task.round, "train"]
        graphs = {name: graph_cost(run.down[spec.digest]) for name, spec in program.graphs.items()}
        cost = PricedProgram(program, {}, graphs).cost(images=result.samples, test_images=0)
        generated = program.own_groups()
        if task.round == 1:
            assert result.use.fetched_bytes == cost.bytes_once + cost.bytes_down
        else:
            fetched = result.use.fetched_bytes + run.results[device, 1, "evaluate"].use.fetched_bytes
            assert fetched <= cost.bytes_down * (2 if generated else 1)
            assert generated or fetched == cost.bytes_down
        assert result.upload is not None
        content = unpack(run.up[result.upload.digest])
        check_tensors(content, program.upload_form(), "upload")
        if not any(phase.collect for phase in program.train):
            assert cost.bytes_up == result.use.upload_bytes == result.upload.size
        assert any("#" in name or value.dtype == np.float16 for name, value in content.items())


@each_coded
def test_devices_make_the_tensors_that_the_server_refers_to(case: Case, recorded: Record) -> None:
    """After round 1 nobody fetches a coded group whole; and what a task names is what the store's record names."""
    run = recorded(case)
    with open_record(run.folder.parent) as store:
        states = [record.state for record in store.rounds.read_all(case.id) if record.state]
    blobs = BlobStore(run.folder / "blobs")
    assert any(reference.links for reference in states[-1].references.values())
    for device, task in run.tasks:
        if (task.round, task.kind) != (ROUNDS, "evaluate"):
            continue
        for group, reference in states[-1].references.items():
            assert task.groups[group] == reference.digest
            # of a group of vectors alone the change takes as much as the whole
            assert bool(reference.links) == (reference.digest not in run.down), f"{group!r} of {device}"
            exact, coded = unpack(blobs.get(states[-1].groups[group])), unpack(blobs.get(reference.digest))
            for name, value in exact.items():
                np.testing.assert_allclose(coded[name], value, atol=2e-3)


@pytest.mark.parametrize("name", ["fedavg", "eftvit"])
def test_another_seed_gives_another_model(name: str, recorded: Record) -> None:
    [case] = [case for case in CASES if case.id == name]
    first, other = recorded(case), recorded(case, seed=1)
    assert unpack(other.model).keys() == unpack(first.model).keys()
    assert bits(unpack(other.model)) != bits(unpack(first.model))
    for key, tensors in first.vaults.items():
        for tensor, value in bits(tensors).items():
            assert value != bits(other.vaults[key])[tensor], f"{tensor} of {key} does not depend on the seed"


def test_devices_that_come_later_learn_an_embedding(
    device_folders: list[Path], graph_cache: Path, tmp_path: Path
) -> None:
    """FedTP's study of novel devices: two devices train, a third comes when they are done. What they shared stands
    still and is sent once; the hypernetwork stands still, too; the third device's embedding moves, and with it what
    is made for it."""
    plain = Case("first", "fedtp", {"server_lr": 0.5})
    simulate(
        RunRequest(
            device_folders[:2], settings(plain, 0, device_folders), out=tmp_path, run="first", graph_cache=graph_cache
        )
    )
    novel = Case("later", "fedtp", {"server_lr": 0.5, "novel": "own"})
    values = {**settings(novel, 0, device_folders), "start_from": "first"}
    later = simulate(RunRequest(device_folders[2:], values, out=tmp_path, run="later", graph_cache=graph_cache))
    with open_record(tmp_path) as store:
        [*_, trained] = [record.state for record in store.rounds.read_all("first") if record.state]
        [*_, adapted] = [record.state for record in store.rounds.read_all("later") if record.state]
        before = load_state(trained, BlobStore(tmp_path / "first" / "blobs"))
        after = load_state(adapted, BlobStore(later.folder / "blobs"))
        assert not after.tensors, "shared tensors are sent once, not each round"
        for name, value in before.memory.items():
            assert after.memory[name].tobytes() == value.tobytes(), name
        assert not [name for name in after.memory.keys() - before.memory.keys() if "device-2" not in name]
        rule = novel.method().server_rule(build_model(novel.method(), SMALL, 10, seed=0, options=MODEL))
        first = rule.generate(before, "device-2", 0)
        assert bits(first) != bits(rule.generate(after, "device-2", 0))
        blobs, digest = BlobStore(later.folder / "blobs"), store.runs.read("later").program
    assert digest is not None
    frozen = decode_program(blobs.get(digest)).groups["shared"]
    assert (frozen.role, frozen.initial is None) == (Role.FROZEN, False)
    assert bits(unpack(blobs.get(str(frozen.initial)))) == bits(before.tensors)
