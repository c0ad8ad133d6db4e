"""The server's half of a split model: which features it trains on, and that it trains as torch does."""

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerState, Upload
from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd
from fedvit.methods.rules.feature_training import FeatureTraining
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.tensors import Array, TensorFile, Tensors, pack, unpack
from fedvit.updates import Decoded, make_codec
from profiles.probes.host import peak_rss_bytes
from tests.support.forked import FORKS
from tests.support.method_steps import make_context

CLASSES, WIDTH = 4, 16
OPTIONS = {"image_size": 32, "patch_size": 8, "width": WIDTH, "depth": 3, "heads": 2}
RULE = FeatureTraining(epochs=2, batch_size=1000, optimizer=AdamW(), lr=0.01, keep=True)


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return build_vit(SMALL, CLASSES, seed=0, options=OPTIONS)


def server_state(vit: PatchViT) -> ServerState:
    """Blocks 1 and 2, the norm and the head."""
    mine = ("blocks.1.", "blocks.2.", "norm.", "head.")
    return ServerState({name: value.numpy().copy() for name, value in vit.tensors().items() if name.startswith(mine)})


def features(seed: int, items: int = 6, tokens: int = 5, block: int = 1) -> Tensors:
    """What a device uploads whose own blocks end before `block`."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(items, tokens, WIDTH)).astype(np.float32)
    return {f"features.{block}": values, "labels": draw.integers(0, CLASSES, items)}


class Shelf:
    """Uploads by digest; notes what is asked for."""

    def __init__(self) -> None:
        self.content: dict[str, Mapping[str, Array]] = {}
        self.loaded: list[str] = []

    def upload(self, device: str, tensors: Mapping[str, Array]) -> Upload:
        digest = f"blake3:{len(self.content)}"
        self.content[digest] = tensors
        return Upload(device, len(tensors["labels"]), digest, lambda: self.load(digest))

    def load(self, digest: str) -> Mapping[str, Array]:
        self.loaded.append(digest)
        return self.content[digest]

    def context(self, vit: PatchViT, number: int = 1, *, seed: int = 0, lr_scale: float = 1.0) -> RoundContext:
        return make_context(vit, number)._replace(seed=seed, lr_scale=lr_scale, load=self.load)


def torch_training(
    vit: PatchViT, shelves: list[Tensors], optimizer: Optimizer, rates: list[float]
) -> tuple[Tensors, list[float]]:
    """The same as a torch user writes it: timm's own blocks, one full batch per step, one optimizer throughout."""
    model = build_vit(SMALL, CLASSES, seed=0, options=OPTIONS).vit
    mine = {name: value for name, value in model.named_parameters() if name in server_state(vit).tensors}
    rule = optimizer.in_torch(list(mine.values()), rates[0])
    losses = []
    for rate, shelf in zip(rates, shelves, strict=True):
        rule.param_groups[0]["lr"] = rate
        rule.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits(model, shelf), torch.from_numpy(shelf["labels"]))
        loss.backward()
        rule.step()
        losses.append(float(loss.detach()))
    return {name: value.detach().numpy() for name, value in mine.items()}, losses


def logits(model: VisionTransformer, shelf: Tensors) -> torch.Tensor:
    [(name, values)] = [(name, values) for name, values in shelf.items() if name != "labels"]
    first = int(name.removeprefix("features."))
    return model.forward_head(model.norm(model.blocks[first:](torch.from_numpy(values))))


def join_rows(*shelves: Tensors) -> Tensors:
    return {name: np.concatenate([shelf[name] for shelf in shelves]) for name in shelves[0]}


def assert_close(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=2e-5, err_msg=name)


def furthest(one: Tensors, other: Tensors) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.05), MomentumSgd(momentum=0.9), Sgd()])
def test_rounds_with_a_saved_state_equal_one_run_of_torch(vit: PatchViT, optimizer: Optimizer) -> None:
    """Three rounds of two epochs of one full batch are six steps of one torch optimizer that never stopped, with the
    schedule's rates. Between the rounds the state goes through the bytes of a file, as on a server."""
    rule = replace(RULE, optimizer=optimizer)
    scales = [1.0, 0.5, 0.25]
    shelf, state, reported = Shelf(), server_state(vit), []
    shelves = [join_rows(features(1), features(2))] * 6
    for number, scale in enumerate(scales, start=1):
        uploads = [shelf.upload("a", features(1)), shelf.upload("b", features(2))]
        state, figures = rule.close(state, uploads, shelf.context(vit, number, lr_scale=scale))
        reported.append(figures["server_loss"])
        state = replace(state, tensors=unpack(pack(state.tensors)), memory=unpack(pack(state.memory)))
    want, losses = torch_training(vit, shelves, optimizer, [0.01 * scale for scale in scales for _ in range(2)])
    assert_close(state.tensors, want)
    np.testing.assert_allclose(reported, losses[1::2], rtol=1e-4)  # the last epoch's


def test_an_optimizer_that_forgot_would_go_elsewhere(vit: PatchViT) -> None:
    """The counterpart of the test above: without its memory AdamW takes other steps."""
    shelf = Shelf()
    first, _ = RULE.close(server_state(vit), [shelf.upload("a", features(1))], shelf.context(vit, 1))
    upload = shelf.upload("a", features(2))
    kept, _ = RULE.close(first, [upload], shelf.context(vit, 2))
    forgot, _ = RULE.close(replace(first, memory={}), [upload], shelf.context(vit, 2))
    assert furthest(kept.tensors, forgot.tensors) > 1e-3


def test_the_state_given_is_not_written_to(vit: PatchViT) -> None:
    """A round that fails is repeated from it."""
    shelf, state = Shelf(), server_state(vit)
    first, _ = RULE.close(state, [shelf.upload("a", features(1))], shelf.context(vit, 1))
    before = pack(first.tensors), pack(first.memory), dict(first.uploads)
    RULE.close(first, [shelf.upload("b", features(2))], shelf.context(vit, 2))
    assert (pack(first.tensors), pack(first.memory), first.uploads) == before
    assert pack(state.tensors) == pack(server_state(vit).tensors)


def test_all_tensors_of_the_servers_half_move_and_no_other(vit: PatchViT) -> None:
    shelf, state = Shelf(), server_state(vit)
    before = pack({name: value.numpy() for name, value in vit.tensors().items()})
    after, _ = RULE.close(state, [shelf.upload("a", features(1))], shelf.context(vit))
    assert list(after.tensors) == list(state.tensors)
    for name, value in after.tensors.items():
        assert np.abs(value - state.tensors[name]).max() > 0, name
        assert (value.dtype, value.shape) == (state.tensors[name].dtype, state.tensors[name].shape)
    assert pack({name: value.numpy() for name, value in vit.tensors().items()}) == before


@pytest.mark.parametrize("batch_size", [1, 4, 7, 12, 100])
def test_every_item_counts_once_per_epoch(vit: PatchViT, batch_size: int) -> None:
    """At a rate of 1e-30 nothing moves, so the reported loss is the mean cross-entropy of all 12 items, whatever the
    batches: short last ones weigh less."""
    rule = replace(RULE, batch_size=batch_size, lr=1e-30, optimizer=Sgd())
    shelf = Shelf()
    uploads = [shelf.upload("a", features(1, 5)), shelf.upload("b", features(2, 7))]
    _, figures = rule.close(server_state(vit), uploads, shelf.context(vit))
    everything = join_rows(features(1, 5), features(2, 7))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(logits(vit.vit, everything), torch.from_numpy(everything["labels"]))
    assert figures["server_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert figures["server_features"] == 12


# --- determinism --------------------------------------------------------------------------------------


def outcome(vit: PatchViT, **context: Any) -> bytes:
    """Several small batches, whose order is drawn."""
    shelf = Shelf()
    uploads = [shelf.upload(device, features(number)) for number, device in enumerate("abc")]
    state, _ = replace(RULE, batch_size=4).close(server_state(vit), uploads, shelf.context(vit, **context))
    return pack(state.tensors)


def test_the_same_seed_and_round_give_the_same_bits(vit: PatchViT) -> None:
    first = outcome(vit, number=2, seed=5)
    torch.manual_seed(123)
    np.random.seed(123)
    assert outcome(vit, number=2, seed=5) == first
    assert outcome(vit, number=2, seed=6) != first
    assert outcome(vit, number=3, seed=5) != first


def test_uploads_that_tell_a_class_distribution_are_counted(vit: PatchViT) -> None:
    """2 and 2 features of two classes are equal, 3 and 1 are not; another round's upload is not counted again."""
    shelf = Shelf()
    equal = {**features(1, 4), "labels": np.array([0, 2, 2, 0])}
    unequal = {**features(2, 4), "labels": np.array([1, 1, 3, 1])}
    state, figures = RULE.close(
        server_state(vit), [shelf.upload("a", equal), shelf.upload("b", unequal)], shelf.context(vit)
    )
    assert (figures["uploaded_features"], figures["unequal_uploads"]) == (8, 1)
    _, figures = RULE.close(state, [shelf.upload("c", equal)], shelf.context(vit, 2))
    assert figures["unequal_uploads"] == 0


# --- the store ----------------------------------------------------------------------------------------


def test_a_device_that_comes_again_replaces_its_features(vit: PatchViT) -> None:
    """Round 1: a and b. Round 2: a again, and c. The store then holds a's new 3 items, b's 6 and c's 4: 13; a's old
    ones are gone, not joined."""
    shelf = Shelf()
    old, other = shelf.upload("a", features(1, 5)), shelf.upload("b", features(2, 6))
    first, figures = RULE.close(server_state(vit), [old, other], shelf.context(vit, 1))
    assert first.uploads == {"a": old.digest, "b": other.digest}
    assert (figures["server_features"], figures["stored_devices"]) == (11, 2)
    new, third = shelf.upload("a", features(3, 3)), shelf.upload("c", features(4, 4))
    shelf.loaded.clear()
    second, figures = RULE.close(first, [new, third], shelf.context(vit, 2))
    assert second.uploads == {"a": new.digest, "b": other.digest, "c": third.digest}
    assert (figures["server_features"], figures["stored_devices"]) == (13, 3)
    assert set(shelf.loaded) == {new.digest, other.digest, third.digest}
    shelves = [join_rows(features(1, 5), features(2, 6))] * 2 + [
        join_rows(features(3, 3), features(2, 6), features(4, 4))
    ] * 2
    want, _ = torch_training(vit, shelves, RULE.optimizer, [0.01] * 4)
    assert_close(second.tensors, want)


def test_latest_uses_the_features_of_this_round_alone(vit: PatchViT) -> None:
    rule, shelf = replace(RULE, keep=False), Shelf()
    first, _ = rule.close(server_state(vit), [shelf.upload("a", features(1))], shelf.context(vit, 1))
    upload = shelf.upload("b", features(2, 4))
    shelf.loaded.clear()
    second, figures = rule.close(first, [upload], shelf.context(vit, 2))
    assert second.uploads == {"b": upload.digest}
    assert (figures["server_features"], figures["stored_devices"]) == (4, 1)
    assert set(shelf.loaded) == {upload.digest}
    want, _ = torch_training(vit, [features(1)] * 2 + [features(2, 4)] * 2, rule.optimizer, [0.01] * 4)
    assert_close(second.tensors, want)


def store_rows(devices: str, state: ServerState) -> bool:
    """Whether the store holds these devices, in this order."""
    return list(state.uploads) == list(devices)


def test_the_oldest_round_makes_room(vit: PatchViT) -> None:
    """Six items of 5 x 16 floats and a label are 1968 bytes; the limit holds three. Round 1: a, b, c. Round 2: d, so a
    has to go, the first of the oldest. Round 3: b again and e, so c goes, which is older than d."""
    rule, shelf, seen = replace(RULE, store_bytes=3 * 1968), Shelf(), []
    state = server_state(vit)
    for number, devices in enumerate(["abc", "d", "be"], start=1):
        uploads = [shelf.upload(device, features(number + ord(device))) for device in devices]
        state, figures = rule.close(state, uploads, shelf.context(vit, number))
        seen.append((figures["stored_devices"], figures["stored_bytes"], figures["dropped_devices"]))
        assert store_rows(["abc", "bcd", "dbe"][number - 1], state)
    assert seen == [(3, 5904, 0), (3, 5904, 1), (3, 5904, 1)]


def test_what_was_dropped_is_not_trained_on(vit: PatchViT) -> None:
    rule, shelf = replace(RULE, store_bytes=2000), Shelf()
    first, _ = rule.close(server_state(vit), [shelf.upload("a", features(1))], shelf.context(vit, 1))
    second, figures = rule.close(first, [shelf.upload("b", features(2))], shelf.context(vit, 2))
    assert figures["server_features"] == 6
    want, _ = torch_training(vit, [features(1)] * 2 + [features(2)] * 2, rule.optimizer, [0.01] * 4)
    assert_close(second.tensors, want)


def test_a_round_alone_may_exceed_the_limit(vit: PatchViT) -> None:
    """What this round brought is trained on, however large; in the next it is the oldest."""
    rule, shelf = replace(RULE, store_bytes=1), Shelf()
    uploads = [shelf.upload(device, features(number)) for number, device in enumerate("ab")]
    first, figures = rule.close(server_state(vit), uploads, shelf.context(vit, 1))
    assert store_rows("ab", first)
    assert (figures["server_features"], figures["dropped_devices"]) == (12, 0)
    second, figures = rule.close(first, [shelf.upload("c", features(3))], shelf.context(vit, 2))
    assert store_rows("c", second)
    assert (figures["server_features"], figures["dropped_devices"]) == (6, 2)


# --- features in files --------------------------------------------------------------------------------


def in_file(folder: Path, tensors: Tensors, codec: str) -> Mapping[str, Array]:
    """An upload as the server keeps it."""
    values = {name: value for name, value in tensors.items() if name != "labels"}
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    file.write_bytes(pack({**make_codec(codec).encode(values, samples=True), "labels": tensors["labels"]}))
    return Decoded(TensorFile(file), {})


def concatenating(
    vit: PatchViT, uploads: list[Mapping[str, Array]], rule: FeatureTraining, context: RoundContext
) -> tuple[Tensors, float]:
    """The rule with all features of a kind concatenated in memory: the plain way, which needs memory for all."""
    grouped: dict[tuple[str, int], list[Mapping[str, Array]]] = {}
    for upload in uploads:
        (name,) = upload.keys() - {"labels"}
        grouped.setdefault((name, upload[name].shape[1]), []).append(upload)
    buckets = [
        (name, np.concatenate([each[name] for each in group]), np.concatenate([each["labels"] for each in group]))
        for (name, _), group in sorted(grouped.items())
    ]
    values = {name: torch.tensor(value, requires_grad=True) for name, value in server_state(vit).tensors.items()}
    optimizer = rule.optimizer.in_torch(list(values.values()), rule.lr)
    draw = np.random.default_rng([context.seed, context.round])
    for _ in range(rule.epochs):
        picks, losses = [], []
        for number, (_, _, labels) in enumerate(buckets):
            order = draw.permutation(len(labels))
            picks += [(number, order[at : at + rule.batch_size]) for at in range(0, len(order), rule.batch_size)]
        for position in draw.permutation(len(picks)):
            number, rows = picks[position]
            name, everything, labels = buckets[number]
            block = int(name.removeprefix("features."))
            batch = torch.from_numpy(everything[rows])
            optimizer.zero_grad()
            logits = vit.call(values, lambda vit, b=batch, at=block: vit.classify(vit.run_to_class(b, at)))
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[rows]))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()) * len(rows))
    items = sum(len(labels) for _, _, labels in buckets)
    return {name: value.detach().numpy() for name, value in values.items()}, sum(losses) / items


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_features_in_files_train_bit_by_bit_as_all_of_them_in_memory(vit: PatchViT, codec: str, tmp_path: Path) -> None:
    """Five devices, two splits, two mask ratios, one without a feature; two epochs of small batches."""
    kinds = [(7, 5, 1), (6, 3, 1), (9, 5, 2), (4, 5, 1), (0, 5, 1)]
    contents = [features(seed, items, tokens, block) for seed, (items, tokens, block) in enumerate(kinds)]
    rule, shelf = replace(RULE, batch_size=4), Shelf()
    uploads = [shelf.upload(name, in_file(tmp_path, each, codec)) for name, each in zip("abcde", contents, strict=True)]
    context = shelf.context(vit, 3, seed=5)
    state, figures = rule.close(server_state(vit), uploads, context)
    decoded = [unpack(pack(upload.load())) for upload in uploads]
    want, loss = concatenating(vit, list(decoded), rule, context)
    assert pack(state.tensors) == pack(want)
    assert figures["server_loss"] == loss
    assert figures["stored_bytes"] == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_no_file_stays_open(vit: PatchViT, tmp_path: Path) -> None:
    """While it trains one batch, at most the file of the next one's current item is open."""
    rule, shelf = replace(RULE, batch_size=4, epochs=1), Shelf()
    uploads = [shelf.upload(str(number), in_file(tmp_path, features(number), "none")) for number in range(40)]
    seen: list[int] = []
    context = shelf.context(vit)._replace(progress=lambda line: seen.append(len(open_in(tmp_path))))
    rule.close(server_state(vit), uploads, context)
    assert len(seen) == 60
    assert max(seen) <= 1


def open_in(folder: Path) -> list[str]:
    """Files of a folder that this process has open or mapped."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            links.append(os.readlink(entry.path))
        except FileNotFoundError:  # it was closed meanwhile
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*links, *maps) if str(folder) in text]


def growth_of_memory(folder: Path, answer: Connection) -> None:
    """In a process of its own: how far a round over all files of the folder lifts the peak above one over one file."""
    vit = build_vit(SMALL, CLASSES, seed=0, options={**OPTIONS, "width": 64})
    tensors = {name: value.numpy() for name, value in vit.tensors().items() if name.startswith(("blocks.2.", "head."))}
    rule, shelf = replace(RULE, batch_size=16, epochs=1), Shelf()
    files = sorted(folder.iterdir())

    def peak_of(some: list[Path]) -> int:
        uploads = [shelf.upload(file.name, TensorFile(file)) for file in some]
        rule.close(ServerState(tensors), uploads, shelf.context(vit))
        gc.collect()
        return peak_rss_bytes() or 0

    first = peak_of(files[:1])
    answer.send(peak_of(files) - first)


def test_memory_does_not_grow_with_the_features(tmp_path: Path) -> None:
    """One upload of 1 MiB of features, then 16 of them: the peak of resident memory rises by less than half of what
    came. Mapped files would count, and so would a copy."""
    for number in range(16):
        values = np.random.default_rng(number).normal(size=(32, 128, 64)).astype(np.float32)
        content = {"features.2": values, "labels": np.arange(32) % CLASSES}
        (tmp_path / f"{number}.safetensors").write_bytes(pack(content))
    assert grown(growth_of_memory, tmp_path) < 8 << 20


def grown(measure: Callable[[Path, Connection], None], folder: Path) -> int:
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=measure, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        growth: int = ours.recv()
    finally:
        process.join()
    return growth


# --- devices with other mask ratios -------------------------------------------------------------------


def test_features_of_different_lengths_do_not_share_a_batch(vit: PatchViT) -> None:
    """Devices a and c send 5 tokens per item, b 3: an epoch is a step on a's and c's items together and one on b's,
    in an order that is drawn. One of the two orders it must be."""
    rule, shelf = replace(RULE, epochs=1), Shelf()
    a, b, c = features(1, 4, tokens=5), features(2, 6, tokens=3), features(3, 2, tokens=5)
    uploads = [shelf.upload(device, tensors) for device, tensors in (("a", a), ("b", b), ("c", c))]
    state, figures = rule.close(server_state(vit), uploads, shelf.context(vit))
    assert figures["server_features"] == 12
    orders = [
        torch_training(vit, shelves, rule.optimizer, [0.01] * 2)[0]
        for shelves in ([join_rows(a, c), b], [b, join_rows(a, c)])
    ]
    assert furthest(orders[0], orders[1]) > 1e-3
    assert min(furthest(state.tensors, order) for order in orders) < 1e-4


# --- devices with other splits ------------------------------------------------------------------------


def bytes_of(tensors: Tensors, prefix: str) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "optimizer", [AdamW(weight_decay=0.05), MomentumSgd(weight_decay=0.05), Sgd(weight_decay=0.05)]
)
def test_blocks_below_the_entry_do_not_move(vit: PatchViT, optimizer: Optimizer) -> None:
    """Features that enter block 2 teach block 2, norm and head, as in torch with those alone. Block 1 stays bit by bit:
    no weight decay, and nothing to remember of it."""
    rule, shelf, state = replace(RULE, optimizer=optimizer), Shelf(), server_state(vit)
    late = features(1, block=2)
    after, figures = rule.close(state, [shelf.upload("a", late)], shelf.context(vit))
    assert bytes_of(after.tensors, "blocks.1.") == bytes_of(state.tensors, "blocks.1.")
    assert not [name for name in after.memory if "/blocks.1." in name]
    want, losses = torch_training(vit, [late] * 2, optimizer, [0.01] * 2)
    assert_close(after.tensors, want)
    assert figures["server_loss"] == pytest.approx(losses[-1], rel=1e-4)
    for name, value in after.tensors.items():
        if not name.startswith("blocks.1."):
            assert np.abs(value - state.tensors[name]).max() > 0, name


def test_momentum_does_not_carry_a_block_on(vit: PatchViT) -> None:
    """Round 1 moves block 1; in round 2 all features enter behind it: it stays, with all that is remembered of it."""
    rule, shelf = replace(RULE, keep=False), Shelf()
    first, _ = rule.close(server_state(vit), [shelf.upload("a", features(1, block=1))], shelf.context(vit, 1))
    assert bytes_of(first.tensors, "blocks.1.") != bytes_of(server_state(vit).tensors, "blocks.1.")
    second, _ = rule.close(first, [shelf.upload("b", features(2, block=2))], shelf.context(vit, 2))
    assert bytes_of(second.tensors, "blocks.1.") == bytes_of(first.tensors, "blocks.1.")
    assert bytes_of(second.tensors, "blocks.2.") != bytes_of(first.tensors, "blocks.2.")
    remembered = {name for name in first.memory if "/blocks.1." in name}
    assert remembered
    for name in remembered:
        assert second.memory[name].tobytes() == first.memory[name].tobytes(), name


def test_features_of_different_splits_do_not_share_a_batch(vit: PatchViT) -> None:
    """Two splits and two lengths: a and d enter block 1 with 5 tokens, b with 3, c enters block 2 with 5. An epoch is
    three steps, in an order that is drawn. One of the six orders it must be."""
    rule, shelf = replace(RULE, epochs=1, optimizer=Sgd(), lr=0.1), Shelf()
    a, b, c, d = features(1, 4), features(2, 6, tokens=3), features(3, 5, block=2), features(4, 2)
    uploads = [shelf.upload(device, tensors) for device, tensors in zip("abcd", (a, b, c, d), strict=True)]
    state, figures = rule.close(server_state(vit), uploads, shelf.context(vit))
    assert (figures["server_features"], figures["stored_devices"]) == (17, 4)
    orders = [
        torch_training(vit, list(shelves), rule.optimizer, [0.1] * 3)[0]
        for shelves in permutations([join_rows(a, d), b, c])
    ]
    assert min(furthest(one, other) for one, other in combinations(orders, 2)) > 1e-4
    assert min(furthest(state.tensors, order) for order in orders) < 1e-5


@pytest.mark.parametrize("batch_size", [1, 4, 5, 100])
def test_every_item_counts_once_wherever_it_enters(vit: PatchViT, batch_size: int) -> None:
    """At a rate of 1e-30 nothing moves: the loss is the mean over all 4 + 6 + 5 items, not over kinds or batches."""
    rule, shelf = replace(RULE, batch_size=batch_size, lr=1e-30, optimizer=Sgd()), Shelf()
    parts = [features(1, 4), features(2, 6, tokens=3), features(3, 5, block=2)]
    uploads = [shelf.upload(device, tensors) for device, tensors in zip("abc", parts, strict=True)]
    _, figures = rule.close(server_state(vit), uploads, shelf.context(vit))
    with torch.no_grad():
        losses = [
            float(torch.nn.functional.cross_entropy(logits(vit.vit, part), torch.from_numpy(part["labels"])))
            for part in parts
        ]
    assert figures["server_loss"] == pytest.approx((4 * losses[0] + 6 * losses[1] + 5 * losses[2]) / 15, rel=1e-5)


def test_a_device_of_another_split_replaces_its_own_features_alone(vit: PatchViT) -> None:
    """Device a's features enter block 1 in round 1 and block 2 in round 2; a file lies between the rounds."""
    shelf = Shelf()
    old, other = shelf.upload("a", features(1, 5)), shelf.upload("b", features(2, 6, block=2))
    first, _ = RULE.close(server_state(vit), [old, other], shelf.context(vit, 1))
    kept = replace(first, tensors=unpack(pack(first.tensors)), memory=unpack(pack(first.memory)))
    new = shelf.upload("a", features(3, 3, block=2))
    second, figures = RULE.close(kept, [new], shelf.context(vit, 2))
    assert second.uploads == {"a": new.digest, "b": other.digest}
    assert (figures["server_features"], figures["stored_devices"]) == (9, 2)
    assert bytes_of(second.tensors, "blocks.1.") == bytes_of(first.tensors, "blocks.1."), "nothing enters block 1 now"
    third = features(4, 4)
    back, figures = RULE.close(second, [shelf.upload("c", third)], shelf.context(vit, 3))
    assert figures["server_features"] == 13
    assert bytes_of(back.tensors, "blocks.1.") != bytes_of(second.tensors, "blocks.1.")


# --- nothing to train on ------------------------------------------------------------------------------


def test_a_round_without_uploads(vit: PatchViT) -> None:
    """Also when the store holds features of earlier rounds: nobody answered, and the round is asked again."""
    shelf = Shelf()
    state, _ = RULE.close(server_state(vit), [shelf.upload("a", features(1))], shelf.context(vit, 1))
    with pytest.raises(EmptyCohort):
        RULE.close(state, [], shelf.context(vit, 2))


def test_uploads_without_a_feature(vit: PatchViT) -> None:
    """Devices whose images could not be decoded when it came to collecting."""
    shelf = Shelf()
    uploads = [shelf.upload(device, features(1, 0)) for device in "ab"]
    with pytest.raises(EmptyCohort):
        RULE.close(server_state(vit), uploads, shelf.context(vit, 3))


def test_one_upload_without_a_feature_does_not_stop_the_round(vit: PatchViT) -> None:
    shelf = Shelf()
    uploads = [shelf.upload("a", features(1, 0)), shelf.upload("b", features(2, 6))]
    state, figures = RULE.close(server_state(vit), uploads, shelf.context(vit))
    assert figures["server_features"] == 6
    want, _ = torch_training(vit, [features(2, 6)] * 2, RULE.optimizer, [0.01] * 2)
    assert_close(state.tensors, want)
