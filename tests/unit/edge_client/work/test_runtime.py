"""A device's local work, on graphs that were really exported."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import onnxruntime
import pytest
from onnx import NodeProto, TensorProto, helper
from PIL import Image

from edge_client.work.batches import training_feeds
from edge_client.work.runtime import ModelTest, Runtime, Seeds, Stopped, Trained, Watch
from fedvit.data.folder import DeviceData, Split
from fedvit.data.images import normalise, unfold
from fedvit.errors import BadPayload, DataError
from fedvit.program import Batch, Draw, Evaluate, Gather, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train
from fedvit.tensors import Tensors
from tests.support.agents import SILENT, Log, always, assert_same_bits
from tests.support.codes import has_code
from tests.support.settings import Setting

SEEDS = Seeds(run=1, round=1, device="pi")


def train(setting: Setting, images: Split, program: Program | None = None, **changed: Any) -> Trained:
    """One round from the program's start values; `seeds`, `start`, `lr_scale` or `watch` as given."""
    given = {"start": setting.start(), "seeds": SEEDS, "lr_scale": 1.0, "watch": SILENT, **changed}
    return setting.runtime().train(program or setting.program, images=images, **given)


def with_phase(program: Program, **changed: Any) -> Program:
    [phase] = program.train
    return msgspec.structs.replace(program, train=(msgspec.structs.replace(phase, **changed),))


def some(data: DeviceData, tmp_path: Path, rows: Sequence[int], test_rows: Sequence[int] = ()) -> DeviceData:
    """A device that has only these training images, and these for tests."""
    for part, split, chosen in (("train", data.train, rows), ("test", data.test, test_rows)):
        (tmp_path / part).mkdir(exist_ok=True, parents=True)  # without a folder of tests some would be set apart
        for row in chosen:
            path = split.paths[row]
            folder = tmp_path / part / path.parent.name
            folder.mkdir(exist_ok=True)
            (folder / path.name).write_bytes(path.read_bytes())
    return DeviceData.open(tmp_path).relabel(data.classes)


def lose_pixels(folder: Path, name: str) -> None:
    """An image whose header is fine and whose pixels are gone."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(folder / name)
    (folder / name).write_bytes((folder / name).read_bytes()[:200])


def in_torch(setting: Setting, images: Split, steps: int, *, fresh_slots: bool) -> tuple[Tensors, float]:
    """Full-batch training of FedAvg's step in eager torch, without padding: (tensors, loss of the last step)."""
    import torch

    from fedvit.methods.step import whole_step

    plan, batch = setting.plan, setting.program.batch
    [phase] = setting.program.train
    step = whole_step(plan.method, plan.vit, phase)
    pictures, readable = images.load(np.arange(len(images)), batch.image_size)
    patches = unfold(normalise(pictures[readable], batch), batch.patch_size)
    inputs = {f"tensor/{name}": torch.tensor(value) for name, value in setting.start().items()}
    names = [name.removeprefix("tensor/") for name in inputs]
    zeros = {
        f"slot/{slot}/{name}": torch.zeros_like(inputs[f"tensor/{name}"]) for slot in phase.slots for name in names
    }
    inputs |= zeros
    inputs |= {
        "fact/class_counts": torch.bincount(torch.tensor(images.labels), minlength=3).float(),
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


def assert_moved_alike(setting: Setting, got: Tensors, want: Tensors) -> None:
    """Updates agree within 1e-3 of the largest update of their tensor, or 2 units in the last place of 1."""
    start = setting.start()
    assert got.keys() == want.keys()
    for name, value in want.items():
        update = np.abs(value - start[name]).max()
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-3 * update + 2.4e-7, err_msg=name)


# --- what training does -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "lr"), [("fedavg", 0.03), ("eftvit", 3e-4)])
def test_training_learns(settings: dict[str, Setting], data: DeviceData, method: str, lr: float) -> None:
    """Three classes: a guess costs ln 3 = 1.10. 120 epochs over 20 digits must explain at least a third of it."""
    setting = settings[method]
    first = train(setting, data.train, with_phase(setting.program, epochs=1, lr=lr))
    last = train(setting, data.train, with_phase(setting.program, epochs=120, lr=lr))
    assert 0.8 < first.loss < 1.4
    assert last.loss < 0.73


def test_local_and_head_move_and_the_global_part_does_not(eftvit: Setting, data: DeviceData) -> None:
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


def test_what_a_round_says_of_itself(fedavg: Setting, data: DeviceData, log: Log) -> None:
    """20 images in batches of 8: 3 steps an epoch, 6 in 2 epochs. The loss is the mean over the last epoch's 20."""
    trained = train(fedavg, data.train, watch=log)
    assert (trained.samples, trained.steps) == (20, 6)
    assert trained.flops == 6 * fedavg.program.graphs["train"].flops > 0
    assert [(done, total) for done, total, _ in log.steps] == [(step, 6) for step in range(1, 7)]
    losses = [loss for _, _, loss in log.steps[3:] if loss is not None]
    assert trained.loss == pytest.approx((8 * losses[0] + 8 * losses[1] + 4 * losses[2]) / 20)
    assert trained.step_s is not None
    assert trained.collected == {}


def test_features_are_collected_as_the_program_says(eftvit: Setting, data: DeviceData) -> None:
    """n_c = 8, 8, 4: the median is 8; 4 < 8 gives 8 of its 3 * 4. 16 patches, half kept, and the class token: 9."""
    collected = train(eftvit, data.train).collected
    assert collected["features.1"].shape == (24, 9, 32)
    assert collected["features.1"].dtype == np.float32
    assert np.bincount(collected["labels"]).tolist() == [8, 8, 8]
    assert collected["labels"].dtype == np.int64


# --- randomness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "eftvit"])
def test_run_round_and_device_decide_every_bit(settings: dict[str, Setting], data: DeviceData, method: str) -> None:
    first, again = (train(settings[method], data.train) for _ in range(2))
    assert first.loss == again.loss
    assert_same_bits(first.tensors, again.tensors)
    assert_same_bits(first.collected, again.collected)
    for other in (Seeds(2, 1, "pi"), Seeds(1, 2, "pi"), Seeds(1, 1, "pi2")):
        moved = train(settings[method], data.train, seeds=other).tensors["head.weight"]
        assert moved.tobytes() != first.tensors["head.weight"].tobytes()
    draws = [generator.random() for generator in SEEDS.generators(6)]
    assert len(set(draws)) == 6
    assert [generator.random() for generator in SEEDS.generators(2)] == draws[:2]


def test_masks_differ_between_epochs(eftvit: Setting, data: DeviceData) -> None:
    """With a learning rate of 1e-30 no weight moves, so only the mask can change a sample's features.

    n_c = 8, 8, 4, three epochs: the third class gives 8 of its 12; with 4 images, some image comes from at
    least two epochs. In 8 of 16 patches, drawn anew, all 8 features differ.
    """
    still = with_phase(eftvit.program, lr=1e-30)
    trained = train(eftvit, data.train, still)
    start = eftvit.start()
    assert max(float(np.abs(value - start[name]).max()) for name, value in trained.tensors.items()) < 1e-25
    features = trained.collected["features.1"][trained.collected["labels"] == 2]
    assert len(features) == 8
    assert len({feature.tobytes() for feature in features}) == 8
    plain = msgspec.structs.replace(eftvit.program.batch, mask_ratio=0.5)
    draw = np.random.default_rng(0)
    kept = [training_feeds(data.train, np.arange(8), plain, 8, draw, draw)[0]["batch/kept"] for _ in range(2)]
    assert (kept[0] != kept[1]).any()


# --- short batches and unreadable images --------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "rows", "broken", "runs"),
    [
        ("fedavg", [0, 1, 8, 9, 16], 0, 1),
        ("fedavg", [0, 8, 9, 16], 1, 1),
        ("fedavg in parts", [*range(8)], 0, 3),
        ("fedavg in parts", [0, 1, 8, 9, 16], 0, 2),
        ("fedavg in parts", [9], 0, 1),
    ],
)
def test_a_batch_is_as_exact_as_its_readable_images_alone(
    settings: dict[str, Setting], data: DeviceData, tmp_path: Path, method: str, rows: list[int], broken: int, runs: int
) -> None:
    """Two epochs with momentum in a batch of 8, whole or 3 at a time; torch takes the readable images at once.

    The cost of a step is that of the parts that have images.
    """
    setting = settings[method]
    for number in range(broken):
        lose_pixels(tmp_path / "train" / "1", f"broken{number}.png")
    images = some(data, tmp_path, rows).train
    assert len(images) == len(rows) + broken
    trained = train(setting, images)
    want, loss = in_torch(setting, images, steps=2, fresh_slots=False)
    assert (trained.steps, trained.samples) == (2, len(rows))
    assert trained.flops == 2 * runs * setting.program.graphs["train"].flops
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(setting, trained.tensors, want)


@pytest.mark.torch
def test_phases_follow_one_another_with_fresh_optimizer_state(
    fedavg: Setting, data: DeviceData, tmp_path: Path
) -> None:
    """Two phases of one step each: the second begins where the first ended, with zero momentum."""
    images = some(data, tmp_path, [0, 8, 16]).train
    [phase] = with_phase(fedavg.program, epochs=1).train
    trained = train(fedavg, images, msgspec.structs.replace(fedavg.program, train=(phase, phase)))
    want, loss = in_torch(fedavg, images, steps=2, fresh_slots=True)
    assert trained.steps == 2
    assert trained.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(fedavg, trained.tensors, want)


def test_nothing_but_unreadable_images_is_an_error(fedavg: Setting, tmp_path: Path) -> None:
    for name in ("0", "1", "2"):
        lose_pixels(tmp_path / "train" / name, "broken.png")
    with pytest.raises(DataError, check=has_code("FV1403", "3")):
        train(fedavg, DeviceData.open(tmp_path).train)


# --- evaluation ---------------------------------------------------------------------------------------


@pytest.mark.torch
def test_evaluation_counts_right_answers(fedavg: Setting, data: DeviceData, log: Log) -> None:
    """12 test images in batches of 8 and 4: as many right as torch says of the same tensors."""
    import torch

    from fedvit.methods.step import predict_step

    values = fedavg.start() | train(fedavg, data.train, with_phase(fedavg.program, epochs=3)).tensors
    batch = fedavg.program.batch
    pictures, _ = data.test.load(np.arange(12), batch.image_size)
    inputs = {f"tensor/{name}": torch.tensor(value) for name, value in values.items()}
    inputs["batch/patches"] = torch.tensor(unfold(normalise(pictures, batch), batch.patch_size))
    answers = predict_step(fedavg.plan.method, fedavg.plan.vit)(inputs)["logits"].argmax(dim=1).numpy()
    right = int((answers == data.test.labels).sum())
    assert 0 < right < 12, "else the comparison proves nothing"
    evaluated = fedavg.runtime().evaluate(ModelTest(fedavg.program, values, data, SEEDS), log)
    assert (evaluated.correct, evaluated.samples) == (right, 12)
    assert evaluated.flops == 2 * fedavg.program.graphs["predict"].flops
    assert log.steps == [(1, 2, None), (2, 2, None)]


def test_evaluation_takes_as_many_images_at_a_time_as_training(
    fedavg: Setting, parts: Setting, data: DeviceData, log: Log
) -> None:
    """12 test images in runs of 3 are as often right as in runs of 8."""
    values = fedavg.start() | train(fedavg, data.train, with_phase(fedavg.program, epochs=3)).tensors
    at_once = fedavg.runtime().evaluate(ModelTest(fedavg.program, values, data, SEEDS), SILENT)
    evaluated = parts.runtime().evaluate(ModelTest(parts.program, values, data, SEEDS), log)
    assert (evaluated.correct, evaluated.samples) == (at_once.correct, 12)
    assert evaluated.flops == 4 * parts.program.graphs["predict"].flops
    assert log.steps == [(number, 4, None) for number in (1, 2, 3, 4)]


def test_an_unreadable_test_image_is_neither_right_nor_wrong(fedavg: Setting, data: DeviceData, tmp_path: Path) -> None:
    lose_pixels(tmp_path / "test" / "0", "broken.png")
    (tmp_path / "test" / "1").mkdir()
    (tmp_path / "test" / "1" / "0.png").write_bytes(data.test.paths[4].read_bytes())
    device = some(data, tmp_path, [0])
    assert len(device.test) == 2
    right = {}
    for label in (0, 1, 2):  # a head that always gives one answer
        evaluated = fedavg.runtime().evaluate(ModelTest(fedavg.program, always(fedavg, label), device, SEEDS), SILENT)
        assert evaluated.samples == 1
        right[label] = evaluated.correct
    assert right == {0: 0, 1: 1, 2: 0}


def test_a_device_without_test_images_counts_nothing(fedavg: Setting, data: DeviceData, tmp_path: Path) -> None:
    device = some(data, tmp_path, [0])
    evaluated = fedavg.runtime().evaluate(ModelTest(fedavg.program, fedavg.start(), device, SEEDS), SILENT)
    assert (evaluated.correct, evaluated.samples, evaluated.flops) == (0, 0, 0)


# --- what a phase can ask for -------------------------------------------------------------------------
#
# A program with one tensor `w` of three numbers and graphs made by hand. A step adds lr * last to w once for each
# image of a class; the answer to every image is the class with the largest w; a look at an image is its mean value.

CLASSES = ("0", "1", "2")
TOY_LR = 0.5


class Spy(onnxruntime.InferenceSession):
    """A session that remembers what it was fed."""

    fed: ClassVar[list[dict[str, Any]]] = []

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        Spy.fed.append({name: np.array(value) for name, value in input_feed.items()})
        return super().run(output_names, input_feed, run_options)

    def io_binding(self) -> "SpiedBinding":
        return SpiedBinding(self)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        Spy.fed.append({name: np.copy(value) for name, value in iobinding.places.items()})
        super().run_with_iobinding(iobinding, run_options)


class SpiedBinding(onnxruntime.IOBinding):
    """Looks at the places in memory that inputs are read from."""

    def __init__(self, session: Spy) -> None:
        super().__init__(session)
        self.places: dict[str, Any] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        pointer = ctypes.cast(buffer_ptr, ctypes.POINTER(np.ctypeslib.as_ctypes_type(element_type)))
        self.places[name] = np.ctypeslib.as_array(pointer, tuple(shape))


class Toy:
    """A runtime with the graphs made by hand; `fed` is what each run of a graph was given."""

    def __init__(self, folder: Path, *, repeats: int = 1, **of_phase: Any) -> None:
        self.folder = folder
        self.runtime = Runtime(1)
        self.phase = Train(graph="train", groups=("model",), lr=TOY_LR, repeats=repeats, **of_phase)
        inputs = {
            "tensor/w": ("FLOAT", [3]),
            "batch/labels": ("INT64", [4]),
            "batch/weight": ("FLOAT", [4]),
            "hyper/lr": ("FLOAT", []),
            "hyper/step": ("FLOAT", []),
            "fact/class_counts": ("FLOAT", [3]),
            **({"hyper/last": ("FLOAT", [])} if repeats > 1 else {}),
            **{f"draw/{draw.name}": ("INT64", [draw.count]) for draw in self.phase.draws},
        }
        node = helper.make_node
        nodes = [
            node("OneHot", ["batch/labels", "three", "off_on"], ["ones"]),
            node("MatMul", ["batch/weight", "ones"], ["counts"]),
            node("Mul", ["counts", "hyper/lr"], ["scaled"]),
            node("Mul", ["scaled", "hyper/last" if repeats > 1 else "one"], ["step"]),
            node("Add", ["tensor/w", "step"], ["new/tensor/w"]),
            node("ReduceSum", ["batch/weight"], ["metric/loss"], keepdims=0),
        ]
        self.graphs = {
            "train": self._graph("train", inputs, nodes, ("new/tensor/w", "metric/loss")),
            "look": self._graph("look", PATCHES, [MEANS], ("collect/looks",)),
        }
        asked = {"tensor/w": ("FLOAT", [3]), **PATCHES}
        self.graphs["predict"] = self._graph("predict", asked, ANSWER, ("logits",))
        gathered = {
            "gathered/looks": ("FLOAT", [6, 1]),
            "gathered/labels": ("INT64", [6]),
            "gathered/weight": ("FLOAT", [6]),
        }
        self.graphs["predict from 6"] = self._graph("predict from 6", {**asked, **gathered}, ANSWER, ("logits",))

    def _graph(self, name: str, inputs: dict[str, Any], nodes: list[NodeProto], outputs: tuple[str, ...]) -> GraphSpec:
        graph = helper.make_graph(
            nodes,
            "by hand",
            [
                helper.make_tensor_value_info(key, getattr(TensorProto, kind), shape)
                for key, (kind, shape) in inputs.items()
            ],
            [helper.make_tensor_value_info(key, TensorProto.FLOAT, None) for key in outputs],
            [
                helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
                helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
                helper.make_tensor("three", TensorProto.INT64, [], [3]),
                helper.make_tensor("off_on", TensorProto.FLOAT, [2], [0.0, 1.0]),
                helper.make_tensor("last_axis", TensorProto.INT64, [1], [2]),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        path = self.folder / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        self.runtime.open(name, path)
        return GraphSpec(name, 10)

    def program(self, *phases: Train, evaluate: Evaluate | None = None, classes: tuple[str, ...] = CLASSES) -> Program:
        return Program(
            method="toy",
            model="made",
            classes=classes,
            groups={"model": TensorGroup(Role.SHARED)},
            tensors={"w": TensorSpec((3,), "float32", "model")},
            graphs=self.graphs,
            train=phases or (self.phase,),
            evaluate=evaluate or Evaluate(graph="predict"),
            batch=Batch(image_size=8, patch_size=8, batch_size=4, mean=(0.0,) * 3, std=(1.0,) * 3),
        )

    def train(self, images: Split, *phases: Train, w: Sequence[float] = (0, 0, 0), **changed: Any) -> Trained:
        Spy.fed.clear()
        given = {"seeds": SEEDS, "lr_scale": 1.0, "watch": SILENT, **changed}
        start = {"w": np.array(w, np.float32)}
        return self.runtime.train(self.program(*phases), start=start, images=images, **given)

    def evaluate(self, device: DeviceData, evaluate: Evaluate, w: Sequence[float] = (0, 0, 0), **changed: Any) -> Any:
        Spy.fed.clear()
        given = {"seeds": SEEDS, "watch": SILENT, **changed}
        values = {"w": np.array(w, np.float32)}
        test = ModelTest(self.program(evaluate=evaluate), values, device, given["seeds"])
        evaluated = self.runtime.evaluate(test, given["watch"])
        assert values["w"].tobytes() == np.array(w, np.float32).tobytes()
        return evaluated

    @property
    def fed(self) -> list[dict[str, Any]]:
        return Spy.fed

    def list_values(self, name: str) -> list[float]:
        """An input's numbers in all runs that read it."""
        return [float(feeds[name]) for feeds in Spy.fed if name in feeds]


PATCHES = {"batch/patches": ("FLOAT", [4, 1, 192])}
MEANS = helper.make_node("ReduceMean", ["batch/patches", "last_axis"], ["collect/looks"], keepdims=0)
ANSWER = [
    helper.make_node("ReduceMean", ["batch/patches", "last_axis"], ["looks"], keepdims=0),
    helper.make_node("Mul", ["looks", "zero"], ["nothing"]),
    helper.make_node("Add", ["nothing", "tensor/w"], ["logits"]),
]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", Spy)
    monkeypatch.setattr(Spy, "fed", [])


@pytest.fixture
def make_toy(spied: None, tmp_path: Path) -> Callable[..., Toy]:
    return lambda **of_phase: Toy(tmp_path, **of_phase)


@pytest.fixture
def device(data: DeviceData, tmp_path: Path) -> DeviceData:
    """3, 3 and 4 training images of the classes (batches of 4, 4 and 2); 1, 2 and 3 for tests."""
    return some(data, tmp_path, [0, 1, 8, 9, 10, 16, 17, 18, 19, 7], [0, 4, 5, 8, 9, 10]).relabel(CLASSES)


def test_a_step_made_by_hand(device: DeviceData, make_toy: Callable[..., Toy]) -> None:
    """Classes have 3, 3 and 4 images; two epochs at a rate of 0.5 and half of it: w = 0.5 * 0.5 * 2 * (3, 3, 4)."""
    counts = np.bincount(device.train.labels, minlength=3)
    assert counts.tolist() == [3, 3, 4]
    trained = make_toy(epochs=2).train(device.train, lr_scale=0.5)
    np.testing.assert_allclose(trained.tensors["w"], 0.5 * counts)
    assert (trained.steps, trained.flops, trained.samples) == (6, 60, 10)
    assert trained.loss == pytest.approx((16 + 16 + 4) / 10)  # the loss of a batch is its number of images


@pytest.mark.parametrize(("steps", "taken", "images"), [(1, 1, 4), (3, 3, 10), (4, 4, 14), (5, 5, 18), (99, 6, 20)])
def test_a_phase_ends_after_its_steps(
    device: DeviceData, make_toy: Callable[..., Toy], log: Log, steps: int, taken: int, images: int
) -> None:
    """Two epochs have six batches, of 4, 4 and 2 images twice; each image adds 0.5 to w. Progress counts to what is
    to be done. However few images it came to: the device has ten, and the server weighs it by them."""
    trained = make_toy(epochs=2, steps=steps).train(device.train, watch=log)
    assert trained.steps == taken
    assert (trained.flops, trained.samples) == (10 * taken, 10)
    assert trained.tensors["w"].sum() == pytest.approx(0.5 * images)
    assert [(done, total) for done, total, _ in log.steps] == [(number, taken) for number in range(1, taken + 1)]


def test_a_short_phase_after_a_long_one(device: DeviceData, make_toy: Callable[..., Toy], log: Log) -> None:
    """Three batches, then one more; the images that it did not come to count as the device's all the same."""
    toy = make_toy()
    trained = toy.train(device.train, toy.phase, msgspec.structs.replace(toy.phase, steps=1), watch=log)
    assert (trained.steps, trained.samples, len(log.steps)) == (4, 10, 4)
    assert toy.list_values("hyper/step") == [1, 2, 3, 1]
    assert log.steps[-1][:2] == (4, 4)


def test_each_batch_is_repeated_and_the_last_repeat_is_marked(
    device: DeviceData, make_toy: Callable[..., Toy], log: Log
) -> None:
    """Three batches, each three times: the same images, steps go on counting, last is 1 in every third only, and w
    moves only then. A report after each batch."""
    toy = make_toy(repeats=3)
    trained = toy.train(device.train, watch=log)
    assert toy.list_values("hyper/last") == [0, 0, 1] * 3
    assert toy.list_values("hyper/step") == list(range(1, 10))
    for first in (0, 3, 6):
        batch = [feeds["batch/labels"].tolist() for feeds in toy.fed[first : first + 3]]
        assert batch[0] == batch[1] == batch[2]
    np.testing.assert_allclose(trained.tensors["w"], 0.5 * np.array([3, 3, 4]))
    assert (trained.steps, trained.flops, trained.samples) == (9, 90, 10)
    assert [(done, total) for done, total, _ in log.steps] == [(3, 9), (6, 9), (9, 9)]
    assert toy.train(device.train, msgspec.structs.replace(toy.phase, epochs=2, steps=4)).steps == 4 * 3


def test_a_phase_knows_how_many_images_of_each_class_there_are(
    device: DeviceData, data: DeviceData, tmp_path: Path, make_toy: Callable[..., Toy]
) -> None:
    """Under the run's classes: in their order, and with 0 for a class that the device does not have."""
    toy = make_toy()
    toy.train(device.train)
    assert [feeds["fact/class_counts"].tolist() for feeds in toy.fed] == [[3, 3, 4]] * 3
    toy.train(device.relabel(("2", "0", "1")).train)
    assert [feeds["fact/class_counts"].tolist() for feeds in toy.fed] == [[4, 3, 3]] * 3
    assert toy.fed[0]["fact/class_counts"].dtype == np.float32
    toy.train(some(data, tmp_path / "few", [0, 1]).train)
    assert toy.fed[0]["fact/class_counts"].tolist() == [2, 0, 0]


UP = Draw(name="up", low=3, high=9, count=40, ascending=True)
ANY = Draw(name="any", low=-2, high=2, count=40)


def list_draws(toy: Toy, images: Split, *phases: Train, seeds: Seeds = SEEDS) -> list[tuple[list[int], list[int]]]:
    """What was drawn for each step."""
    toy.train(images, *phases, seeds=seeds)
    return [(feeds["draw/up"].tolist(), feeds["draw/any"].tolist()) for feeds in toy.fed]


def test_numbers_are_drawn_once_per_task_and_phase(device: DeviceData, make_toy: Callable[..., Toy]) -> None:
    """40 of each: with replacement, from low to high - 1, all of which turn up; one kind ascends. Equal in all steps of
    a phase, other numbers in the next phase."""
    toy = make_toy(draws=(UP, ANY))
    first, *others, after, _, _ = list_draws(toy, device.train, toy.phase, toy.phase)
    assert others == [first] * 2
    up, either = first
    assert (sorted(set(up)), sorted(set(either))) == ([3, 4, 5, 6, 7, 8], [-2, -1, 0, 1])
    assert (len(up), len(either)) == (40, 40)
    assert up == sorted(up)
    assert either != sorted(either)
    assert after != first
    assert toy.fed[0]["draw/up"].dtype == toy.fed[0]["draw/any"].dtype == np.int64


def test_numbers_do_not_shift_the_order_of_the_images(device: DeviceData, make_toy: Callable[..., Toy]) -> None:
    plain, drawing = make_toy(), make_toy(draws=(UP, ANY))
    plain.train(device.train)
    orders = [[feeds["batch/labels"].tolist() for feeds in plain.fed]]
    drawing.train(device.train)
    orders.append([feeds["batch/labels"].tolist() for feeds in drawing.fed])
    assert orders[0] == orders[1]


# --- evaluation on a copy that was tuned --------------------------------------------------------------


def test_a_copy_is_tuned_before_it_is_tested(device: DeviceData, make_toy: Callable[..., Toy], log: Log) -> None:
    """From (2, 0, 0) every answer is class 0: 1 of 6 right. Two epochs at 0.5 add 3, 3 and 4: (5, 3, 4). Twice that:
    (8, 6, 8) and then (14, 12, 16), class 2: 3 of 6 right. `w` itself stays (Toy.evaluate looks)."""
    toy = make_toy()
    plain = Evaluate(graph="predict")
    twice = msgspec.structs.replace(toy.phase, epochs=2)
    start = (2.0, 0.0, 0.0)
    assert toy.evaluate(device, plain, start).correct == 1
    once = toy.evaluate(device, msgspec.structs.replace(plain, adapt=(twice,)), start, watch=log)
    assert once.flops == 10 * (2 * 3 + 2), "its steps, and two batches of answers"
    assert log.steps == [(1, 2, None), (2, 2, None)], "progress counts the answers alone"
    assert (once.correct, toy.fed[-1]["tensor/w"].tolist()) == (1, [5, 3, 4])
    more = toy.evaluate(device, msgspec.structs.replace(plain, adapt=(twice,) * 4), start)
    assert toy.fed[-1]["tensor/w"].tolist() == [14, 12, 16]
    assert (more.correct, more.samples) == (3, 6)
    assert toy.evaluate(device, plain, start).correct == 1


@pytest.mark.parametrize(("gathers", "runs"), [(False, 2), (True, 1)])
def test_preparation_of_an_evaluation_can_be_stopped(
    device: DeviceData, make_toy: Callable[..., Toy], gathers: bool, runs: int
) -> None:
    toy = make_toy()
    evaluate = LOOK if gathers else Evaluate(graph="predict", adapt=(toy.phase,))
    with pytest.raises(Stopped):
        toy.evaluate(device, evaluate, watch=Watch(lambda *step: None, lambda: len(toy.fed) == runs))
    assert len(toy.fed) == runs


def test_tuning_is_the_training_of_the_same_round(spied: None, fedavg: Setting, data: DeviceData) -> None:
    """On a real model: as if one trained the phase, and then tested what came of it; bit by bit."""
    [phase] = with_phase(fedavg.program, epochs=3).train
    start = fedavg.start()
    before = {name: value.tobytes() for name, value in start.items()}
    runtime = fedavg.runtime()
    tuning = msgspec.structs.replace(fedavg.program, evaluate=Evaluate(graph="predict", adapt=(phase,)))
    tuned = runtime.evaluate(ModelTest(tuning, start, data, SEEDS), SILENT)
    used = {name.removeprefix("tensor/"): value for name, value in Spy.fed[-1].items() if name.startswith("tensor/")}
    trained = train(fedavg, data.train, with_phase(fedavg.program, epochs=3))
    by_hand = runtime.evaluate(ModelTest(fedavg.program, {**start, **trained.tensors}, data, SEEDS), SILENT)
    assert (tuned.correct, tuned.samples) == (by_hand.correct, by_hand.samples)
    assert tuned.correct > runtime.evaluate(ModelTest(fedavg.program, start, data, SEEDS), SILENT).correct
    assert used.keys() == start.keys()
    assert {name: value.tobytes() for name, value in used.items()} == {
        name: trained.tensors.get(name, start[name]).tobytes() for name in start
    }
    assert {name: value.tobytes() for name, value in start.items()} == before


# --- evaluation with what the device's images look like -----------------------------------------------


def looks(images: Split) -> list[float]:
    """The mean value of each image, as the graph sees it."""
    pictures, _ = images.load(np.arange(len(images)), 8)
    batch = Batch(image_size=8, patch_size=8, batch_size=4, mean=(0.0,) * 3, std=(1.0,) * 3)
    return [float(value) for value in unfold(normalise(pictures, batch), 8).mean(axis=(1, 2))]


LOOK = Evaluate(graph="predict from 6", gather=Gather(graph="look", output="looks", shape=(1,), capacity=6))


def test_all_images_are_gathered_where_there_is_room(
    data: DeviceData, tmp_path: Path, make_toy: Callable[..., Toy]
) -> None:
    """Four images for six places: in their order, with their labels; the last two places are empty."""
    few = some(data, tmp_path, [0, 9, 16, 17], [0, 4])
    toy = make_toy()
    evaluated = toy.evaluate(few, LOOK)
    answered = toy.fed[-1]
    np.testing.assert_allclose(answered["gathered/looks"][:, 0], [*looks(few.train), 0, 0], rtol=1e-5)
    assert answered["gathered/labels"].tolist() == [0, 1, 2, 2, 0, 0]
    assert answered["gathered/weight"].tolist() == [1, 1, 1, 1, 0, 0]
    assert [answered[f"gathered/{name}"].dtype for name in ("looks", "labels", "weight")] == [
        np.float32, np.int64, np.float32,
    ]  # fmt: skip
    assert (evaluated.samples, evaluated.flops) == (2, 10 + 10)


def list_gathered(toy: Toy, device: DeviceData, round: int = 1) -> list[int]:
    """The rows that were gathered, by their looks; their labels are right, and no place is empty."""
    toy.evaluate(device, LOOK, seeds=Seeds(1, round, "pi"))
    answered, mine = toy.fed[-1], np.array(looks(device.train))
    rows = [int(np.abs(mine - value).argmin()) for value in answered["gathered/looks"][:, 0]]
    np.testing.assert_allclose(mine[rows], answered["gathered/looks"][:, 0], rtol=1e-5)
    assert answered["gathered/labels"].tolist() == device.train.labels[rows].tolist()
    assert answered["gathered/weight"].tolist() == [1] * 6
    return rows


def test_of_more_images_a_random_choice_is_gathered(data: DeviceData, make_toy: Callable[..., Toy]) -> None:
    """Six of twenty, none twice, in their order; every image has its turn in one of 40 rounds, and the same round
    chooses the same."""
    assert len(set(looks(data.train))) == 20
    toy = make_toy()
    choices = [list_gathered(toy, data, number) for number in range(1, 41)]
    assert all(rows == sorted(set(rows)) for rows in choices)
    assert {row for rows in choices for row in rows} == set(range(20))
    assert list_gathered(toy, data, 1) == choices[0]


def test_an_unreadable_image_is_gathered_with_no_weight(
    data: DeviceData, tmp_path: Path, make_toy: Callable[..., Toy]
) -> None:
    lose_pixels(tmp_path / "train" / "1", "broken.png")
    toy = make_toy()
    toy.evaluate(some(data, tmp_path, [0, 9, 16], [0]), LOOK)
    answered = toy.fed[-1]
    assert answered["gathered/labels"].tolist() == [0, 1, 1, 2, 0, 0]
    weight = answered["gathered/weight"].tolist()
    assert weight in ([1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0])


def test_what_is_gathered_sees_what_was_tuned(device: DeviceData, make_toy: Callable[..., Toy]) -> None:
    """First the copy is tuned, then the device's images are looked at, then answers are given."""
    toy = make_toy()
    toy.evaluate(device, msgspec.structs.replace(LOOK, adapt=(toy.phase,)))
    kinds = ["train" if "batch/labels" in feeds else "predict" if "tensor/w" in feeds else "look" for feeds in toy.fed]
    assert kinds == ["train"] * 3 + ["look"] * 2 + ["predict"] * 2
    assert toy.fed[-1]["tensor/w"].tolist() == [1.5, 1.5, 2]


# --- stopping and errors ------------------------------------------------------------------------------


def test_a_task_that_ends_early_leaves_no_thread(fedavg: Setting, data: DeviceData, log: Log) -> None:
    """Stopped between two steps; and after its last step, before its epochs are over."""
    log.stopped = lambda: len(log.steps) == 2
    with pytest.raises(Stopped):
        train(fedavg, data.train, watch=log)
    assert len(log.steps) == 2
    assert [thread for thread in threading.enumerate() if thread.name == "batches"] == []
    assert train(fedavg, data.train, with_phase(fedavg.program, epochs=50, steps=2)).steps == 2
    assert [thread for thread in threading.enumerate() if thread.name == "batches"] == []


def test_evaluation_stops_between_two_batches(fedavg: Setting, data: DeviceData, log: Log) -> None:
    log.stopped = lambda: len(log.steps) == 1
    with pytest.raises(Stopped):
        fedavg.runtime().evaluate(ModelTest(fedavg.program, fedavg.start(), data, SEEDS), log)
    assert len(log.steps) == 1


def test_an_input_that_the_program_does_not_provide_is_named(fedavg: Setting, data: DeviceData) -> None:
    lacking = msgspec.structs.replace(
        fedavg.program, tensors={name: spec for name, spec in fedavg.program.tensors.items() if name != "head.bias"}
    )
    start = {name: value for name, value in fedavg.start().items() if name != "head.bias"}
    with pytest.raises(BadPayload, check=has_code("FV2310", "tensor/head.bias")):
        fedavg.runtime().evaluate(ModelTest(lacking, start, data, SEEDS), SILENT)


@pytest.mark.parametrize("damage", ["cut", "nonsense", "missing"])
def test_a_damaged_graph_is_named(fedavg: Setting, tmp_path: Path, damage: str) -> None:
    digest = fedavg.program.graphs["train"].digest
    content = fedavg.blobs.get(digest)
    path = tmp_path / "graph.onnx"
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"no graph at all")
    with pytest.raises(BadPayload, check=has_code("FV1418", digest)):
        Runtime(1).open(digest, path)


def test_graphs_of_programs_that_are_over_are_closed(fedavg: Setting, eftvit: Setting, data: DeviceData) -> None:
    runtime = fedavg.runtime()
    runtime.keep_only({fedavg.program.graphs["predict"].digest})
    assert runtime.evaluate(ModelTest(fedavg.program, fedavg.start(), data, SEEDS), SILENT).samples == 12
    with pytest.raises(KeyError):
        runtime.train(fedavg.program, fedavg.start(), data.train, SEEDS, 1.0, SILENT)
