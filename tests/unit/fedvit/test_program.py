import contextlib
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.errors import BadPayload
from fedvit.program import (
    MAX_PROGRAM_BYTES,
    Batch,
    Collect,
    Draw,
    Evaluate,
    Gather,
    GraphSpec,
    Program,
    Role,
    TensorGroup,
    TensorSpec,
    Train,
    count_kept_patches,
    decode_program,
    encode_program,
)
from tests.support.codes import has_code

BATCH = Batch(image_size=32, patch_size=8, batch_size=4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), mask_ratio=0.75)

PROGRAM = Program(
    method="everything",
    model="small",
    classes=("cat", "dog"),
    groups={
        "backbone": TensorGroup(Role.FROZEN, "blake3:" + "0" * 64),
        "middle": TensorGroup(Role.GLOBAL),
        "head": TensorGroup(Role.SEEDED),
        "body": TensorGroup(Role.SHARED),
        "prefix": TensorGroup(Role.GENERATED),
        "own": TensorGroup(Role.LOCAL, "blake3:" + "1" * 64),
    },
    tensors={
        "z.weight": TensorSpec((2, 3), "float32", "body"),
        "a.weight": TensorSpec((5,), "float32", "body"),
        "backbone.w": TensorSpec((1,), "float32", "backbone"),
        "middle.w": TensorSpec((2,), "float32", "middle"),
        "head.w": TensorSpec((3,), "float32", "head"),
        "prefix.w": TensorSpec((4,), "float32", "prefix"),
        "own.w": TensorSpec((), "float32", "own"),
    },
    graphs={
        "train": GraphSpec("blake3:" + "2" * 64, 123),
        "predict": GraphSpec("blake3:" + "3" * 64, 45),
        "tune": GraphSpec("blake3:" + "4" * 64, 6),
        "look": GraphSpec("blake3:" + "5" * 64, 7),
    },
    train=(
        Train(graph="train", groups=("body", "own"), slots=("exp_avg",), epochs=2, lr=0.1, anchors=("body",)),
        Train(
            graph="train",
            groups=("head",),
            lr=0.2,
            steps=50,
            repeats=5,
            draws=(Draw(name="blocks", low=1, high=12, count=3, ascending=True),),
            collect=Collect("features", (5, 8), 1.5),
        ),
    ),
    evaluate=Evaluate(
        graph="predict",
        adapt=(Train(graph="tune", groups=("head",), lr=0.3, collect=Collect("looks", (8,))),),
        gather=Gather(graph="look", output="keys", shape=(8,), capacity=100),
        kept=("body", "head"),
        kept_of_this_round=True,
    ),
    batch=BATCH,
)


def as_dict(program: Program = PROGRAM) -> dict[str, Any]:
    """The program as another software would write it."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(encode_program(program))
    return decoded


# --- bytes --------------------------------------------------------------------------------------------


def test_equal_programs_have_equal_bytes_and_are_read_again() -> None:
    assert decode_program(encode_program(PROGRAM)) == PROGRAM
    # equal programs have equal bytes: A program is known by its digest, so the order in which its tables were
    # filled must not show
    backwards = msgspec.structs.replace(
        PROGRAM,
        groups=dict(reversed(PROGRAM.groups.items())),
        tensors=dict(reversed(PROGRAM.tensors.items())),
        graphs=dict(reversed(PROGRAM.graphs.items())),
    )
    assert encode_program(backwards) == encode_program(PROGRAM)


@pytest.mark.parametrize("version", [0, 8, "1", None, True])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(BadPayload) as refused:
        decode_program(msgspec.msgpack.encode({**as_dict(), "v": version}))
    if version is not True:  # equal to 1, but of the wrong type
        assert str(refused.value) == f"program version {version!r}, this software knows versions 1, 2, 3, 4, 5, 6, 7"


@pytest.mark.parametrize("table", ["groups", "tensors", "graphs"])
def test_tables_of_a_program_are_bounded(table: str) -> None:
    """Work that looks at all tensors for each group would take hours otherwise."""
    content = as_dict()
    [first, *_] = content[table].values()
    many = content[table] | {f"n{number}": first for number in range(20_000)}
    with pytest.raises(BadPayload, check=has_code("FV2307", "length")):
        decode_program(msgspec.msgpack.encode({**content, table: many}))


def test_bytes_of_a_program_are_bounded() -> None:
    with pytest.raises(BadPayload):
        decode_program(encode_program(PROGRAM) + bytes(MAX_PROGRAM_BYTES))


def test_what_a_program_does_not_ask_for_is_left_out() -> None:
    """A phase of whole epochs, one run a batch, no numbers drawn; an evaluation of the newest tensors as they are."""
    content = as_dict()
    plain = {"type": "train", "graph": "train", "groups": ["body"], "lr": 0.1}
    program = decode_program(
        msgspec.msgpack.encode({**content, "train": [plain], "evaluate": {"type": "evaluate", "graph": "predict"}})
    )
    assert program.train == (Train(graph="train", groups=("body",), lr=0.1),)
    [phase] = program.train
    assert (phase.epochs, phase.steps, phase.repeats, phase.draws, phase.collect) == (1, None, 1, (), None)
    assert program.evaluate == Evaluate(graph="predict")
    assert (program.evaluate.adapt, program.evaluate.gather, program.evaluate.kept) == ((), None, ())
    assert program.evaluate.kept_of_this_round is False


def test_a_program_without_a_version_is_refused() -> None:
    content = as_dict()
    del content["v"]
    with pytest.raises(BadPayload):
        decode_program(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("groups", {"body": {"role": "hidden"}}, "hidden"),
        ("classes", "cat", "classes"),
        ("tensors", {"w": {"shape": [1.5], "dtype": "float32", "group": "body"}}, "shape"),
        ("train", [{"type": "dream", "graph": "train"}], "train"),
        ("batch", {"image_size": 32}, "batch"),
    ],
)
def test_a_program_with_a_wrong_part_is_refused(key: str, value: object, complaint: str) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2307", complaint)):
        decode_program(msgspec.msgpack.encode({**as_dict(), key: value}))


@pytest.mark.parametrize("key", ["method", "groups", "tensors", "graphs", "train", "evaluate", "batch"])
def test_a_program_with_a_missing_part_is_refused(key: str) -> None:
    content = as_dict()
    del content[key]
    with pytest.raises(BadPayload, check=has_code("FV2307", key)):
        decode_program(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",  # no such opcode
        b"\x81\xa1v\xa1\xff",  # text that is not UTF-8
        b"\x91" * 5000,  # lists in lists
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode("program"),
        encode_program(PROGRAM)[:-1],
        encode_program(PROGRAM) + b"\0",
    ],
)
def test_what_is_no_program_is_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        decode_program(raw)


@given(st.binary(max_size=100))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        decode_program(raw)


@given(st.integers(0, len(encode_program(PROGRAM)) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_another_program_or_refused(position: int, byte: int) -> None:
    raw = bytearray(encode_program(PROGRAM))
    raw[position] = byte
    with contextlib.suppress(BadPayload):
        assert isinstance(decode_program(bytes(raw)), Program)


# --- roles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "from_server_each_round", "trained_on_device", "sent_back"),
    [
        (Role.FROZEN, False, False, False),
        (Role.GLOBAL, True, False, False),
        (Role.SEEDED, True, True, False),
        (Role.SHARED, True, True, True),
        (Role.GENERATED, True, True, True),
        (Role.ASSIGNED, True, False, False),
        (Role.LOCAL, False, True, False),
    ],
)
def test_what_a_role_means(role: Role, from_server_each_round: bool, trained_on_device: bool, sent_back: bool) -> None:
    """The table of the contract: where the value comes from, who trains it, what travels back."""
    assert role.from_server_each_round is from_server_each_round
    assert role.is_trained_on_device is trained_on_device
    assert role.is_sent_back is sent_back


def test_groups_by_role_and_their_names() -> None:
    # there are seven roles: An eighth needs a line in the table above
    assert set(Role) == {"frozen", "global", "seeded", "shared", "generated", "assigned", "local"}
    assert PROGRAM.with_role(Role.LOCAL) == ["own"]
    assert PROGRAM.with_role(Role.SHARED, Role.GENERATED) == ["body", "prefix"]
    assert PROGRAM.with_role() == []
    assert PROGRAM.names("body") == ["z.weight", "a.weight"]
    assert PROGRAM.names("nobody") == []


# --- uploads ------------------------------------------------------------------------------------------


def test_an_upload_holds_what_the_roles_send_back_and_what_is_collected() -> None:
    """body is shared, prefix generated; the second phase collects features (rows, 5, 8) and their labels. Nothing of
    frozen, global, seeded and local groups, and nothing of an evaluation."""
    assert PROGRAM.upload_form() == {
        "z.weight": ((2, 3), "float32"),
        "a.weight": ((5,), "float32"),
        "prefix.w": ((4,), "float32"),
        "features": ((None, 5, 8), "float32"),
        "labels": ((None,), "int64"),
    }


def test_forms_of_uploads_and_groups() -> None:
    plain = msgspec.structs.replace(PROGRAM, train=PROGRAM.train[:1])
    assert set(plain.upload_form()) == {"z.weight", "a.weight", "prefix.w"}
    assert PROGRAM.forms_of(["own", "head"]) == {"own.w": ((), "float32"), "head.w": ((3,), "float32")}


def test_a_program_with_an_unknown_sampler_is_refused() -> None:
    """Not collected by another one instead."""
    raw = encode_program(PROGRAM)
    assert b"median" in raw
    with pytest.raises(BadPayload, check=has_code("FV2307")):
        decode_program(raw.replace(b"median", b"latest"))


# --- patches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", range(100))
def test_kept_patches_is_the_exact_floor(percent: int) -> None:
    """floor(n (1 - p/100)) computed in whole numbers; in binary 1 - 0.9 is below 0.1 and would lose a patch."""
    for patches in range(1, 1025):
        exact = patches * (100 - percent) // 100
        assert count_kept_patches(patches, percent / 100) == max(1, exact), patches


@given(st.integers(1, 10_000), st.integers(1, 50), st.integers(1, 50))
def test_kept_patches_of_any_share(patches: int, part: int, more: int) -> None:
    """Shares such as 2/3, too, which no decimal number hits."""
    share = Fraction(part, part + more)
    assert count_kept_patches(patches, float(share)) == max(1, int(patches * (1 - share)))


def test_arithmetic_of_a_batch() -> None:
    assert count_kept_patches(1, 0.999) == 1
    assert count_kept_patches(196, 0.9999) == 1
    # batch arithmetic: 32 / 8 = 4 patches a side, 16 in all; 8 * 8 pixels of 3 colours are 192 values; a quarter of
    # 16 is 4
    assert (BATCH.patches, BATCH.patch_values, BATCH.kept_patches) == (16, 192, 4)
    # pixels that fill no patch do not count: 35 pixels hold 4 patches of 8 a side and 3 pixels more
    assert msgspec.structs.replace(BATCH, image_size=35).patches == 16
