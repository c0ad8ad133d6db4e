"""Control messages: closed, versioned records; the reader decodes into the union and matches on type.

Bytes = one version byte, then msgpack of an array that begins with the tag. Rules of evolution: new
fields come last and have defaults; a field is never retyped, reordered or reused; a change that an old
reader cannot handle raises WIRE_VERSION. The bytes of every message are kept as golden files in the tests.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fedvit.errors import BadPayload, PeerRefused
from fedvit.public_keys import PublicKey, Signature
from fedvit.resources import BudgetKind, DeviceProfile, ResourceUse
from fedvit.wire.limits import BrokerLimits

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
INLINE_BYTES = 48 * 1024
"""Bytes of inline blobs in one message, all together."""
_INLINE_HEADS_BYTES = 1024
"""For the lengths of these blobs."""

TaskKind = Literal["train", "evaluate", "compare"]
"""A device is asked to compare only if its hello names a version of the messages about models."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Stored as received: numbers that do not fit into the database are refused here."""
_LONGEST_NAME = 64
Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]
LabelText = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
"""Name or value of a label, as `fedvit.labels` reads it: a line that shows it stays one line."""
ClassName = Annotated[str, Meta(max_length=255)]
REASON_LETTERS = 1000
Reason = Annotated[str, Meta(max_length=REASON_LETTERS)]
"""Texts of a device are limited one by one, so that an answer that quotes them fits into one message."""
MAX_LOG_TEXT = 4000
LogText = Annotated[str, Meta(max_length=MAX_LOG_TEXT)]
MAX_CLASS_COUNTS = 2000
"""Classes of one evaluation whose answers are counted one by one: more would not fit into a message."""
MAX_CONFUSED_CLASSES = 100
"""Classes of a run up to which wrong answers are counted by what was answered: all pairs of more would not fit."""
MAX_SCORED_CLASSES = 64
"""Classes of a run up to which scores of answers are counted: with wrong answers they still fit into a message."""
SCORE_BINS = 32
"""Bins of log-odds, half a unit each, from -8 to 8; the first and the last hold what lies further out."""
MAX_LABELS = 16
"""Labels of one device."""
MAX_EMPTY_FOLDERS = 16
"""Class folders without images that a hello names."""
MAX_DENIALS = 16
"""Keys of a policy that a hello names."""
MAX_GRAPHS = 64
"""Graphs of one Program."""
MAX_MODELS = 16
"""Models of one device that a message names."""
MODELS_VERSION = 1
"""Version of the messages about models: `Models`, `ModelReport` and tasks that compare."""
ModelName = Annotated[str, Meta(max_length=80)]
"""RUN-ROUND."""
ModelState = Literal["trained", "challenger", "canary", "champion", "former"]
"""State of a model on a device. It answers pictures as canary, or as champion while there is no canary."""
WantedState = Literal["canary", "champion", "former", "retired"]
MAX_NEIGHBOURS = 128
"""Neighbours of a device in a secure sum."""
MAX_SUM_DEVICES = 4096
"""Devices of a secure sum; their names and nonces must also fit into a message."""
MAX_CLASS_LIST_BYTES = 1 << 20
"""Size of the blob with a device's classes, if they do not fit into its hello."""
MAX_CHUNK_BYTES = 1 << 20
"""Our brokers refuse larger messages, and transfers count bytes with 32 bits."""
MAX_BLOB_CHUNKS = 1 << 20
"""130 GB. A receiver keeps a byte for each chunk, so that a false claim costs 1 MB at most."""
MAX_CHAIN_STEPS = 32
"""Most steps of one delta chain. A task describes each with about 250 bytes, so that 64 kB hold about 250 for all
groups together. A device that was away for more rounds gets the whole group."""
MAX_DELTA_STEPS = 512
"""Delta steps of one task, more than fit into a message with their digests."""

_TERM_SHIFT = 32
"""Bits of an epoch below its term."""


class Message(Struct, frozen=True, array_like=True, tag_field="type"):
    """Base of all control messages."""


class Manifest(Struct, frozen=True, array_like=True):
    """The description of a blob, which a receiver needs before the first byte."""

    digest: str
    size: Annotated[int, Meta(ge=1)]
    chunk: Annotated[int, Meta(ge=1024, le=MAX_CHUNK_BYTES)]  # payload bytes per chunk; the last chunk may be shorter

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible size."""
        if self.chunks > MAX_BLOB_CHUNKS:
            raise ValueError(f"a blob of {self.size} bytes has {self.chunks} chunks, at most {MAX_BLOB_CHUNKS} may be")

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk)


class DeltaStep(Struct, frozen=True, array_like=True):
    """One step of a delta chain, with which a receiver rebuilds a blob of tensors: target = base + patch, decoded.

    Without a base the patch is the target, coded. With `whole`, the sum is coded and decoded by that codec. Numbers
    are float32 with IEEE 754 rounding, so that the target has the same digest on any machine.
    """

    target: str  # digest
    base: str  # digest; empty: no base
    patch: Manifest
    whole: str = "none"


class ClassCount(Struct, frozen=True, array_like=True):
    """The answers of an evaluation for the test images of one class."""

    label: Count  # place of the class in the run's list
    correct: Count
    images: Count
    # wrong answers: (label that was answered, images), ascending; empty: none, or not counted
    wrong: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_CONFUSED_CLASSES)] = ()
    # scores: (bin, images of the class, other images), ascending; empty: not counted
    scores: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=SCORE_BINS)] = ()


# --- secure sums (fedvit.secure) ----------------------------------------------------------------------

Key32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""A key, a seed or a digest."""
Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]
SumSignature = Annotated[bytes, Meta(max_length=256)]
Share = Annotated[bytes, Meta(min_length=33, max_length=33)]
SealedShares = Annotated[bytes, Meta(min_length=82, max_length=82)]
"""Two shares, encrypted."""


class SumId(Struct, frozen=True, array_like=True):
    """Name of a sum of the results of a round. A sum that failed is repeated with a higher attempt and new keys."""

    run: Name
    round: Count
    kind: TaskKind
    attempt: Count


class SumNoise(Struct, frozen=True, array_like=True):
    """Noise that devices add before a sum, for differential privacy: see `fedvit.secure.noise`."""

    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]  # norm that a device's update is scaled down to
    multiplier: Annotated[float, Meta(ge=0.0, le=1e4)]  # standard deviation in the least sum, times clip
    counting: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0  # of the number of updates within clip; 0: not counted


class SumTerms(Struct, frozen=True, array_like=True):
    """Terms of a sum: see `fedvit.secure.fixed_point`."""

    layout: Annotated[str, Meta(max_length=80)]  # digest of the names and shapes of what is added up
    devices: Annotated[int, Meta(ge=1, le=MAX_SUM_DEVICES)]  # most devices in it
    neighbours: Annotated[int, Meta(ge=2, le=MAX_NEIGHBOURS)]  # of a device, with which it has masks in common
    bits: Literal[16, 24, 32] = 32  # of a number of a tensor
    range: Annotated[float, Meta(ge=1e-6, le=1e6)] = 4.0  # numbers are clipped to [-range, range]
    max_weight: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1  # weights are counted up to it
    noise: SumNoise | None = None  # all devices weigh the same then


class SumPublicKeys(Struct, frozen=True, array_like=True):
    """A device's public keys of one sum."""

    mask_key: Key32  # X25519: of the masks that two devices have in common
    share_key: Key32  # X25519: of the shares that devices send each other
    nonce: Nonce
    certificate: Annotated[bytes, Meta(max_length=4096)] = b""  # DER; empty: the device has none
    signature: SumSignature = b""  # of all of it, with the certificate's key (ECDSA)


# --- coordinator to everybody -------------------------------------------------------------------------


def leading_epoch(term: int, number: int) -> int:
    """The epoch of a coordinator that leads in a term; `number`: of its connection, below 2**32.

    Of a coordinator without a standby the epoch is a random number up to 2**48, and has no term.
    """
    return term << _TERM_SHIFT | number


def term_of(epoch: int) -> int:
    """The term of an epoch, at least 2**17; 0: it has none.

    >>> term_of(leading_epoch(1_700_000_000, 5)), term_of(2**48)
    (1700000000, 0)
    """
    return epoch >> _TERM_SHIFT if epoch > 2**48 else 0


class CoordinatorState(Message, frozen=True, tag="coordinator"):
    """A coordinator's presence. After a new epoch every device sends its hello again. An epoch with an earlier
    term than a known one belongs to a coordinator that no longer leads, and is ignored.

    The fields after `alive` identify a coordinator: two that serve one federation by mistake can report each other.
    """

    epoch: int
    alive: bool
    owner: Name = ""  # random, new for each process of a coordinator
    run: Name = ""
    host: Name = ""  # of the coordinator's machine
    held_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0  # for how long this process has served the federation
    # connected devices send their hello at random times within this interval
    spread_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 1.0
    # the coordinator's clock, seconds since 1970, only for people (`edge-client doctor`); 0: an older coordinator
    clock_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0


# --- device to coordinator ----------------------------------------------------------------------------


class DeviceState(Message, frozen=True, tag="device"):
    """The device's last will, and its farewell. A will belongs to the connection that it names: after the hello of
    a newer connection it is ignored."""

    instance: Name
    online: bool  # True: a question, which is answered with a CoordinatorState
    connection: Count = 0


class Hello(Message, frozen=True, tag="hello"):
    """A device announces itself; `instance` is new for each start of the process."""

    instance: Name
    software: Name
    profile: DeviceProfile
    classes: tuple[ClassName, ...]  # its class folders with images
    train_samples: Count
    test_samples: Count
    labels: Annotated[dict[LabelText, LabelText], Meta(max_length=MAX_LABELS)] = {}  # given by the device's operator
    connection: Count = 0  # counts the connections of one process; also in the last will of the connection
    class_list: Manifest | None = None  # if `classes` do not fit: they are empty, and this blob is fetched instead
    # the first of its class folders without images, which are no classes: for the operator
    empty_folders: Annotated[tuple[ClassName, ...], Meta(max_length=MAX_EMPTY_FOLDERS)] = ()
    # keys of what its owner's policy does not allow, as fedvit.policy names them, and the least mask of features
    denies: Annotated[tuple[Name, ...], Meta(max_length=MAX_DENIALS)] = ()
    least_mask: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    publisher: PublicKey = ""  # whose graphs it runs; "": it trusts none
    models: Count = 0  # MODELS_VERSION; 0: it knows none, or its owner does not let the coordinator choose models


class Progress(Message, frozen=True, tag="progress"):
    """The progress of a task: shown to the operator, and a sign of life."""

    run: Name
    round: Count
    kind: TaskKind
    done_steps: Count
    total_steps: Count
    loss: float | None = None
    task: Name = ""  # the identity that the Task had


class Result(Message, frozen=True, tag="result"):
    """A finished task. It stays in the device's vault until it is acknowledged."""

    run: Name
    round: Count
    kind: TaskKind
    samples: Count
    metrics: Annotated[dict[Name, float], Meta(max_length=64)]
    use: ResourceUse
    upload: Manifest | None = None  # the tensors that are sent back; fetched by the coordinator
    inline: bytes = b""  # a small upload itself, which then is not fetched
    damaged: Annotated[
        tuple[Reason, ...], Meta(max_length=8)
    ] = ()  # damaged files on the device's disk since its last result
    task: Name = ""  # the identity that the Task had
    program: Annotated[str, Meta(max_length=80)] = ""  # digest of the Program that was run
    # of an evaluation, for classes with test images, ascending; empty: the device does not count them
    by_class: Annotated[tuple[ClassCount, ...], Meta(max_length=MAX_CLASS_COUNTS)] = ()
    attempt: Count = 0  # the attempt that the Task had; 0: older software


class Failed(Message, frozen=True, tag="failed"):
    """A device could not do its task; the round continues without it."""

    run: Name
    round: Count
    kind: TaskKind
    reason: Reason
    broke: BudgetKind | None = None  # the budget that the task exceeded
    use: ResourceUse | None = None  # with `broke`: measured until the task was stopped
    task: Name = ""  # the identity that the Task had
    log: LogText = ""  # last lines of the device's log, without paths and class names; empty if it sends none
    attempt: Count = 0  # the attempt that the Task had; 0: older software, or not known


class Declined(Message, frozen=True, tag="declined"):
    """A device does not start a task now; no failure: it may be asked again after `again_s` seconds."""

    run: Name
    round: Count
    kind: TaskKind
    reason: Reason  # "hot", "busy", "low battery", "quiet hours" or "images cannot be used", with details
    again_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    task: Name = ""  # the identity that the Task had
    attempt: Count = 0  # the attempt that the Task had; 0: older software


class ModelReport(Message, frozen=True, tag="modelreport"):
    """The models of a device: the answer to `Models`, also sent when it changes."""

    instance: Name
    states: Annotated[dict[ModelName, ModelState], Meta(max_length=MAX_MODELS)]
    serving: ModelName = ""  # the one that answers pictures; "": none
    failed: ModelName = ""  # the one that the device stopped to use by itself
    reason: Reason = ""  # of `failed`, or why a wanted state is not the actual one
    answered: Count = 0  # pictures that `serving` has answered on this device
    confidence: Annotated[float, Meta(ge=0.0, le=2.0**31)] = 0.0  # sum over these pictures
    has_drifted: bool = False  # these pictures differ from those that `serving` was made with


class SumKeys(Message, frozen=True, tag="sumkeys"):
    """The answer to a SumInvite."""

    sum: SumId
    keys: SumPublicKeys
    authority: Annotated[bytes, Meta(max_length=32)] = b""  # digest of the device's authority; empty: it has none


class SumShares(Message, frozen=True, tag="sumshares"):
    """The answer to SumPeers: shares of the device's secrets, each encrypted for one neighbour."""

    sum: SumId
    sealed: Annotated[dict[Name, SealedShares], Meta(max_length=MAX_NEIGHBOURS)]
    commitment: Key32  # to the seed of the device's own mask


class SumMasked(Message, frozen=True, tag="summasked"):
    """The answer to a SumInbox: the device's numbers with masks, as a blob that the coordinator fetches."""

    sum: SumId
    vector: Manifest
    inline: bytes = b""  # a small one itself, which then is not fetched


class SumSigned(Message, frozen=True, tag="sumsigned"):
    """The answer to SumSurvivors: the list is the device's, too."""

    sum: SumId
    signature: SumSignature = b""  # of the list; empty: the device has no certificate


class SumReveal(Message, frozen=True, tag="sumreveal"):
    """The answer to a SumAsk: for each neighbour that has sent shares one share, and one of the device itself."""

    sum: SumId
    shares: Annotated[dict[Name, Share], Meta(max_length=MAX_NEIGHBOURS + 1)]


class SumRefused(Message, frozen=True, tag="sumrefused"):
    """The device does not take part in a sum, or leaves it."""

    sum: SumId
    reason: Reason


# --- coordinator to one device ------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The hello was accepted."""

    instance: str
    epoch: int
    waiting_for: str  # the next event, as text
    store: Annotated[str, Meta(max_length=300)] = ""  # origin of the object store: the only host of URLs that follow
    # the device reconnects after the loss of its broker at a random time within this interval
    spread_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 1.0
    limits: BrokerLimits | None = None  # of the broker, which the device keeps from now on; None: the usual ones


class Refused(Message, frozen=True, tag="refused"):
    """The hello was refused. `final`: retrying does not help."""

    instance: str
    reason: str
    final: bool


class Task(Message, frozen=True, tag="task"):
    """Run this Program's phases and answer within `deadline_s` seconds of receipt."""

    instance: str
    epoch: int
    run: Name
    round: Count  # from 1
    kind: TaskKind
    seed: int  # of the run; every random draw on the device derives from it
    program: str  # digest
    groups: dict[str, str]  # group -> digest of this round's value; local groups never travel
    blobs: tuple[Manifest, ...]  # of every digest that the task may need
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    lr_scale: Annotated[float, Meta(ge=0.0, le=1e38)] = 1.0  # the schedule's factor for this round
    inline: tuple[bytes, ...] = ()  # contents of small blobs of this round, which need not be fetched
    # steps of delta chains to blobs among `groups`
    recipes: Annotated[tuple[DeltaStep, ...], Meta(max_length=MAX_DELTA_STEPS)] = ()
    task: Name = ""  # identity of the work: equal for devices with equal work
    attempt: Count = 1  # how often this task was sent to this device, this time included
    progress_s: Annotated[float, Meta(ge=0.1, le=3600.0)] = 0.5  # least interval between Progress messages
    # who signed the Program's graphs, and a signature for each, in the order of their names; "" and (): nobody
    publisher: PublicKey = ""
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=MAX_GRAPHS)] = ()
    trace: Annotated[str, Meta(max_length=64)] = ""  # W3C traceparent of the task's span; "": nobody traces
    best: Count = 0  # the run's best round so far, of which the device keeps its model; 0: none
    personal_of: Name = ""  # the run whose personal tensors are tested, and stay; "": this run

    @property
    def vault_run(self) -> str:
        """The run whose folder of the vault the task uses."""
        return self.personal_of or self.run


class Extended(Message, frozen=True, tag="extended"):
    """The task's new deadline, `deadline_s` seconds from the receipt of this message."""

    run: Name
    round: Count
    kind: TaskKind
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)]


class Cancel(Message, frozen=True, tag="cancel"):
    """The task's result is not needed any more: the device discards the task."""

    run: Name
    round: Count
    kind: TaskKind
    reason: str


class ResultAck(Message, frozen=True, tag="ack"):
    """The coordinator has stored the result (accepted), or refused it for good (not accepted).

    With `keep` neither: the run is not served here now. The device keeps the result, and sends it again after the next
    Welcome of another epoch.
    """

    run: Name
    round: Count
    kind: TaskKind
    accepted: bool
    reason: str = ""
    keep: bool = False


class RunEnded(Message, frozen=True, tag="ended"):
    """No more tasks of this run will come."""

    run: Name
    status: str
    best: Count = 0  # its best round; 0: none


class Models(Message, frozen=True, tag="models"):
    """The states that a device's models are to have; it applies them again and again with the same outcome.

    A canary that is not named is removed, and the champion stays. Models that the device does not have are reported.
    """

    instance: str
    epoch: int
    states: Annotated[dict[ModelName, WantedState], Meta(max_length=MAX_MODELS)]


class SumInvite(Message, frozen=True, tag="suminvite"):
    """Take part in a sum of the results that devices keep."""

    sum: SumId
    terms: SumTerms


class SumPeers(Message, frozen=True, tag="sumpeers"):
    """The devices of a sum with their nonces, from which the neighbours follow, and the keys of these."""

    sum: SumId
    roster: Annotated[dict[Name, Nonce], Meta(max_length=MAX_SUM_DEVICES)]
    peers: Annotated[dict[Name, SumPublicKeys], Meta(max_length=MAX_NEIGHBOURS)]


class SumInbox(Message, frozen=True, tag="suminbox"):
    """The shares that neighbours have sent to a device. Masks are in common with these neighbours only."""

    sum: SumId
    sealed: Annotated[dict[Name, SealedShares], Meta(max_length=MAX_NEIGHBOURS)]


class SumSurvivors(Message, frozen=True, tag="sumsurvivors"):
    """The devices whose masked numbers are here: a bit for each device of the roster, in the order of names."""

    sum: SumId
    survived: Annotated[bytes, Meta(max_length=MAX_SUM_DEVICES // 8)]


class SumAsk(Message, frozen=True, tag="sumask"):
    """Reveal shares: of the own mask of devices that survived, of the key of the others, never both for one device.

    With the signatures of neighbours that have the same list of survivors.
    """

    sum: SumId
    signatures: Annotated[dict[Name, SumSignature], Meta(max_length=MAX_NEIGHBOURS)]


# --- blobs, both directions ---------------------------------------------------------------------------


UrlUse = Literal["", "ask", "used", "failed"]
"""The receiver's use of a URL for the blob: "" it cannot, "ask" it would, "used" it does now, "failed" URLs did not
work for it."""
Url = Annotated[str, Meta(max_length=4096)]


class UrlPiece(Struct, frozen=True, array_like=True):
    """Some chunks of a blob that its sender puts to a URL."""

    url: Url
    first: Count
    count: Annotated[int, Meta(ge=1, le=MAX_BLOB_CHUNKS)]


class BlobNack(Message, frozen=True, tag="want"):
    """A receiver's state of one blob: first request, acknowledgement and repeat request in one."""

    digest: str
    missing: tuple[tuple[int, int], ...]  # (first chunk, count), ascending; may be truncated, see transfer.py
    last_seq: int = 0  # highest send number seen; chunks sent before it that are still missing were lost
    stalled: bool = False  # nothing arrived for a while: chunks in flight are lost, too
    apart: bool = False  # the receiver has moved to its dedicated topic
    url: UrlUse = ""
    put: UrlPiece | None = None  # to be put there instead of sending chunks, if the sender can


class BlobUrl(Message, frozen=True, tag="url"):
    """The answer to a BlobNack: the whole blob can be fetched there."""

    digest: str
    url: Url


class BlobPut(Message, frozen=True, tag="put"):
    """The answer to `BlobNack.put`: the chunks are there, or (`stored` is false) they could not be put there."""

    digest: str
    first: Count
    count: Count
    stored: bool


class BlobAck(Message, frozen=True, tag="done"):
    """A receiver has the blob, verified and on disk."""

    digest: str


class UseDedicatedTopic(Message, frozen=True, tag="apart"):
    """To a receiver that delays the others: the remaining chunks come on its dedicated topic."""

    digest: str


TransferMessage = BlobNack | BlobUrl | BlobPut | BlobAck | UseDedicatedTopic
SumAnswer = SumKeys | SumShares | SumMasked | SumSigned | SumReveal | SumRefused
SumQuestion = SumInvite | SumPeers | SumInbox | SumSurvivors | SumAsk
FromDevice = (
    Hello | Progress | Result | Failed | Declined | ModelReport | BlobNack | BlobPut | BlobAck | DeviceState | SumAnswer
)
FromCoordinator = (
    Welcome
    | Refused
    | Task
    | Extended
    | Cancel
    | ResultAck
    | RunEnded
    | Models
    | BlobNack
    | BlobUrl
    | BlobAck
    | UseDedicatedTopic
    | CoordinatorState
    | SumQuestion
)
AnyMessage = FromDevice | FromCoordinator

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_class_list_decoder = msgspec.msgpack.Decoder(tuple[ClassName, ...])


def encode(message: AnyMessage) -> bytes:
    """Raises BadPayload when the message is larger than one message may be."""
    raw = bytes([WIRE_VERSION]) + _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise BadPayload(
            "FV2301", f"a {kind} message of {len(raw)} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes"
        )
    return raw


def encode_class_list(classes: tuple[str, ...]) -> bytes:
    """The content of the blob that `Hello.class_list` describes. Raises BadPayload when it is too large."""
    raw = _encoder.encode(classes)
    if len(raw) > MAX_CLASS_LIST_BYTES:
        count = len(classes)
        raise BadPayload(
            "FV2301", f"a list of {count} classes has {len(raw)} bytes, at most {MAX_CLASS_LIST_BYTES} may be"
        )
    return raw


def decode_class_list(raw: bytes) -> tuple[str, ...]:
    """Undo `encode_class_list`. Raises BadPayload."""
    try:
        return _class_list_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadPayload("FV2301", f"a list of classes of {len(raw)} bytes cannot be read: {error}") from error


def unread_hello(raw: bytes) -> str | None:
    """The instance of a hello that `decode` cannot read, so that the refusal can be sent; None for other messages."""
    if len(raw) > MAX_MESSAGE_BYTES:
        return None
    try:
        match msgspec.msgpack.decode(raw[1:]):
            case ["hello", str(instance), *_] if len(instance) <= _LONGEST_NAME:
                return instance
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    return None


def peek_tag(raw: bytes) -> bytes:
    """Return the tag of an encoded message without decoding it; empty if it is not written as `encode` writes it.

    >>> peek_tag(encode(BlobAck("blake3:00")))
    b'done'
    """
    start = 4 if raw[1:2] == b"\xdc" else 2  # up to 15 fields, one byte says how many
    head = raw[start : start + 1]
    return raw[start + 1 : start + 1 + (head[0] & 0x1F)] if head and head[0] >> 5 == 0b101 else b""


def inline_room(message: AnyMessage) -> int:
    """Return the bytes of inline blobs that fit into a message without any."""
    return max(0, min(INLINE_BYTES, MAX_MESSAGE_BYTES - len(encode(message)) - _INLINE_HEADS_BYTES))


def decode(raw: bytes) -> AnyMessage:
    """Undo `encode`. Raises PeerRefused for another version, BadPayload for anything unreadable."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadPayload("FV2301", f"a message of {len(raw)} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes")
    if not raw:
        raise BadPayload("FV2301", "an empty message")
    if raw[0] != WIRE_VERSION:
        raise PeerRefused(
            "FV1513", f"the other side speaks wire version {raw[0]}, this side speaks version {WIRE_VERSION}"
        )
    try:
        return _decoder.decode(raw[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the latter two through
        reason = str(error)[:REASON_LETTERS]  # it may quote a value, which may be as long as the message
        raise BadPayload("FV2301", f"a message of {len(raw)} bytes cannot be read: {reason}") from error
