"""What may enter, and what is said to everything else."""

import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.validation import (
    MIN_FREE_BYTES,
    check_free_space,
    check_hello,
    check_labels,
    check_new_classes,
    check_result,
    check_upload,
    largest_upload_bytes,
)
from fedvit.errors import BadPayload, PeerRefused
from fedvit.label_forms import LabelForm
from fedvit.program import Batch, Collect, Evaluate, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, pack
from fedvit.updates import make_codec
from fedvit.wire.messages import ClassCount, Manifest, Result
from tests.support.codes import has_code
from tests.support.devices import hello

CLASSES = ("ant", "bee", "cow")
DIGEST = "blake3:" + "5" * 64
WHAT = "result of pi for round 2"

HALF = (0.5, 0.5, 0.5)
AVERAGED = Program(
    method="fedper",
    model="made",
    classes=CLASSES,
    groups={
        "body": TensorGroup(Role.SHARED),
        "head": TensorGroup(Role.LOCAL, DIGEST),
        "base": TensorGroup(Role.FROZEN, DIGEST),
    },
    tensors={
        "a": TensorSpec((2, 3), "float32", "body"),
        "b": TensorSpec((4,), "float32", "body"),
        "h": TensorSpec((3,), "float32", "head"),
        "f": TensorSpec((5,), "float32", "base"),
    },
    graphs={"train": GraphSpec(DIGEST, 1), "predict": GraphSpec(DIGEST, 1)},
    train=(Train(graph="train", groups=("body", "head"), epochs=2, lr=0.1),),
    evaluate=Evaluate(graph="predict"),
    batch=Batch(image_size=8, patch_size=4, batch_size=2, mean=HALF, std=HALF),
)
"""`a` and `b` go up, `h` stays."""
COLLECTED = msgspec.structs.replace(
    AVERAGED,
    groups={
        "body": TensorGroup(Role.LOCAL, DIGEST),
        "head": TensorGroup(Role.SEEDED),
        "base": TensorGroup(Role.GLOBAL),
    },
    train=(Train(graph="train", groups=("body",), epochs=5, lr=0.1, collect=Collect("features", (2, 8))),),
)
"""Only features (n, 2, 8) and labels (n,) go up."""


def result(**changed: Any) -> Result:
    trained = Result("run", 2, "train", 20, {"loss": 0.5}, ResourceUse(), Manifest(DIGEST, 100, 126_976))
    return msgspec.structs.replace(trained, **changed)


def evaluated(**changed: Any) -> Result:
    return result(**{"kind": "evaluate", "samples": 5, "metrics": {"correct": 4.0}, "upload": None, **changed})


def deltas(**changed: Any) -> Tensors:
    good: Tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    return {name: value for name, value in (good | changed).items() if value is not None}


def features(labels: list[int], /, **changed: Any) -> Tensors:
    good: Tensors = {
        "features": np.ones((len(labels), 2, 8), np.float32),
        "labels": np.array(labels, np.int64),
    }
    return {name: value for name, value in (good | changed).items() if value is not None}


# --- hellos -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "classes", [(), ("ant", "bee"), CLASSES, ("cow", "bee", "ant", "dog")], ids=["first", "same", "more", "many"]
)
def test_a_device_with_known_classes_may_join(classes: tuple[str, ...]) -> None:
    """Before the first round the run has no classes: then every device may."""
    check_hello(hello(), classes)


def test_classes_of_a_hello_are_checked() -> None:
    check_hello(hello(test_samples=0), CLASSES)
    with pytest.raises(PeerRefused) as refused:
        check_hello(hello(classes=("ant", "wasp", "zebra")), CLASSES)
    assert str(refused.value) == "its class folders 'wasp', 'zebra' are not among this run's 3 classes: ant, bee, cow"
    with pytest.raises(PeerRefused, check=has_code("FV1404")):
        check_hello(hello(classes=("ant", "wasp")), CLASSES)


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a\nb", "\0", "a\u202eb"])
def test_class_with_unprintable_name_is_refused(name: str) -> None:
    with pytest.raises(PeerRefused) as refused:
        check_new_classes(hello(classes=("ant", name)), [], 10)
    assert repr(name) in str(refused.value)
    assert str(refused.value).isprintable()


def test_many_classes_and_missing_images_are_refused() -> None:
    check_new_classes(hello(classes=("ant", "bee")), ["bee", "cow"], 3)
    with pytest.raises(PeerRefused, check=has_code("FV1406")):
        check_new_classes(hello(classes=("ant", "bee")), ["bee", "cow"], 2)
    with pytest.raises(PeerRefused, check=has_code("FV1404")):
        check_hello(hello(), tuple(map(str, range(100))))
    with pytest.raises(PeerRefused, check=has_code("FV1407")):
        check_hello(hello(train_samples=0), CLASSES)


# --- results, by their message ------------------------------------------------------------------------


def test_good_results_are_taken() -> None:
    check_result(result(), AVERAGED, hello())
    check_result(result(), COLLECTED, hello())
    check_result(result(samples=1), AVERAGED, hello())
    check_result(result(use=ResourceUse(steps=20)), AVERAGED, hello())
    check_result(evaluated(), AVERAGED, hello())
    check_result(evaluated(), COLLECTED, hello())
    check_result(msgspec.structs.replace(evaluated(), samples=0, metrics={"correct": 0.0}), AVERAGED, hello())


def test_each_image_that_cannot_be_decoded_may_cost_a_step_of_each_epoch() -> None:
    check_result(result(samples=18, use=ResourceUse(steps=16)), AVERAGED, hello())
    with pytest.raises(BadPayload, match="it reports 15 steps, its images take 16 to 20"):
        check_result(result(samples=18, use=ResourceUse(steps=15)), AVERAGED, hello())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"samples": 21}, "it reports 21 samples, the device announced 20"),
        ({"use": ResourceUse(steps=51)}, "it reports 51 steps, its images take "),
        ({"use": ResourceUse(steps=1)}, "it reports 1 steps, its images take "),
        ({"samples": -1}, "it reports -1 samples, the device announced 20"),
        ({"metrics": {"loss": float("nan")}}, "metric 'loss' is nan"),
        ({"metrics": {"loss": 0.5, "extra": float("inf")}}, "metric 'extra' is inf"),
        ({"metrics": {"loss": 1e308}}, r"metric 'loss' is 1e\+308"),
        ({"upload": None}, "the upload is missing"),
        ({"upload": Manifest("nonsense", 100, 1024)}, "'nonsense' is not a blake3 digest"),
        ({"upload": Manifest("blake3:../../../../etc/passwd", 100, 1024)}, "is not a blake3 digest"),
        ({"upload": Manifest("sha256:" + "5" * 64, 100, 1024)}, "is not a blake3 digest"),
        ({"upload": Manifest(DIGEST + "\n", 100, 1024)}, "is not a blake3 digest"),
    ],
)
@pytest.mark.parametrize("program", [AVERAGED, COLLECTED], ids=["averaged", "collected"])
def test_a_training_result_that_cannot_be_is_refused(program: Program, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(BadPayload, match=named):
        check_result(result(**changed), program, hello())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"samples": 6}, "it reports 6 samples, the device announced 5"),
        ({"metrics": {"correct": 6.0}}, "it reports 6.0 correct answers of 5"),
        ({"metrics": {"correct": -1.0}}, "it reports -1.0 correct answers of 5"),
        ({"metrics": {}}, "it reports None correct answers of 5"),
        ({"metrics": {"correct": float("nan")}}, "metric 'correct' is nan"),
        (
            {"by_class": (ClassCount(0, 3, 3), ClassCount(1, 1, 1))},
            "4 correct answers of 4, it reports 4 .* of 5",
        ),
        ({"by_class": (ClassCount(0, 5, 4), ClassCount(1, 0, 1))}, "more correct answers than images"),
        ({"by_class": (ClassCount(1, 2, 3), ClassCount(0, 2, 2))}, "of different classes below 3, in order"),
        ({"by_class": (ClassCount(0, 2, 3), ClassCount(3, 2, 2))}, "of different classes below 3, in order"),
        (
            {"by_class": (ClassCount(0, 2, 3, ((0, 1),)), ClassCount(2, 2, 2))},
            "the wrong answers of a class must be different classes below 3, in order",
        ),
        (
            {"by_class": (ClassCount(0, 1, 3, ((2, 1), (1, 1))), ClassCount(2, 2, 2))},
            "the wrong answers of a class must be different classes below 3, in order",
        ),
        (
            {"by_class": (ClassCount(0, 2, 3, ((1, 2),)), ClassCount(2, 2, 2))},
            "a class has 1 wrong answers, 2 are listed",
        ),
        ({"upload": Manifest(DIGEST, 100, 1024)}, "the evaluate result has an upload of 100 bytes, expected is none"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(BadPayload, match=named):
        check_result(msgspec.structs.replace(evaluated(), **changed), AVERAGED, hello())


def test_counts_by_class_belong_to_an_evaluation() -> None:
    check_result(evaluated(by_class=(ClassCount(0, 2, 3), ClassCount(2, 2, 2))), AVERAGED, hello())
    check_result(evaluated(by_class=(ClassCount(0, 2, 3, ((1, 1),)), ClassCount(2, 2, 2))), AVERAGED, hello())
    with pytest.raises(BadPayload, check=has_code("FV1505")):
        check_result(result(by_class=(ClassCount(0, 2, 3),)), AVERAGED, hello())


def of_task(form: LabelForm, classes: tuple[str, ...] = CLASSES) -> Program:
    batch = msgspec.structs.replace(AVERAGED.batch, labels=form)
    return msgspec.structs.replace(AVERAGED, batch=batch, classes=classes)


SETS, NUMBERS = LabelForm(task="multi_label"), LabelForm(task="regression", low=0.0, high=1.0)
PATCHES = LabelForm(task="segmentation")


def test_images_may_have_several_classes_in_a_multi_label_task() -> None:
    scores = ((3, 0, 1), (20, 4, 0))
    counts = (ClassCount(0, 4, 4, (), scores), ClassCount(1, 3, 5))
    check_result(evaluated(by_class=counts), of_task(SETS), hello())
    with pytest.raises(BadPayload, check=has_code("FV1505")):
        check_result(evaluated(by_class=counts), AVERAGED, hello())


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (ClassCount(0, 4, 6), "more images than the 5"),
        (ClassCount(0, 4, 4, (), ((3, 4, 2),)), "scores of 4 and 2 images"),
        (ClassCount(0, 4, 4, (), ((20, 4, 0), (3, 0, 1))), "in different bins"),
        (ClassCount(0, 4, 4, (), ((32, 4, 1),)), "in different bins"),
        (ClassCount(0, 3, 4, ((999, 1),)), "wrong answers of a class"),
    ],
)
def test_scores_that_cannot_be_are_refused(count: ClassCount, named: str) -> None:
    with pytest.raises(BadPayload, check=has_code("FV1505", named)):
        check_result(evaluated(by_class=(count,)), of_task(SETS), hello())


SUMS = {"absolute_error": 0.5, "squared_error": 0.2, "number": -3.0, "squared_number": 4.0}


@pytest.mark.parametrize("kept", [set(), {"number", "squared_number"}])
def test_a_regression_has_sums_of_errors(kept: set[str]) -> None:
    metrics = {"correct": 4.0} | {name: value for name, value in SUMS.items() if name not in kept}
    check_result(msgspec.structs.replace(evaluated(), metrics=metrics), of_task(NUMBERS, ("height",)), hello())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"absolute_error": -0.5}, "absolute_error is -0.5"),
        ({"squared_number": -0.5}, "squared_number is -0.5"),
        ({"squared_error": None}, "has the sums absolute_error, number, squared_number"),
        ({"number": None}, "has the sums absolute_error, squared_error, squared_number"),
        (dict.fromkeys(SUMS), "has the sums -"),
        ({"number": 1e200}, "metric 'number' is 1e+200"),
        ({"absolute_error": 1e308}, "metric 'absolute_error' is 1e+308"),
    ],
)
def test_sums_that_cannot_be_added_up_are_refused(changed: dict[str, float | None], named: str) -> None:
    metrics = {name: value for name, value in ({"correct": 4.0} | SUMS | changed).items() if value is not None}
    with pytest.raises(BadPayload, check=has_code("FV1505", named)):
        check_result(msgspec.structs.replace(evaluated(), metrics=metrics), of_task(NUMBERS, ("height",)), hello())


def test_other_tasks_have_no_sums_of_errors_and_a_regression_no_counts_by_class() -> None:
    metrics = {"correct": 4.0} | SUMS
    for program in (AVERAGED, of_task(SETS)):
        with pytest.raises(BadPayload, check=has_code("FV1505", "has the sums absolute_error")):
            check_result(evaluated(metrics=metrics), program, hello())
        with pytest.raises(BadPayload, check=has_code("FV1505", "has the sums patches")):
            check_result(evaluated(metrics={"correct": 4.0, "patches": 5.0}), program, hello())
    counted = msgspec.structs.replace(evaluated(by_class=(ClassCount(0, 4, 5),)), metrics=metrics)
    with pytest.raises(BadPayload, check=has_code("FV1505", "counts of 1 classes")):
        check_result(counted, of_task(NUMBERS, ("height",)), hello())


@pytest.mark.parametrize(
    ("form", "classes", "labels", "named"),
    [
        (SETS, CLASSES, [[1, 0, 1], [0, 0, 0]], None),
        (SETS, CLASSES, [[1, 0, 2], [0, 0, 0]], "labels other than 0 and 1"),
        (SETS, CLASSES, [[1, 0, 1]], "2 rows of 'features' for 1 labels"),
        (NUMBERS, ("height",), [[0.5], [-3.0]], None),
        (NUMBERS, ("height",), [[0.5], [1e7]], "half ranges"),
        (NUMBERS, ("height",), [[0.5], [np.nan]], "NaN or infinite"),
    ],
)
def test_labels_of_features_are_those_of_the_task(
    form: LabelForm, classes: tuple[str, ...], labels: list[list[float]], named: str | None
) -> None:
    program = msgspec.structs.replace(COLLECTED, batch=of_task(form).batch, classes=classes)
    upload = pack(features([0, 0], labels=np.array(labels, np.float32)))
    if named is None:
        check_upload(upload, program, WHAT)
        return
    with pytest.raises(BadPayload, match=named):
        check_upload(upload, program, WHAT)


def test_counts_by_class_that_a_program_keeps_on_devices_are_refused() -> None:
    evaluate = msgspec.structs.replace(AVERAGED.evaluate, counts_classes=False)
    kept = msgspec.structs.replace(AVERAGED, evaluate=evaluate)
    check_result(evaluated(), kept, hello())
    with pytest.raises(BadPayload, check=has_code("FV1505")):
        check_result(evaluated(by_class=(ClassCount(0, 2, 3), ClassCount(2, 2, 2))), kept, hello())


def test_unexpected_upload_is_refused() -> None:
    """Everything is local: a device that trains for itself alone has nothing to send."""
    alone = msgspec.structs.replace(
        AVERAGED, groups=dict.fromkeys(("body", "head", "base"), TensorGroup(Role.LOCAL, DIGEST))
    )
    check_result(result(upload=None), alone, hello())
    with pytest.raises(BadPayload, check=has_code("FV1505")):
        check_result(result(), alone, hello())


def test_the_largest_upload_fits_every_honest_one() -> None:
    # the largest upload of deltas: a and b hold 6 + 4 float32: 40 bytes, and 64 KiB for names and shapes
    assert largest_upload_bytes(AVERAGED, 20) == 40 + 65_536
    limit = 40 + 65_536
    check_result(result(upload=Manifest(DIGEST, limit, 1024)), AVERAGED, hello())
    with pytest.raises(BadPayload, match=f"an upload of {limit + 1} bytes, this program allows at most {limit}"):
        check_result(result(upload=Manifest(DIGEST, limit + 1, 1024)), AVERAGED, hello())
    # the largest upload of features: 20 images in 5 epochs: at most 100 rows of 16 float32 and one int64, 100 * (64
    # + 8) bytes, and 64 KiB
    assert largest_upload_bytes(COLLECTED, 20) == 7200 + 65_536
    # an honest upload is never too large: As large as the rules allow, packed as a device packs it
    assert len(pack(features([0] * 100))) <= largest_upload_bytes(COLLECTED, 20)
    assert len(pack(deltas())) <= largest_upload_bytes(AVERAGED, 20)


# --- uploads, by their content ------------------------------------------------------------------------


def check_packed(content: bytes, program: Program, what: str) -> Tensors:
    """As a coordinator checks an upload that has arrived."""
    handle, name = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return check_upload(Path(name), program, what)
    finally:
        os.unlink(name)  # a mapped file is read after that, too


def test_good_uploads_come_out_as_they_went_in() -> None:
    for program, tensors in ((AVERAGED, deltas()), (COLLECTED, features([0, 2, 1])), (COLLECTED, features([]))):
        got = check_packed(pack(tensors), program, WHAT)
        assert got.keys() == tensors.keys()
        for name, value in tensors.items():
            np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"a": np.array([[1, 2, 3], [4, np.nan, 6]], np.float32)}, "'a' holds 1 values that are NaN or infinite"),
        ({"b": np.array([0, np.inf, -np.inf, 0], np.float32)}, "'b' holds 2 values that are NaN or infinite"),
        ({"a": np.ones((3, 2), np.float32)}, r"'a' has shape \(3, 2\), expected \(2, 3\)"),
        ({"a": np.ones((2, 3, 1), np.float32)}, r"'a' has shape \(2, 3, 1\), expected \(2, 3\)"),
        ({"b": np.ones(0, np.float32)}, r"'b' has shape \(0,\), expected \(4\)"),
        ({"a": np.ones((2, 3), np.float64)}, "'a' has dtype float64, expected float32"),
        ({"a": np.ones((2, 3), np.float16)}, "'a' has dtype float16, expected float32"),
        ({"a": np.ones((2, 3), np.int32)}, "'a' has dtype int32, expected float32"),
        ({"a": None}, "1 tensors are missing, the first is 'a'"),
        ({"z": np.ones(1, np.float32)}, "1 tensors were not asked for, the first is 'z'"),
        ({"f": np.ones(5, np.float32)}, "1 tensors were not asked for, the first is 'f'"),
        ({"h": np.ones(3, np.float32)}, "it holds local tensor 'h', which must not leave the device"),
    ],
)
def test_deltas_that_are_not_as_the_program_says_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(BadPayload, match=f"^{WHAT}: {named}"):
        check_packed(pack(deltas(**changed)), AVERAGED, WHAT)


@pytest.mark.parametrize(
    ("labels", "changed", "named"),
    [
        ([0, 3], {}, "labels 0 to 3, the run has 3 classes"),
        ([-1, 2], {}, "labels -1 to 2, the run has 3 classes"),
        ([2**62], {}, "the run has 3 classes"),
        ([0, 1], {"labels": np.array([0, 1, 2])}, "2 rows of 'features' for 3 labels"),
        ([0, 1], {"features": np.ones((3, 2, 8), np.float32)}, "3 rows of 'features' for 2 labels"),
        ([], {"labels": np.array([0])}, "0 rows of 'features' for 1 labels"),
        ([0, 1], {"labels": np.array([0, 1], np.int32)}, "'labels' has dtype int32, expected int64"),
        ([0, 1], {"labels": np.array([[0], [1]])}, r"'labels' has shape \(2, 1\), expected \(any\)"),
        ([0, 1], {"features": np.ones((2, 3, 8), np.float32)}, r"shape \(2, 3, 8\), expected \(any, 2, 8\)"),
        ([0, 1], {"features": np.full((2, 2, 8), np.nan, np.float32)}, "'features' holds 32 values"),
        ([0, 1], {"labels": None}, "1 tensors are missing, the first is 'labels'"),
        ([0, 1], {"a": np.ones((2, 3), np.float32)}, "it holds local tensor 'a'"),
    ],
)
def test_features_that_are_not_as_the_program_says_are_refused(
    labels: list[int], changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadPayload, match=f"^{WHAT}: .*{named}"):
        check_packed(pack(features(labels, **changed)), COLLECTED, WHAT)


@pytest.mark.parametrize("content", [b"", b"nonsense", pack(deltas())[:-1], bytes(8), b"\xff" * 8 + b"{}"])
def test_what_is_no_safetensors_is_refused(content: bytes) -> None:
    with pytest.raises(BadPayload, match=f"^{WHAT}: .*not safetensors"):
        check_packed(content, AVERAGED, WHAT)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "BOOL", "U8"])
def test_a_dtype_that_numpy_may_not_know_is_refused(dtype: str) -> None:
    size = {"BF16": 2}.get(dtype, 1)
    header = msgspec.json.encode({"a": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, 6 * size]}})
    content = len(header).to_bytes(8, "little") + header + bytes(6 * size)
    with pytest.raises(BadPayload, match=f"^{WHAT}: "):
        check_packed(content, AVERAGED, WHAT)


def test_a_long_header_is_refused_before_it_is_read() -> None:
    """64 kB are room for a hundred names; what is read of a header takes many times its size."""
    header = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}' + b" " * 65_536 + b"}"
    content = len(header).to_bytes(8, "little") + header + bytes(24)
    with pytest.raises(BadPayload, match=f"^{WHAT}: names and shapes of {len(header)} bytes, .* at most 65536$"):
        check_packed(content, AVERAGED, WHAT)


def test_an_upload_is_not_read_into_memory(tmp_path: Path) -> None:
    """64 MB of zeros, as a file with a hole; what is looked at together is a million numbers and a byte for each."""
    shape = (4096, 4096)
    program = msgspec.structs.replace(AVERAGED, tensors={"a": TensorSpec(shape, "float32", "body")})
    header = msgspec.json.encode({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * 4096**2]}})
    header += b" " * (-len(header) % 8)
    file = tmp_path / "upload"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 4 * 4096**2)
    tracemalloc.start()
    try:
        tensors = check_upload(file, program, WHAT)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tensors["a"].shape == shape
    assert peak_bytes < 4_000_000


def test_an_upload_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPayload, match=f"^{WHAT}: upload gone is missing"):
        check_upload(tmp_path / "gone", AVERAGED, WHAT)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_bytes_of_any_kind_are_taken_or_refused(noise: bytes, place: int, value: int) -> None:
    """Noise, and a good upload with one byte changed: never another error, never a wrong shape or a NaN."""
    damaged = bytearray(pack(deltas()))
    damaged[place % len(damaged)] = value
    for content in (noise, bytes(damaged)):
        try:
            tensors = check_packed(content, AVERAGED, WHAT)
        except BadPayload:
            continue
        assert {name: tensor.shape for name, tensor in tensors.items()} == {"a": (2, 3), "b": (4,)}
        assert all(bool(np.isfinite(tensor).all()) for tensor in tensors.values())


# --- coded uploads ------------------------------------------------------------------------------------

SHAPE = (40, 32)
CODED = {
    codec: msgspec.structs.replace(
        AVERAGED,
        groups={**AVERAGED.groups, "body": TensorGroup(Role.SHARED, up=codec)},
        tensors={**AVERAGED.tensors, "a": TensorSpec(SHAPE, "float32", "body")},
    )
    for codec in ("fp16", "int8", "top_k:share=0.1")
}


def coded(codec: str) -> Tensors:
    value = np.linspace(-1, 1, 40 * 32, dtype=np.float32).reshape(SHAPE)
    return make_codec(codec).encode({"a": value, "b": np.ones(4, np.float32)})


@pytest.mark.parametrize("codec", CODED)
def test_coded_uploads_are_taken_and_their_size_is_limited_as_coded(codec: str) -> None:
    content = pack(coded(codec))
    assert check_packed(content, CODED[codec], WHAT).keys() == coded(codec).keys()
    most = largest_upload_bytes(CODED[codec], 20)
    assert len(content) <= most < len(content) + 70_000
    with pytest.raises(BadPayload, check=has_code("FV2308")):
        check_packed(pack({"a": np.zeros(SHAPE, np.float32), "b": np.ones(4, np.float32)}), CODED[codec], WHAT)
    with pytest.raises(BadPayload, check=has_code("FV2308")):
        check_packed(content, AVERAGED, WHAT)


@pytest.mark.parametrize(
    ("codec", "part", "value", "reason"),
    [
        ("fp16", "a", np.inf, "'a' holds 1 values that are NaN or infinite"),
        ("int8", "a#scale", np.nan, "'a#scale' holds 1 values that are NaN or infinite"),
        ("int8", "a#scale", 3e38, "'a' holds"),  # finite itself, but not what it stands for
        ("top_k:share=0.1", "a", np.inf, "'a' holds 1 values that are NaN or infinite"),
        ("top_k:share=0.1", "a#index", 60_000, "'a': its positions are not ascending, or beyond its 1280 entries"),
    ],
)
def test_what_cannot_be_decoded_to_numbers_is_refused(codec: str, part: str, value: float, reason: str) -> None:
    tensors = coded(codec)
    tensors[part].reshape(-1)[-1] = value
    with pytest.raises(BadPayload) as refused:
        check_packed(pack(tensors), CODED[codec], WHAT)
    assert str(refused.value).startswith(f"{WHAT}: {reason}")


def test_parts_of_a_local_tensor_are_refused_by_name() -> None:
    with pytest.raises(BadPayload, check=has_code("FV1505")):
        check_packed(pack({**deltas(), "h#scale": np.ones(3, np.float32)}), AVERAGED, WHAT)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_coded_features_are_taken(codec: str) -> None:
    [phase] = COLLECTED.train
    collect = Collect("features", (2, 8), codec=codec)
    program = msgspec.structs.replace(COLLECTED, train=(msgspec.structs.replace(phase, collect=collect),))
    for rows in (0, 20):
        made = np.random.default_rng(0).normal(size=(rows, 2, 8)).astype(np.float32)
        form = make_codec(codec).form("features", (None, 2, 8))
        parts = make_codec(codec).encode({"features": made}, samples=True)
        assert {name: str(part.dtype) for name, part in parts.items()} == {name: form[name][1] for name in form}
        check_packed(pack({**parts, "labels": np.zeros(rows, np.int64)}), program, WHAT)


class TestLabels:
    """The device announced ants and bees, and 20 images."""

    def test_as_many_as_a_median_can_be(self) -> None:
        """Two classes: one has its median or more, so that it is at most 20 / 1."""
        check_labels(np.repeat([0, 1], [20, 4]), COLLECTED, hello(), WHAT)

    def test_a_class_that_was_not_announced(self) -> None:
        with pytest.raises(BadPayload, check=has_code("FV1505")):
            check_labels(np.array([0, 2]), COLLECTED, hello(), WHAT)

    def test_more_of_a_class_than_is_chosen(self) -> None:
        """Three classes: two have the median or more, which is at most 10."""
        everything = hello(classes=CLASSES)
        check_labels(np.repeat([0, 1, 2], [10, 10, 1]), COLLECTED, everything, WHAT)
        with pytest.raises(BadPayload, check=has_code("FV1505")):
            check_labels(np.repeat([0, 1, 2], [11, 5, 1]), COLLECTED, everything, WHAT)

    def test_none(self) -> None:
        check_labels(np.array([], np.int64), COLLECTED, hello(), WHAT)


def test_an_upload_that_alone_would_fill_the_disk_is_refused() -> None:
    """On a disk that is full without it nobody is to blame: that pauses the run instead."""
    upload = Manifest(DIGEST, 20_000_000_000, 126_976)
    with pytest.raises(BadPayload, check=has_code("FV1506")):
        check_free_space(upload, 19_000_000_000)
    for free_bytes in (None, 20_000_000_000, MIN_FREE_BYTES - 1):
        check_free_space(upload, free_bytes)


def test_patches_are_counted_in_a_segmentation() -> None:
    program = of_task(PATCHES)
    patches = 5 * program.batch.patches
    counts = (ClassCount(0, patches - 3, patches - 1, ((1, 2),)), ClassCount(1, 0, 1, ((0, 1),)))
    metrics = {"correct": 4.0, "patches": float(patches)}
    check_result(evaluated(by_class=counts, metrics=metrics), program, hello())
    scored = (ClassCount(0, 1, 1, (), ((3, 1, 4),)),)
    for by_class, told in ((counts, 3.0), (scored, 1.0), ((ClassCount(0, 0, 2, ((1, 1),)),), 2.0)):
        with pytest.raises(BadPayload, check=has_code("FV1505")):
            check_result(evaluated(by_class=by_class, metrics={**metrics, "patches": told}), program, hello())
    with pytest.raises(BadPayload, check=has_code("FV1505", f"more patches than the {patches}")):
        check_result(evaluated(by_class=(ClassCount(0, 0, patches + 1),), metrics=metrics), program, hello())
