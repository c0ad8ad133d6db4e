"""A device's local work, on graphs that were really exported."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.runtime import Runtime, Seeds, Stopped, Trained, Watch, training_feeds
from fedvit.data.folder import DeviceData, Split
from fedvit.data.images import normalise, unfold
from fedvit.errors import BadPayload, DataError
from fedvit.methods.step import predict_step, train_step
from fedvit.program import Program
from fedvit.tensors import Tensors

if TYPE_CHECKING:
    from tests.unit.edge_client.conftest import Log, Setting

SEEDS = Seeds(run=1, round=1, device="pi")
SILENT = Watch(lambda *step: None, lambda: False)


def train(setting: "Setting", images: Split, program: Program | None = None, **changed: Any) -> Trained:
    """One round from the program's start values; `seeds`, `start`, `lr_scale` or `watch` as given."""
    given = {"start": setting.start(), "seeds": SEEDS, "lr_scale": 1.0, "watch": SILENT, **changed}
    return setting.runtime().train(program or setting.program, images=images, **given)


def with_phase(program: Program, **changed: Any) -> Program:
    [phase] = program.train
    return msgspec.structs.replace(program, train=(msgspec.structs.replace(phase, **changed),))


def some(data: DeviceData, tmp_path: Path, rows: list[int]) -> DeviceData:
    """A device that has only these training images."""
    for row in rows:
        path = data.train.paths[row]
        folder = tmp_path / "train" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
    (tmp_path / "test").mkdir(exist_ok=True)  # else some would be set apart
    return DeviceData.open(tmp_path).relabelled(data.classes)


def lose_pixels(folder: Path, name: str) -> None:
    """An image whose header is fine and whose pixels are gone."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(folder / name)
    (folder / name).write_bytes((folder / name).read_bytes()[:200])


def in_torch(setting: "Setting", images: Split, steps: int, *, fresh_slots: bool) -> tuple[Tensors, float]:
    """Full-batch training of FedAvg's step in eager torch, without padding: (tensors, loss of the last step)."""
    plan, batch = setting.plan, setting.program.batch
    [phase] = setting.program.train
    step = train_step(plan.method, plan.vit, phase)
    pictures, readable = images.load(np.arange(len(images)), batch.image_size)
    patches = unfold(normalise(pictures[readable], batch), batch.patch_size)
    inputs = {f"tensor/{name}": torch.tensor(value) for name, value in setting.start().items()}
    names = [name.removeprefix("tensor/") for name in inputs]
    zeros = {
        f"slot/{slot}/{name}": torch.zeros_like(inputs[f"tensor/{name}"]) for slot in phase.slots for name in names
    }
    inputs |= zeros
    inputs |= {
        "batch/patches": torch.tensor(patches),
        "batch/labels": torch.tensor(images.labels[readable]),
        "batch/weight": torch.ones(int(readable.sum())),
        "hyper/lr": torch.tensor(phase.lr),
        "hyper/step": torch.tensor(1.0),
    }
    loss = float("nan")
    for _ in range(steps):
        outputs = step(inputs)
        loss = float(outputs["metric/loss"])
        inputs |= {name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")}
        inputs |= zeros if fresh_slots else {}
    return {name: inputs[f"tensor/{name}"].numpy() for name in names}, loss


def assert_moved_alike(setting: "Setting", got: Tensors, want: Tensors) -> None:
    """Updates agree within 1e-3 of the largest update of their tensor, or 2 units in the last place of 1."""
    start = setting.start()
    assert got.keys() == want.keys()
    for name, value in want.items():
        update = np.abs(value - start[name]).max()
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-3 * update + 2.4e-7, err_msg=name)


# --- what training does -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "lr"), [("fedavg", 0.03), ("eftvit", 3e-4)])
def test_training_learns(settings: dict[str, "Setting"], data: DeviceData, method: str, lr: float) -> None:
    """Three classes: a guess costs ln 3 = 1.10. 120 epochs over 20 digits must explain at least a third of it."""
    setting = settings[method]
    first = train(setting, data.train, with_phase(setting.program, epochs=1, lr=lr))
    last = train(setting, data.train, with_phase(setting.program, epochs=120, lr=lr))
    assert 0.8 < first.loss < 1.4
    assert last.loss < 0.73


def test_local_and_head_move_and_the_global_part_does_not(eftvit: "Setting", data: DeviceData) -> None:
    program, start = eftvit.program, eftvit.start()
    untouched = {name: value.tobytes() for name, value in start.items()}
    trained = train(eftvit, data.train, start=start)
    assert set(trained.tensors) == {*program.names("local"), *program.names("head")}
    assert {"head.weight", "blocks.0.attn.qkv.weight", "patch_embed.proj.weight"} <= trained.tensors.keys()
    assert not any(name.startswith(("blocks.1.", "blocks.2.", "norm.")) for name in trained.tensors)
    for name, value in trained.tensors.items():
        assert (value.shape, value.dtype) == (start[name].shape, start[name].dtype)
        assert np.abs(value - start[name]).max() > 0, name
    assert {name: value.tobytes() for name, value in start.items()} == untouched


def test_what_a_round_says_of_itself(fedavg: "Setting", data: DeviceData, log: "Log") -> None:
    """20 images in batches of 8: 3 steps an epoch, 6 in 2 epochs. The loss is the mean over the last epoch's 20."""
    trained = train(fedavg, data.train, watch=log)
    assert (trained.samples, trained.steps) == (20, 6)
    assert trained.flops == 6 * fedavg.program.graphs["train"].flops > 0
    assert [(done, total) for done, total, _ in log.steps] == [(step, 6) for step in range(1, 7)]
    losses = [loss for _, _, loss in log.steps[3:] if loss is not None]
    assert trained.loss == pytest.approx((8 * losses[0] + 8 * losses[1] + 4 * losses[2]) / 20)
    assert trained.step_s is not None
    assert trained.collected == {}


def test_features_are_collected_as_the_program_says(eftvit: "Setting", data: DeviceData) -> None:
    """n_c = 8, 8, 4: the median is 8; 4 < 8 gives 8 of its 3 * 4. 16 patches, half kept, and the class token: 9."""
    collected = train(eftvit, data.train).collected
    assert collected["features"].shape == (24, 9, 32)
    assert collected["features"].dtype == np.float32
    assert np.bincount(collected["labels"]).tolist() == [8, 8, 8]
    assert collected["labels"].dtype == np.int64


def test_the_schedule_scales_the_learning_rate(fedavg: "Setting", data: DeviceData, tmp_path: Path) -> None:
    """One plain step: the update is proportional to the rate, so a quarter of it moves a quarter as far."""
    images = some(data, tmp_path, [0, 9, 17]).train
    program = with_phase(fedavg.program, epochs=1)
    start = fedavg.start()["head.weight"]
    whole = train(fedavg, images, program).tensors["head.weight"] - start
    quarter = train(fedavg, images, program, lr_scale=0.25).tensors["head.weight"] - start
    np.testing.assert_allclose(quarter, whole / 4, atol=1e-3 * np.abs(whole).max())


# --- randomness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "eftvit"])
def test_the_same_seeds_give_the_same_bits(settings: dict[str, "Setting"], data: DeviceData, method: str) -> None:
    first, again = (train(settings[method], data.train) for _ in range(2))
    assert first.loss == again.loss
    for one, other in ((first.tensors, again.tensors), (first.collected, again.collected)):
        assert one.keys() == other.keys()
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize("other", [Seeds(2, 1, "pi"), Seeds(1, 2, "pi"), Seeds(1, 1, "pi2")])
def test_another_run_round_or_device_draws_otherwise(fedavg: "Setting", data: DeviceData, other: Seeds) -> None:
    images = data.train
    assert train(fedavg, images).tensors["head.weight"].tobytes() != (
        train(fedavg, images, seeds=other).tensors["head.weight"].tobytes()
    )


def test_generators_are_independent() -> None:
    draws = [generator.random() for generator in SEEDS.generators(4)]
    assert len(set(draws)) == 4
    assert [generator.random() for generator in SEEDS.generators(2)] == draws[:2]


def test_masks_differ_between_epochs(eftvit: "Setting", data: DeviceData) -> None:
    """With a learning rate of 1e-30 no weight moves, so only the mask can change a sample's features.

    n_c = 8, 8, 4, three epochs: the third class gives 8 of its 12; with 4 images, some image comes from at
    least two epochs. In 8 of 16 patches, drawn anew, all 8 features differ.
    """
    still = with_phase(eftvit.program, lr=1e-30)
    trained = train(eftvit, data.train, still)
    start = eftvit.start()
    assert max(float(np.abs(value - start[name]).max()) for name, value in trained.tensors.items()) < 1e-25
    features = trained.collected["features"][trained.collected["labels"] == 2]
    assert len(features) == 8
    assert len({feature.tobytes() for feature in features}) == 8
    plain = msgspec.structs.replace(eftvit.program.batch, mask_ratio=0.5)
    draw = np.random.default_rng(0)
    kept = [training_feeds(data.train, np.arange(8), plain, draw, draw)[0]["batch/kept"] for _ in range(2)]
    assert (kept[0] != kept[1]).any()


# --- short batches and unreadable images --------------------------------------------------------------


def test_a_short_batch_is_as_exact_as_one_without_padding(fedavg: "Setting", data: DeviceData, tmp_path: Path) -> None:
    """5 images in a batch of 8, two epochs with momentum; torch takes the 5 alone."""
    images = some(data, tmp_path, [0, 1, 8, 9, 16]).train
    trained = train(fedavg, images)
    want, loss = in_torch(fedavg, images, steps=2, fresh_slots=False)
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(fedavg, trained.tensors, want)


def test_phases_follow_one_another_with_fresh_optimizer_state(
    fedavg: "Setting", data: DeviceData, tmp_path: Path
) -> None:
    """Two phases of one step each: the second begins where the first ended, with zero momentum."""
    images = some(data, tmp_path, [0, 8, 16]).train
    [phase] = with_phase(fedavg.program, epochs=1).train
    trained = train(fedavg, images, msgspec.structs.replace(fedavg.program, train=(phase, phase)))
    want, loss = in_torch(fedavg, images, steps=2, fresh_slots=True)
    assert trained.steps == 2
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(fedavg, trained.tensors, want)


def test_adaptive_steps_are_those_of_torch(eftvit: "Setting", data: DeviceData, tmp_path: Path) -> None:
    """Three AdamW steps on masked patches: the runtime counts them, keeps their moments, draws the same masks."""
    images = some(data, tmp_path, [0, 8, 16]).train
    trained = train(eftvit, images)
    plan, program = eftvit.plan, eftvit.program
    [phase] = program.train
    step = train_step(plan.method, plan.vit, phase)
    inputs = {f"tensor/{name}": torch.tensor(value) for name, value in eftvit.start().items()}
    for slot in phase.slots:
        inputs |= {f"slot/{slot}/{name}": torch.zeros_like(inputs[f"tensor/{name}"]) for name in trained.tensors}
    inputs["hyper/lr"] = torch.tensor(phase.lr)
    order_rng, picture_rng, mask_rng, _ = SEEDS.generators(4)
    for number in range(3):
        feeds, _ = training_feeds(images, order_rng.permutation(3), program.batch, picture_rng, mask_rng)
        inputs |= {name: torch.tensor(value) for name, value in feeds.items()}
        outputs = step(inputs | {"hyper/step": torch.tensor(float(number + 1))})
        inputs |= {name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")}
    assert trained.loss == pytest.approx(float(outputs["metric/loss"]), rel=1e-4)
    for name, value in trained.tensors.items():
        want, first = inputs[f"tensor/{name}"].numpy(), eftvit.start()[name]
        # the mean, because Adam turns a gradient that is zero but for rounding into a step of full size
        assert np.abs(value - want).mean() < 0.02 * np.abs(want - first).mean() or name.endswith("qkv.bias"), name


def test_an_unreadable_image_does_not_count(fedavg: "Setting", data: DeviceData, tmp_path: Path) -> None:
    """4 good images and one that fails when it is decoded: torch takes the 4 alone; 4 samples are reported."""
    lose_pixels(tmp_path / "train" / "1", "broken.png")
    images = some(data, tmp_path, [0, 8, 9, 16]).train
    assert len(images) == 5
    trained = train(fedavg, images)
    want, loss = in_torch(fedavg, images, steps=2, fresh_slots=False)
    assert trained.samples == 4
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(fedavg, trained.tensors, want)


def test_an_unreadable_image_is_not_collected(eftvit: "Setting", data: DeviceData, tmp_path: Path) -> None:
    """n_c = 1, 2, 1 with one of the two unreadable; E = 3, the median is 1: one feature of each class at most."""
    lose_pixels(tmp_path / "train" / "1", "broken.png")
    images = some(data, tmp_path, [0, 8, 16]).train
    labels = {tuple(train(eftvit, images, seeds=Seeds(0, n, "pi")).collected["labels"].tolist()) for n in range(6)}
    assert {tuple(sorted(kept)) for kept in labels} == {(0, 1, 2), (0, 2)}


def test_nothing_but_unreadable_images_is_an_error(fedavg: "Setting", tmp_path: Path) -> None:
    for name in ("0", "1", "2"):
        lose_pixels(tmp_path / "train" / name, "broken.png")
    with pytest.raises(DataError, match="none of the 3 training images can be decoded"):
        train(fedavg, DeviceData.open(tmp_path).train)


# --- evaluation ---------------------------------------------------------------------------------------


def test_evaluation_counts_right_answers(fedavg: "Setting", data: DeviceData, log: "Log") -> None:
    """12 test images in batches of 8 and 4: as many right as torch says of the same tensors."""
    values = fedavg.start() | train(fedavg, data.train, with_phase(fedavg.program, epochs=3)).tensors
    batch = fedavg.program.batch
    pictures, _ = data.test.load(np.arange(12), batch.image_size)
    inputs = {f"tensor/{name}": torch.tensor(value) for name, value in values.items()}
    inputs["batch/patches"] = torch.tensor(unfold(normalise(pictures, batch), batch.patch_size))
    answers = predict_step(fedavg.plan.method, fedavg.plan.vit)(inputs)["logits"].argmax(dim=1).numpy()
    right = int((answers == data.test.labels).sum())
    assert 0 < right < 12, "else the comparison proves nothing"
    evaluated = fedavg.runtime().evaluate(fedavg.program, values, data.test, log)
    assert (evaluated.correct, evaluated.samples) == (right, 12)
    assert evaluated.flops == 2 * fedavg.program.graphs["predict"].flops
    assert log.steps == [(1, 2, None), (2, 2, None)]


def test_evaluation_uses_full_images_also_where_training_masks(eftvit: "Setting", data: DeviceData) -> None:
    """Nothing is drawn at random, so a second look counts the same."""
    runtime, values = eftvit.runtime(), eftvit.start()
    first, again = (runtime.evaluate(eftvit.program, values, data.test, SILENT) for _ in range(2))
    assert first == again
    assert first.samples == 12


def test_an_unreadable_test_image_is_neither_right_nor_wrong(
    fedavg: "Setting", data: DeviceData, tmp_path: Path
) -> None:
    lose_pixels(tmp_path / "test" / "0", "broken.png")
    (tmp_path / "test" / "1").mkdir()
    (tmp_path / "test" / "1" / "0.png").write_bytes(data.test.paths[4].read_bytes())
    images = some(data, tmp_path, [0]).test
    assert len(images) == 2
    right = {}
    for label in (0, 1, 2):  # a head that always gives one answer
        values = fedavg.start()
        values["head.weight"] = np.zeros_like(values["head.weight"])
        values["head.bias"] = np.eye(3, dtype=np.float32)[label]
        evaluated = fedavg.runtime().evaluate(fedavg.program, values, images, SILENT)
        assert evaluated.samples == 1
        right[label] = evaluated.correct
    assert right == {0: 0, 1: 1, 2: 0}


def test_a_device_without_test_images_counts_nothing(fedavg: "Setting", data: DeviceData, tmp_path: Path) -> None:
    images = some(data, tmp_path, [0]).test
    evaluated = fedavg.runtime().evaluate(fedavg.program, fedavg.start(), images, SILENT)
    assert (evaluated.correct, evaluated.samples, evaluated.flops) == (0, 0, 0)


# --- stopping and errors ------------------------------------------------------------------------------


def test_training_stops_between_two_steps(fedavg: "Setting", data: DeviceData, log: "Log") -> None:
    log.stopped = lambda: len(log.steps) == 4
    with pytest.raises(Stopped):
        train(fedavg, data.train, watch=log)
    assert len(log.steps) == 4


def test_evaluation_stops_between_two_batches(fedavg: "Setting", data: DeviceData, log: "Log") -> None:
    log.stopped = lambda: len(log.steps) == 1
    with pytest.raises(Stopped):
        fedavg.runtime().evaluate(fedavg.program, fedavg.start(), data.test, log)
    assert len(log.steps) == 1


def test_an_input_that_the_program_does_not_provide_is_named(fedavg: "Setting", data: DeviceData) -> None:
    lacking = msgspec.structs.replace(
        fedavg.program, tensors={name: spec for name, spec in fedavg.program.tensors.items() if name != "head.bias"}
    )
    start = {name: value for name, value in fedavg.start().items() if name != "head.bias"}
    with pytest.raises(BadPayload, match=r"tensor/head\.bias"):
        train(fedavg, data.train, lacking, start=start)
    with pytest.raises(BadPayload, match=r"tensor/head\.bias"):
        fedavg.runtime().evaluate(lacking, start, data.test, SILENT)


def test_a_masked_graph_without_a_mask_names_what_it_lacks(eftvit: "Setting", data: DeviceData) -> None:
    batch = msgspec.structs.replace(eftvit.program.batch, mask_ratio=0.0)
    with pytest.raises(BadPayload, match="batch/kept"):
        train(eftvit, data.train, msgspec.structs.replace(eftvit.program, batch=batch))


def test_a_graph_that_does_not_fit_the_batch_is_refused(fedavg: "Setting", data: DeviceData) -> None:
    batch = msgspec.structs.replace(fedavg.program.batch, batch_size=4)
    with pytest.raises(BadPayload, match="cannot run on this device"):
        train(fedavg, data.train, msgspec.structs.replace(fedavg.program, batch=batch))


@pytest.mark.parametrize("damage", ["cut", "nonsense", "missing"])
def test_a_damaged_graph_is_named(fedavg: "Setting", tmp_path: Path, damage: str) -> None:
    digest = fedavg.program.graphs["train"].digest
    content = fedavg.blobs.get(digest)
    path = tmp_path / "graph.onnx"
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"no graph at all")
    with pytest.raises(BadPayload, match=digest):
        Runtime(1).open(digest, path)


def test_graphs_of_programs_that_are_over_are_closed(fedavg: "Setting", eftvit: "Setting", data: DeviceData) -> None:
    runtime = fedavg.runtime()
    runtime.keep_only({fedavg.program.graphs["predict"].digest})
    assert runtime.evaluate(fedavg.program, fedavg.start(), data.test, SILENT).samples == 12
    with pytest.raises(KeyError):
        runtime.train(fedavg.program, fedavg.start(), data.train, SEEDS, 1.0, SILENT)
