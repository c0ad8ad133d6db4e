"""A run on torch ends as one without interruptions, and refuses what it cannot simulate."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from coordinator.compute.checkpoint import load_state
from coordinator.record.record import open_record
from coordinator.rounds.display import Display
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, EmptyCohort, FedvitError
from fedvit.methods import build_model, make_method
from fedvit.methods.linear_term import OWN
from fedvit.methods.twins import TWIN
from fedvit.models import SMALL
from fleet.engines import journal, simulation
from fleet.engines.cohort import Cohort
from fleet.request import Engine, RunOutcome, RunRequest
from fleet.simulate import simulate
from tests.support.codes import has_code
from tests.support.displays import Lines
from tests.support.tiny import TINY_MODEL

DEVICES, ROUNDS = 3, 4
VALUES: dict[str, Any] = {
    "method": "fedper", "rounds": ROUNDS, "evaluate_every": 2, "options": {"batch_size": 16, "lr": 0.05},
    "model_options": TINY_MODEL, "updates": {"up": "top_k:share=0.2"},
}  # fmt: skip
COLLECTING = {
    "method": "eftvit", "rounds": ROUNDS, "cohort": 2, "model_options": TINY_MODEL,
    "options": {"batch_size": 16, "local_blocks": 1},
}  # fmt: skip
"""Whose server keeps devices' uploads of earlier rounds."""

RUN_SLOWLY = """
import sys
import msgspec
from pathlib import Path
from coordinator.rounds.display import Display
from fleet.engines import journal
from fleet.request import RunRequest
from fleet.simulate import simulate

journal.CHECKPOINT_EVERY_S, journal.CHECKPOINT_SHARE = 0.0, float("inf")  # after every round

class Lines(Display):
    def line(self, text):
        print(text, flush=True)
        sys.stdin.readline()  # continues at a line of input

out, values, *folders = sys.argv[1:]
simulate(RunRequest([Path(f) for f in folders], msgspec.json.decode(values), out=Path(out), run="run", engine="torch",
         at_once=1), Lines())
"""


def run(
    folders: list[Path], values: dict[str, Any], out: Path, display: Display | None = None, **more: Any
) -> RunOutcome:
    return simulate(RunRequest(folders, values, out=out, run="run", engine="torch", at_once=1, **more), display)


def everything(outcome: RunOutcome) -> dict[str, Any]:
    """All that a run leaves: the server's tensors, devices' own, and the record without times."""
    tensors = load_file(outcome.folder / "model.safetensors")
    tensors |= load_file(outcome.folder / "state" / f"devices-{ROUNDS}.safetensors")
    rounds = [(entry.round, entry.cohort, entry.accuracy, entry.train_loss) for entry in outcome.summary.rounds]
    return {**tensors, "rounds": rounds, "devices": [device.rounds for device in outcome.summary.devices]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[key], other[key]) if isinstance(one[key], np.ndarray) else one[key] == other[key]
        for key in one
    )


def check_kept(calm: dict[str, Any], home: Path) -> None:
    """What is returned as a device's own tensors is what a checkpoint holds of them: not what a codec left out."""
    for number in range(DEVICES):
        own = simulation.read_kept_tensors(home, f"device-{number}")
        assert set(own) == {"head.weight", "head.bias"}
        assert all(np.array_equal(value, calm[f"kept/device-{number}/{name}"]) for name, value in own.items())


@pytest.mark.slow
def test_compiled_steps_give_the_same_tensors(folders: list[Path], tmp_path: Path) -> None:
    """Compiled by g++; up to rounding, which a codec of the largest values would not keep small."""
    values = {**VALUES, "updates": {}}
    plain = everything(run(folders, values, tmp_path / "plain"))
    fused = everything(run(folders, values, tmp_path / "fused", fused=True))
    named = [name for name, value in plain.items() if isinstance(value, np.ndarray)]
    assert any(not np.array_equal(fused[name], plain[name]) for name in named)  # other sums: it was compiled
    assert all(np.allclose(fused[name], plain[name], atol=1e-5) for name in named)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_the_server_counts_the_steps_of_each_variant(engine: Engine, folders: list[Path], tmp_path: Path) -> None:
    """SCAFFOLD's c_i is -D_i / (K_i lr_i) after one round: the weighted sum of K_i lr_i c_i is the server's step.

    Devices have one, two and three epochs, one has a rate of its own, and `max_weight` caps weights, but no steps.
    """
    rates, epochs = (
        {"device-0": 0.05, "device-1": 0.02, "device-2": 0.05},
        {"device-0": 1, "device-1": 2, "device-2": 3},
    )
    values = {
        "method": "scaffold", "rounds": 1, "model_options": TINY_MODEL, "options": {"batch_size": 16, "lr": 0.05},
        "variants": {"device-1": {"epochs": 2, "lr": 0.02}, "device-2": {"epochs": 3}}, "robust": {"max_weight": 1.0},
    }  # fmt: skip
    outcome = simulate(RunRequest(folders, values, out=tmp_path, run="run", engine=engine, at_once=1))
    with open_record(tmp_path) as store:
        [state] = [record.state for record in store.rounds.read_all("run") if record.state]
    memory = load_state(state, BlobStore(outcome.folder / "blobs")).memory
    images = {device.device: device.train_samples for device in outcome.summary.devices}
    capped = {device: min(count, sorted(images.values())[1]) for device, count in images.items()}
    assert capped != images
    first = build_model(make_method("scaffold"), SMALL, 10, seed=0, options=TINY_MODEL).tensors()
    for name, value in load_file(outcome.folder / "model.safetensors").items():
        moved = sum(
            capped[device]
            / sum(capped.values())
            * -count
            * -(-images[device] // 16)
            * rates[device]
            * memory[f"{OWN}/{device}/{name}"]
            for device, count in epochs.items()
        )
        np.testing.assert_allclose(value - first[name].numpy(), moved, rtol=1e-3, atol=1e-6)


def test_ditto_agrees_with_the_loop_of_the_released_library(folders: list[Path], tmp_path: Path) -> None:
    """PFLlib's Ditto, written again as plain loops over the whole of a device's images: its proximal optimizer steps
    v <- v - lr (g + mu (v - w)), with w the model that came, and the server weighs by images."""
    lr, mu, epochs, rounds = 0.05, 0.7, 3, 2
    options = {"batch_size": 64, "lr": lr, "lam": mu, "epochs": epochs}
    values = {"method": "ditto", "rounds": rounds, "model_options": TINY_MODEL, "options": options}
    outcome = run(folders, values, tmp_path)
    model = build_model(make_method("ditto"), SMALL, 10, seed=0, options=TINY_MODEL).vit
    names = [name for name, _ in model.named_parameters()]
    shared = {name: value.detach().clone() for name, value in model.named_parameters()}
    own = [shared] * DEVICES
    batches = [read_batch(folder) for folder in folders]

    def descend(tensors: dict[str, Tensor], batch: tuple[Tensor, Tensor], spring: float) -> dict[str, Tensor]:
        for _ in range(epochs):
            leaves = {name: tensors[name].clone().requires_grad_() for name in names}
            loss = cross_entropy(functional_call(model, leaves, (batch[0],)), batch[1])
            grads = dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            tensors = {n: v - lr * (grads[n] + spring * (v - shared[n])) for n, v in tensors.items()}
        return tensors

    for _ in range(rounds):
        own = [descend(mine, batch, mu) for mine, batch in zip(own, batches, strict=True)]
        sent = [(len(batch[1]), descend(shared, batch, 0.0)) for batch in batches]
        images = sum(count for count, _ in sent)
        shared = {name: torch.stack([count / images * one[name] for count, one in sent]).sum(dim=0) for name in names}
    for name, value in load_file(outcome.folder / "model.safetensors").items():
        np.testing.assert_allclose(value, shared[name].numpy(), rtol=0, atol=1e-5)
    for number, mine in enumerate(own):
        kept = simulation.read_kept_tensors(outcome.folder, f"device-{number}")
        for name in names:
            np.testing.assert_allclose(kept[f"{TWIN}{name}"], mine[name].numpy(), rtol=0, atol=1e-5)


def read_batch(folder: Path) -> tuple[Tensor, Tensor]:
    """All training images of a device, and their labels; pixels from -1 to 1."""
    train = DeviceData.open(folder).relabel([str(digit) for digit in range(10)]).train
    pixels, _ = train.load(np.arange(len(train)), TINY_MODEL["image_size"])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return (images - 0.5) / 0.5, torch.from_numpy(train.labels)


@pytest.mark.slow
def test_run_that_was_killed_ends_with_the_same_bits(folders: list[Path], tmp_path: Path) -> None:
    """kill -9 behind the checkpoint of round 2; with personal tensors, and what a codec left out."""
    calm = everything(run(folders, VALUES, tmp_path / "calm"))
    check_kept(calm, tmp_path / "calm" / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_SLOWLY, str(tmp_path / "killed"), msgspec.json.encode(VALUES).decode(),
         *map(str, folders)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdout, process.stdin:
        while not (line := process.stdout.readline()).startswith("round   2"):
            assert line, "it ended"
            process.stdin.write("\n")
            process.stdin.flush()
        process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = Lines()
    assert same(calm, everything(run(folders, VALUES, tmp_path / "killed", resume=True, display=resumed)))
    assert not any(line.startswith(("round   1", "round   2")) for line in resumed.lines)


@pytest.mark.slow
def test_run_that_was_interrupted_has_the_uploads_of_earlier_rounds(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(journal, "CHECKPOINT_SHARE", float("inf"))  # after every round
    calm = everything(run(folders, COLLECTING, tmp_path / "calm"))
    with pytest.raises(KeyboardInterrupt):
        run(folders, COLLECTING, tmp_path / "broken", display=Lines(until="round   2"))
    with open_record(tmp_path / "broken") as store:
        assert store.runs.read("run").status == "interrupted"
    assert same(calm, everything(run(folders, COLLECTING, tmp_path / "broken", resume=True)))


def test_run_that_was_interrupted_draws_the_blocks_that_it_would_have_drawn(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedRA with devices of one and two blocks."""
    monkeypatch.setattr(journal, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(journal, "CHECKPOINT_SHARE", float("inf"))  # after every round
    values = {
        **VALUES, "method": "fedra", "updates": {}, "model_options": {**TINY_MODEL, "depth": 3},
        "options": {"layers": 1, "lr": 0.05, "batch_size": 16}, "variants": {"device-2": {"layers": 2}},
    }  # fmt: skip
    calm = everything(run(folders, values, tmp_path / "calm"))
    with pytest.raises(KeyboardInterrupt):
        run(folders, values, tmp_path / "broken", display=Lines(until="round   2"))
    assert same(calm, everything(run(folders, values, tmp_path / "broken", resume=True)))


def test_devices_of_different_ranks_end_with_one_product_on_both_engines(
    folders: list[Path], tmp_path: Path, graph_cache: Path
) -> None:
    """FlexLoRA: what each rank gets is the best of this rank for the same mean."""
    values = {
        **VALUES, "method": "flexlora", "rounds": 2, "updates": {}, "model_options": {**TINY_MODEL, "depth": 1},
        "options": {"rank": 4, "lr": 0.5, "batch_size": 16},
        "variants": {"device-1": {"own_rank": 2}, "device-2": {"own_rank": 1}},
    }  # fmt: skip
    products = []
    engines: tuple[Engine, ...] = ("torch", "onnx")
    for engine in engines:
        request = RunRequest(
            folders, values, out=tmp_path / engine, run="run", engine=engine, graph_cache=graph_cache, at_once=1
        )
        tensors = load_file(simulate(request).folder / "model.safetensors")
        name = "blocks.0.attn.qkv.lora_v"
        products.append([tensors[f"{rank}{name}.b"] @ tensors[f"{rank}{name}.a"] for rank in ("", "rank2.", "rank1.")])
        left, singular, right = np.linalg.svd(products[-1][0])
        for product, rank in zip(products[-1][1:], (2, 1), strict=True):
            best = (left[:, :rank] * singular[:rank]) @ right[:rank]
            np.testing.assert_allclose(product, best, atol=1e-4 * singular[0])
    for one, other in zip(*products, strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, atol=1e-3 * np.abs(one).max())


def read_cohorts(out: Path) -> list[list[str]]:
    with open_record(out) as store:
        cohorts = [list(entry.cohort) for entry in store.rounds.read_all("run")]
    return cohorts


@pytest.mark.parametrize("selection", ["power_of_choice", "oort"])
def test_run_that_was_interrupted_asks_the_devices_that_it_would_have_asked(
    selection: str, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses by which it selects come from the checkpoint."""
    monkeypatch.setattr(journal, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(journal, "CHECKPOINT_SHARE", float("inf"))  # after every round
    values = {**VALUES, "rounds": ROUNDS, "cohort": 1, "selection": selection, "updates": {}}
    calm = run(folders, values, tmp_path / "calm")
    with pytest.raises(KeyboardInterrupt):
        run(folders, values, tmp_path / "broken", display=Lines(until="round   2"))
    again = run(folders, values, tmp_path / "broken", resume=True)
    cohorts = read_cohorts(tmp_path / "calm")
    assert read_cohorts(tmp_path / "broken") == cohorts
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert same(everything(calm), everything(again))


def test_run_stops_and_keeps_its_best_round(folders: list[Path], tmp_path: Path) -> None:
    """A checkpoint has each best round. A resumed run does not go on."""
    values = {**VALUES, "rounds": 30, "evaluate_every": 1, "stop": {"patience": 1}}
    outcome = run(folders, values, tmp_path)
    view, home = outcome.summary, outcome.folder
    last = view.rounds[-1].round
    assert view.best == last - 1
    assert str(view.reason).startswith(f"stopped: accuracy {view.rounds[-2].accuracy_mean:.4g} of round {view.best} ")
    for number in (view.best, last):
        held = load_file(home / "state" / f"devices-{number}.safetensors")
        own = simulation.read_kept_tensors(home, "device-0", number)
        assert all(np.array_equal(value, held[f"kept/device-0/{name}"]) for name, value in own.items())
    assert len(list((home / "state").iterdir())) == 2
    best, newest = load_file(home / "best" / "model.safetensors"), load_file(home / "model.safetensors")
    assert best.keys() == newest.keys()
    assert any(not np.array_equal(best[name], newest[name]) for name in best)
    with open_record(tmp_path) as store:
        store.runs.update("run", status="interrupted")  # as if killed behind its last checkpoint
    again = run(folders, values, tmp_path, resume=True).summary
    assert (again.reason, again.best, len(again.rounds)) == (view.reason, view.best, last)


def test_answers_are_counted_by_class_as_on_a_device(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    """Both engines count the same ones; models of one round differ by rounding alone."""
    values, counts = {**VALUES, "method": "fedavg", "rounds": 1}, []
    engines: tuple[Engine, ...] = ("torch", "onnx")
    for engine in engines:
        request = RunRequest(
            folders, values, out=tmp_path / engine, run="run", engine=engine, graph_cache=graph_cache, at_once=1
        )
        simulate(request, Lines())
        with open_record(tmp_path / engine) as store:
            tested = store.tasks.read_used_in("run", 1, "evaluate")
        assert len(tested) == len(folders)
        for result in tested:
            assert sum(count.images for count in result.by_class) == result.samples
            assert sum(count.correct for count in result.by_class) == result.metrics["correct"]
        counts.append({result.device: result.by_class for result in tested})
    assert counts[0] == counts[1]


def test_run_of_the_other_engine_is_not_resumed(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folders, {**VALUES, "rounds": 1}, tmp_path, display=Lines(until="round   1"))
    with pytest.raises(ConfigError, check=has_code("FV1509", "torch")):
        simulate(
            RunRequest(
                folders,
                {**VALUES, "rounds": 1},
                out=tmp_path,
                run="run",
                resume=True,
                engine="onnx",
                graph_cache=graph_cache,
            )
        )


def test_devices_start_from_coded_values_from_the_first_round_on(
    folders: list[Path], tmp_path: Path, graph_cache: Path
) -> None:
    """The engines agree: what coding leaves out of the first values, and of the first change, no device trains."""
    values = {**VALUES, "rounds": 2, "updates": {"down": "top_k:share=0.05", "down_whole": "fp16"}}
    engines: tuple[Engine, ...] = ("torch", "onnx")
    ended = []
    for engine in engines:
        request = RunRequest(
            folders, values, out=tmp_path / engine, run="run", engine=engine, graph_cache=graph_cache, at_once=1
        )
        ended.append(load_file(simulate(request, Lines()).folder / "model.safetensors"))
    one, other = ended
    assert all(np.linalg.norm(one[name] - other[name]) < 1e-4 * np.linalg.norm(one[name]) for name in one)


def test_process_has_its_own_number_of_torch_threads_again(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that is forked from it afterwards would wait for threads that it has not."""
    asked: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    run(folders, {**VALUES, "rounds": 1}, tmp_path)
    assert asked == [1, before]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"mode": "buffered"}, "FV2109"),
        ({"late": "use"}, "FV2109"),
        ({"over_select": 0.5}, "FV2109"),
        ({"options": {"optimizer_bits": 8}}, "FV2109"),
        ({"variants": {"pi-*": {"optimizer_bits": 8}}}, "FV2109"),
        ({"accelerator": "cpu:2"}, "FV2110"),
        ({"budget": {"memory_budget": 200_000_000}}, "FV2109"),
    ],
)
def test_what_needs_real_devices_is_refused_before_there_is_a_run(
    values: dict[str, Any], code: str, folders: list[Path], tmp_path: Path
) -> None:
    plain = {**VALUES, "method": "fedavg", "updates": {}}
    with pytest.raises(ConfigError, check=has_code(code)):
        run(folders, {**plain, **values}, tmp_path)
    assert not (tmp_path / "fedvit.db").exists()


def test_devices_of_several_variants_train_in_the_same_round(folders: list[Path], tmp_path: Path) -> None:
    outcome = run(folders, {**VALUES, "variants": {"device-1": {"epochs": 2}}}, tmp_path)
    first, second, third = (device.flops_per_round for device in outcome.summary.devices)
    assert first
    assert second == 2 * third == 4 * first  # of 16, 24 and 32 images in batches of 16


@pytest.mark.parametrize(("updates", "why"), [({}, "training diverged"), ({"up": "fp16"}, "range of fp16")])
def test_diverged_devices_are_refused_and_a_round_without_any_other_ends_the_run(
    updates: dict[str, str], why: str, folders: list[Path], tmp_path: Path
) -> None:
    rate = 1e30 if not updates else 1e6
    values = {**VALUES, "options": {"batch_size": 16, "lr": rate}, "updates": updates}
    with pytest.raises(EmptyCohort, check=has_code("FV1501")):
        run(folders, values, tmp_path)
    with open_record(tmp_path) as store:
        assert (store.runs.read("run").status, why in str(store.runs.read("run").reason)) == ("failed", True)


def test_batches_have_fewer_devices_where_memory_is_short(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, sizes = Cohort.train, list[int]()

    def short(self: Cohort, *arguments: Any) -> Any:
        sizes.append(len(arguments[4]))
        if len(arguments[4]) > most:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB")
        return train(self, *arguments)

    most = 1
    monkeypatch.setattr(Cohort, "train", short)
    lines = Lines()
    outcome = run(folders, VALUES, tmp_path / "short", display=lines)
    assert sizes[:4] == [3, 1, 1, 1]
    assert [line for line in lines.lines if "memory is short" in line] == [
        "cpu: memory is short; batches have 1 devices from now on"
    ]
    assert outcome.summary.rounds[-1].accepted == DEVICES
    most = 0
    with pytest.raises(FedvitError, check=has_code("FV2108")):
        run(folders, VALUES, tmp_path / "none")
