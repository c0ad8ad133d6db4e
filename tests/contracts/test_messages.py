"""Every control message, byte by byte: what one version of the software wrote, every later one reads.

`golden/v1/` holds the bytes of each message in `EXAMPLES`, and they are never changed. For a new message, or
for a message that got a field at its end: add an example, then run

    python tests/contracts/test_messages.py

which writes the golden files that are missing and touches no other.
"""

import contextlib
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fedvit.errors import BadPayload, PeerRefused
from fedvit.resources import Budget, DeviceProfile, ProductRate, ResourceUse, Speed
from fedvit.wire import messages
from fedvit.wire.limits import BrokerLimits
from fedvit.wire.messages import (
    MAX_CHUNK_BYTES,
    MAX_CLASS_LIST_BYTES,
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobPut,
    BlobUrl,
    Cancel,
    ClassCount,
    CoordinatorState,
    Declined,
    DeltaStep,
    DeviceState,
    Extended,
    Failed,
    FromCoordinator,
    FromDevice,
    Hello,
    Manifest,
    Message,
    ModelReport,
    Models,
    Progress,
    Refused,
    Result,
    ResultAck,
    RunEnded,
    SumAsk,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumMasked,
    SumNoise,
    SumPeers,
    SumPublicKeys,
    SumRefused,
    SumReveal,
    SumShares,
    SumSigned,
    SumSurvivors,
    SumTerms,
    Task,
    UrlPiece,
    UseDedicatedTopic,
    Welcome,
    decode,
    decode_class_list,
    encode,
    encode_class_list,
    peek_tag,
    unread_hello,
)
from tests.support.codes import has_code

GOLDEN = Path(__file__).parent / "golden" / f"v{WIRE_VERSION}"

DIGEST = "blake3:" + "0123456789abcdef" * 4
MANIFEST = Manifest(DIGEST, 300_000, 126_976)
TASK_ID = "0123456789abcdef" * 4

INSTANCE, EPOCH = "8f14e45fceea167a", 281_474_976_710_656
PI = DeviceProfile(host="pi", machine="aarch64", cores=4, threads=3)
WEIGHTS = ProductRate("weights", 1, 200, 768, 3072, 2.5e10)
SPEED = Speed(
    threads=3,
    products=(WEIGHTS, ProductRate("attention", 24, 197, 64, 197, 1.25e10)),
    bytes_per_s={"Add": 3.5e9, "Softmax": 7.5e8},
    node_s=1.5e-6,
)
LOADED = replace(SPEED, products=(WEIGHTS,), bytes_per_s={"Add": 3.5e9}, load_per_core=2.5)
BOARD = replace(
    PI, threads=4, ram_bytes=2**32, board="Raspberry Pi 4 Model B Rev 1.4", base_rss_bytes=50_000_000,
    free_disk_bytes=2**34,
    budget=Budget(
        memory_bytes=512_000_000, flops_per_round=2 * 10**12, round_deadline_s=600.0, upload_bytes=5_000_000
    ),
)  # fmt: skip
STATE = CoordinatorState(EPOCH, True, "c0ffee", "run-1", "server", 1_700_000_000.5)
HELLO = Hello(INSTANCE, "0.1.0", PI, ("cat", "dog"), 120, 30)
PROGRESS = Progress("run-1", 7, "train", 12, 40, 0.5)
RESULT = Result("run-1", 7, "train", 120, {"loss": 0.25}, ResourceUse(train_s=1.5), MANIFEST)
EVALUATION = Result("run-1", 7, "evaluate", 12, {"correct": 9.0}, ResourceUse())
USE = ResourceUse(
    train_s=12.5, step_s=0.25, steps=40, flops=10**12, peak_rss_bytes=2**28, received_bytes=5, sent_bytes=6
)
HOT_USE = ResourceUse(
    train_s=12.5, sustained=1.25, energy_j=60.5, energy_source="ina3221 VDD_IN", temperature_c=71.5, throttled=True,
    broke=("time", "memory"),
)  # fmt: skip
FAILED = Failed("run-1", 7, "evaluate", "no memory")
TASK = Task(INSTANCE, EPOCH, "run-1", 8, "train", 5, DIGEST, {"model": DIGEST}, (MANIFEST,), 600.0)
FIRST_TASK = replace(TASK, round=7, seed=2**31 - 1)
WELCOME = Welcome(INSTANCE, 7, "the first round")
WANT = BlobNack(DIGEST, ((0, 3),))

SUM = SumId("first", 3, "train", 1)
SUM_KEYS = SumPublicKeys(bytes(range(32)), bytes(32), bytes(range(16)))
EXAMPLES: dict[str, AnyMessage] = {
    "coordinator": CoordinatorState(EPOCH, alive=True),
    "coordinator-4": replace(STATE, spread_s=20.0, clock_s=1_790_000_000.25),
    "coordinator-3": replace(STATE, spread_s=20.0),
    "coordinator-2": STATE,
    "device": DeviceState(INSTANCE, online=False),
    "device-2": DeviceState(INSTANCE, online=False, connection=3),
    "hello": replace(HELLO, profile=replace(PI, host="pi-küche", ram_bytes=4_294_967_296)),
    "hello-2": replace(HELLO, profile=BOARD, classes=("cat",), train_samples=12, test_samples=3),
    "hello-3": replace(HELLO, profile=replace(PI, speed=SPEED)),
    "hello-4": replace(HELLO, labels={"site": "berlin", "board": "pi-4"}, connection=3),
    "hello-5": replace(HELLO, classes=(), connection=1, class_list=MANIFEST),
    "hello-6": replace(HELLO, empty_folders=("horse",)),
    "hello-7": replace(HELLO, profile=replace(PI, speed=LOADED)),
    "hello-8": replace(HELLO, denies=("updates", "class_counts"), least_mask=0.5),
    "hello-9": replace(HELLO, denies=("methods",), publisher="ed25519:" + 43 * "A"),
    "hello-10": replace(HELLO, models=1),
    "hello-12": replace(HELLO, profile=replace(PI, feature_bytes=2**32)),
    "hello-11": replace(HELLO, profile=replace(PI, speed=replace(LOADED, kernels=True))),
    "progress": PROGRESS,
    "progress-2": replace(PROGRESS, task=TASK_ID),
    "result": replace(RESULT, use=USE),
    "result-2": replace(RESULT, use=HOT_USE, upload=None),
    "result-3": replace(RESULT, inline=b"tensors"),
    "result-4": replace(RESULT, damaged=("blobs/ab/abcd was damaged and is deleted", "round-6 is gone back to")),
    "result-5": replace(RESULT, metrics={}, upload=None, task=TASK_ID, program=DIGEST),
    "result-6": replace(
        EVALUATION,
        use=ResourceUse(battery_percent=81, charging=False),
        by_class=(ClassCount(0, 4, 5), ClassCount(3, 5, 7)),
    ),
    "result-7": replace(EVALUATION, by_class=(ClassCount(0, 4, 5, ((3, 1),)), ClassCount(3, 5, 7, ((0, 1), (2, 1))))),
    "result-8": replace(RESULT, attempt=2, use=ResourceUse(train_s=1.5, fetch_s=0.25)),
    "result-9": Result(
        "run-1", 7, "compare", 40, {"both": 29.0, "challenger": 6.0, "champion": 1.0, "neither": 4.0}, ResourceUse()
    ),
    "result-10": replace(EVALUATION, by_class=(ClassCount(0, 4, 5, (), ((0, 0, 7), (31, 5, 0))), ClassCount(3, 5, 7))),
    "failed": FAILED,
    "failed-2": Failed("run-1", 7, "train", "over budget", "memory", ResourceUse(train_s=1.5, peak_rss_bytes=2**28)),
    "failed-3": replace(FAILED, task=TASK_ID),
    "failed-4": Failed("run-1", 7, "train", "disk full", log="2026-11-22 12:00:01 E task failed  reason='disk full'"),
    "failed-5": replace(FAILED, attempt=2),
    "declined": Declined("run-1", 7, "train", "hot: 81 C, the limit is 75 C", 120.0),
    "declined-2": Declined("run-1", 7, "train", "busy", 120.0, TASK_ID),
    "declined-3": Declined("run-1", 7, "train", "busy", 120.0, TASK_ID, 2),
    "modelreport": ModelReport(INSTANCE, {"run-0-9": "champion", "run-1-7": "challenger"}, "run-0-9"),
    "modelreport-2": ModelReport(INSTANCE, {"run-0-9": "champion"}, "run-0-9", "run-1-7", "it ended 3 times", 40, 31.5),
    "modelreport-3": ModelReport(INSTANCE, {"run-0-9": "champion"}, "run-0-9", "", "", 40, 31.5, True),
    "extended": Extended("run-1", 7, "train", 95.5),
    "cancel": Cancel("run-1", 7, "train", "round 7 has the results that it needs"),
    "welcome": Welcome(INSTANCE, EPOCH, "waiting for devices: 1 of 3 are here"),
    "welcome-2": Welcome(INSTANCE, EPOCH, "the first round", "https://store:9000"),
    "welcome-3": Welcome(INSTANCE, 7, "3 of 10 devices are online", spread_s=20.0),
    "welcome-4": replace(WELCOME, limits=BrokerLimits(65_536, 15, 8, 1)),
    "refused": Refused(INSTANCE, "unknown class", final=True),
    "task": replace(FIRST_TASK, groups={"global": DIGEST, "head": DIGEST}, lr_scale=0.5),
    "task-3": replace(FIRST_TASK, groups={"prompts": DIGEST}, inline=(b"tensors", b"more tensors")),
    "task-4": replace(TASK, recipes=(DeltaStep(DIGEST, DIGEST, MANIFEST), DeltaStep(DIGEST, "", MANIFEST, "fp16"))),
    "task-5": replace(TASK, task=TASK_ID, attempt=2, progress_s=30.0),
    "task-6": replace(TASK, publisher="ed25519:" + 43 * "A", signatures=(bytes(64), bytes(range(64)))),
    "task-8": replace(TASK, best=7, personal_of="run-0"),
    "task-7": replace(TASK, trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    "task-9": replace(TASK, kind="compare"),
    "ack": ResultAck("run-1", 7, "train", accepted=False, reason="late"),
    "ack-2": ResultAck("run-1", 7, "train", accepted=False, reason="run 'run-1' is not served here", keep=True),
    "models": Models(INSTANCE, EPOCH, {"run-0-9": "former", "run-1-7": "champion"}),
    "ended": RunEnded("run-1", "finished"),
    "ended-2": RunEnded("run-1", "finished", 7),
    "want": BlobNack(DIGEST, ((0, 3), (7, 1)), 12, True),
    "want-2": BlobNack(DIGEST, ((0, 3),), 0, False, True),
    "want-3": replace(WANT, url="ask"),
    "want-4": BlobNack(DIGEST, ((4, 9),), put=UrlPiece("https://store/bucket/up/1?X-Amz-Signature=2", 4, 8)),
    "url": BlobUrl(DIGEST, "https://store/bucket/b/1?X-Amz-Signature=2"),
    "put": BlobPut(DIGEST, 4, 8, stored=True),
    "apart": UseDedicatedTopic(DIGEST),
    "done": BlobAck(DIGEST),
    "suminvite": SumInvite(SUM, SumTerms(DIGEST, 100, 20, 24, 2.5, 463)),
    "suminvite-2": SumInvite(SUM, SumTerms(DIGEST, 4, 20)),
    "suminvite-3": SumInvite(SUM, SumTerms(DIGEST, 4, 20, 32, 9.5, 1, SumNoise(1.0, 0.8, 2.5))),
    "sumkeys": SumKeys(SUM, SUM_KEYS),
    "sumkeys-2": SumKeys(SUM, replace(SUM_KEYS, certificate=b"certificate", signature=b"signature"), bytes(32)),
    "sumpeers": SumPeers(SUM, {"a": bytes(range(16)), "b": bytes(16)}, {"a": SUM_KEYS}),
    "sumshares": SumShares(SUM, {"a": bytes(82)}, bytes(range(32))),
    "suminbox": SumInbox(SUM, {"b": bytes(range(82))}),
    "summasked": SumMasked(SUM, MANIFEST),
    "summasked-2": SumMasked(SUM, MANIFEST, b"masked"),
    "sumsurvivors": SumSurvivors(SUM, b"\xc0"),
    "sumask": SumAsk(SUM, {"b": b"signature"}),
    "sumsigned": SumSigned(SUM, b"signature"),
    "sumreveal": SumReveal(SUM, {"a": bytes(range(33))}),
    "sumrefused": SumRefused(SUM, "its numbers are in a sum already"),
}
"""File name -> message. A second example of one type is named after it: `task-2`."""

TYPES: tuple[type[Message], ...] = typing.get_args(AnyMessage)


def tag_of(kind: type[Message]) -> str:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def items(raw: bytes) -> list[Any]:
    """A message as any other software reads it: a list that begins with the tag."""
    assert raw[0] == WIRE_VERSION
    decoded: list[Any] = msgspec.msgpack.decode(raw[1:])
    return decoded


def write_items(items: list[Any], version: int = WIRE_VERSION) -> bytes:
    return bytes([version]) + msgspec.msgpack.encode(items)


def continues(now: Any, kept: Any) -> bool:
    """Whether `now` is `kept`, with more behind it at most.

    >>> continues(["a", [1, 2], 9], ["a", [1]]), continues([2], [1])
    (True, False)
    """
    if isinstance(kept, list):
        return isinstance(now, list) and len(now) >= len(kept) and all(map(continues, now, kept))
    if isinstance(kept, dict):
        return isinstance(now, dict) and all(key in now and continues(now[key], kept[key]) for key in kept)
    return type(now) is type(kept) and bool(now == kept)


@pytest.mark.parametrize("name", EXAMPLES)
def test_tags_are_read_without_decoding(name: str) -> None:
    raw = encode(EXAMPLES[name])
    assert peek_tag(raw).decode() == msgspec.msgpack.decode(raw[1:])[0]


# --- golden bytes -------------------------------------------------------------------------------------


def test_every_message_has_an_example_and_a_golden_file() -> None:
    defined = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert set(TYPES) == defined - {Message}, "a message is not in the union of those that are read"
    assert set(typing.get_args(FromDevice | FromCoordinator)) == set(TYPES)
    for kind in TYPES:
        assert type(EXAMPLES.get(tag_of(kind))) is kind, f"no example of {kind.__name__}"
    assert {path.stem for path in GOLDEN.iterdir()} == set(EXAMPLES), "see the top of this file"


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_are_kept(name: str) -> None:
    """They are read as they were meant, and what is written now begins with what was written then."""
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert decode(golden) == EXAMPLES[name]
    now, kept = items(encode(EXAMPLES[name])), items(golden)
    assert continues(now, kept)
    if continues(kept, now):  # nothing was added since
        assert encode(EXAMPLES[name]) == golden


@pytest.mark.parametrize("kind", TYPES)
def test_the_newest_form_of_every_message_is_golden(kind: type[Message]) -> None:
    """A field that was added at the end needs an example in which it has a value."""
    fields = 1 + len(kind.__struct_fields__)
    lengths = [
        len(items((GOLDEN / f"{name}.bin").read_bytes())) for name, message in EXAMPLES.items() if type(message) is kind
    ]
    assert max(lengths) == fields


# --- there and back -----------------------------------------------------------------------------------


COUNTS, POSITIVE = st.integers(1, 4096), st.floats(1e-9, 1e18)
PRODUCTS = st.builds(ProductRate, st.just("weights"), COUNTS, COUNTS, COUNTS, COUNTS, POSITIVE)


def values_of(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Every value that a field's type allows, so that messages to come are covered, too."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return values_of(inner)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType(ge=low, le=high):
            return st.integers(-(2**63) if low is None else low, 2**64 - 1 if high is None else high)
        case msgspec.inspect.FloatType(ge=low, le=high):
            return st.floats(low, high, allow_nan=False)
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case msgspec.inspect.StrType():
            return st.text(max_size=30)
        case msgspec.inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high or 30)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case msgspec.inspect.VarTupleType(item_type=inner):
            return st.lists(values_of(inner), max_size=4).map(tuple)
        case msgspec.inspect.TupleType(item_types=types):
            return st.tuples(*map(values_of, types))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values_of(key), values_of(value), max_size=4)
        case msgspec.inspect.StructType(cls=cls) if cls is Speed:  # it refuses figures that no speed can have
            return st.builds(
                Speed,
                threads=COUNTS,
                products=st.lists(PRODUCTS, min_size=1).map(tuple),
                bytes_per_s=st.dictionaries(st.text(max_size=30), POSITIVE).map(lambda rates: {**rates, "Add": 1e9}),
                node_s=POSITIVE,
            )
        case msgspec.inspect.StructType(cls=cls) if cls is Manifest:  # it refuses more chunks than anybody could count
            return st.builds(Manifest, st.text(max_size=30), st.integers(1, 2**30), st.integers(1024, MAX_CHUNK_BYTES))
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields})
    raise AssertionError(f"no values are known for {kind}: add them here")


MESSAGES = values_of(msgspec.inspect.type_info(AnyMessage))


@given(MESSAGES)
def test_decode_undoes_encode(message: AnyMessage) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_loss_that_is_nan_can_be_sent() -> None:
    decoded = decode(encode(Progress("r", 1, "train", 1, 1, float("nan"))))
    assert isinstance(decoded, Progress)
    assert decoded.loss != decoded.loss


# --- evolution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("appended", [[1], ["text", {"a": [1, None]}], [None, 2.5, b"bytes"]])
def test_fields_of_a_newer_peer_are_passed_over(name: str, appended: list[Any]) -> None:
    newer = write_items(items(encode(EXAMPLES[name])) + appended)
    assert decode(newer) == EXAMPLES[name]


def test_inner_records_of_a_newer_peer_are_read() -> None:
    """A manifest is a list in the message and grows at its end; a profile is a map and gets more keys."""
    result = items(encode(EXAMPLES["result"]))
    result[7] = [*result[7], "extra"]
    assert decode(write_items(result)) == EXAMPLES["result"]
    hello = items(encode(EXAMPLES["hello"]))
    hello[3] = {**hello[3], "gpu": "none"}
    assert decode(write_items(hello)) == EXAMPLES["hello"]


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


@pytest.mark.parametrize("kind", TYPES)
def test_fields_that_an_older_peer_does_not_know_take_their_default(kind: type[Message]) -> None:
    """Each field at the end that has a default may be absent; any other may not."""
    name = tag_of(kind)
    example, fields = EXAMPLES[name], msgspec.structs.fields(kind)
    whole = items(encode(example))
    for length in range(len(fields)):
        older = write_items(whole[: 1 + length])
        absent = fields[length:]
        if not any(field.required for field in absent):
            defaults = {field.name: default_of(field) for field in absent}
            assert decode(older) == replace(example, **defaults)
        else:
            with pytest.raises(BadPayload):
                decode(older)


@pytest.mark.parametrize("version", sorted({0, 2, 0x7B, 0xFF} - {WIRE_VERSION}))
def test_another_version_is_refused_by_name(version: int) -> None:
    """0x7B is '{': somebody who speaks JSON. The rest need not be readable."""
    for rest in (encode(EXAMPLES["hello"])[1:], b"", b"\xff\xff"):
        with pytest.raises(PeerRefused) as refused:
            decode(bytes([version]) + rest)
        assert str(refused.value) == (
            f"the other side speaks wire version {version}, this side speaks version {WIRE_VERSION}"
        )


# --- what is no message -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes([WIRE_VERSION]),
        bytes([WIRE_VERSION, 0xC1]),  # no such opcode
        write_items(["nonsense", 1]),
        write_items([]),
        write_items([1]),
        write_items(["done"]),
        write_items(["done", 5]),
        write_items(["done", DIGEST])[:-1],
        write_items(["done", DIGEST]) + b"\0",
        write_items({"type": "done", "digest": DIGEST}),  # type: ignore[arg-type]
        write_items(["progress", "run", 1, "dream", 1, 1]),
        write_items(["progress", "run", 1.5, "train", 1, 1]),
        write_items(["progress", "run", -1, "train", 1, 1]),
        write_items(["progress", "run", 2**31, "train", 1, 1]),  # no database keeps it as a round's number
        write_items(["want", DIGEST, [[1, 2, 3]]]),
        write_items(["result", "run", 1, "train", 1, {}, {}, [DIGEST, 0, 4096]]),  # a blob has at least a byte
        write_items(["result", "run", 1, "train", 1, {}, {}, [DIGEST, 5, 16]]),  # and chunks of a sensible size
        write_items(["ended", "run", "x"]).replace(b"\xa1x", b"\xa1\xff"),  # text that is not UTF-8
        write_items(["ended", "run", "x"]).replace(b"\xa5ended", b"\xa5end\xff\xfe"),
        bytes([WIRE_VERSION]) + b"\x91" * 5000,  # lists in lists
        bytes([WIRE_VERSION, 0x93]) + encode(BlobAck(DIGEST))[2:] + b"\x91" * 60_000 + b"\0",  # in a field to pass over
        bytes([WIRE_VERSION, 0xDD, 0xFF, 0xFF, 0xFF, 0xFF]),  # a list of 4 billion items
    ],
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        decode(raw)
    assert unread_hello(raw) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(tail: bytes) -> None:
    with contextlib.suppress(BadPayload):
        assert isinstance(decode(bytes([WIRE_VERSION]) + tail), TYPES)
    assert unread_hello(bytes([WIRE_VERSION]) + tail) is None


@pytest.mark.parametrize(
    ("content", "instance"),
    [
        (["hello", "instance", 7], "instance"),
        (["hello", "instance"], "instance"),
        (["hello", "x" * 65, 7], None),
        (["hello", 7], None),
        (["hello"], None),
        (["done", "instance"], None),
        ("hello", None),
    ],
)
def test_a_hello_that_cannot_be_read_still_says_from_which_process_it_is(content: Any, instance: str | None) -> None:
    assert unread_hello(write_items(content)) == instance
    assert unread_hello(write_items(content) + bytes(MAX_MESSAGE_BYTES)) is None


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_a_changed_byte_is_another_message_or_refused(name: str, data: st.DataObject) -> None:
    raw = bytearray(encode(EXAMPLES[name]))
    position = data.draw(st.integers(1, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadPayload):
        assert isinstance(decode(bytes(raw)), TYPES)


def test_class_lists_are_read_as_they_were_written_and_bounded() -> None:
    classes = ("cat", "dög", "x" * 255)
    assert decode_class_list(encode_class_list(classes)) == classes
    with pytest.raises(BadPayload, check=has_code("FV2301", str(MAX_CLASS_LIST_BYTES))):
        encode_class_list(("x" * 255,) * 20_000)
    for raw in (b"", b"\xc1", encode_class_list(("x" * 256,)), msgspec.msgpack.encode(["cat", 5])):
        with pytest.raises(BadPayload, check=has_code("FV2301", "a list of classes")):
            decode_class_list(raw)


def make_ended(size: int) -> RunEnded:
    """A message of `size` bytes: version, list of 4, 'ended' with its length (1 + 5), 'r' (1 + 1), a text of up
    to 65535 bytes behind 3 bytes of length, and 0 make 14 and the text."""
    return RunEnded("r", "x" * (size - 14))


def test_messages_beyond_the_largest_are_refused_by_both_sides() -> None:
    raw = encode(make_ended(MAX_MESSAGE_BYTES))
    assert len(raw) == MAX_MESSAGE_BYTES
    assert decode(raw) == make_ended(MAX_MESSAGE_BYTES)
    size = str(MAX_MESSAGE_BYTES + 1)
    with pytest.raises(BadPayload, check=has_code("FV2301", f"RunEnded message of {size}")):
        encode(make_ended(MAX_MESSAGE_BYTES + 1))
    raw = encode(make_ended(MAX_MESSAGE_BYTES))
    one_more = raw.replace(b"\xda" + (MAX_MESSAGE_BYTES - 14).to_bytes(2, "big"), b"\xda\xff\xf3") + b"x"
    with pytest.raises(BadPayload, check=has_code("FV2301", size)):
        decode(one_more)


def write_missing_golden_files() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, message in EXAMPLES.items():
        path = GOLDEN / f"{name}.bin"
        if not path.exists():
            path.write_bytes(encode(message))
            print(f"written: {path}")


if __name__ == "__main__":
    write_missing_golden_files()
