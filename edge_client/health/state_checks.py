"""Checks of `edge-client doctor` on the device's files: its state and its images."""

import os
import secrets
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from edge_client.health.doctor_context import DoctorContext, Finding
from edge_client.health.status import Unusable, read_status
from edge_client.storage.state import split_file, status_file
from edge_client.storage.vault import Vault
from fedvit.blobs import ALGORITHM, is_whole
from fedvit.data.folder import DeviceData, TextSplit, why_passed_over
from fedvit.data.images import DAMAGED, limit_decoded_bytes
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import ConfigError, DataError, StorageFailed
from fedvit.policy import describe_policy, find_narrowness
from fedvit.quantities import format_count
from fedvit.transport.address import describe_error

MOST_NAMED = 5
DECODED_SIDE = 224
"""Pixels of an image that is decoded on trial."""


def check_state(context: DoctorContext) -> Iterator[Finding]:
    if context.state is None:
        yield Finding(check="state", level="ok", what="not checked: neither --data nor --state is given")
        return
    existed = context.state.exists()
    try:
        context.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = context.state / f".trial-{secrets.token_hex(8)}"
        trial.write_bytes(b"x")
        trial.unlink()
        if not existed:
            context.state.rmdir()
    except OSError as error:
        who = f"user {os.getuid()}" if hasattr(os, "getuid") else "this user"
        what = f"{context.state} cannot be written: {describe_error(error)}"
        hint = f"let {who} write there, or choose another folder with --state"
        yield Finding(check="state", level="error", what=what, hint=hint)
    else:
        yield Finding(check="state", level="ok", what=f"{context.state} can be written")


def check_policy(context: DoctorContext) -> Iterator[Finding]:
    """Show what the owner's policy allows, and warn of one that hardly any method satisfies."""
    policy = context.policy
    allowed, *_ = describe_policy(policy)
    yield Finding(check="policy", level="ok", what=f"{allowed}; methods: {policy.describe_methods()}")
    if why := find_narrowness(policy):
        yield Finding(check="policy", level="warning", what=why, hint="change policy.toml or the flag that says so")


def check_files(context: DoctorContext) -> Iterator[Finding]:
    """Verify every file of the state whose digest is known: memory cards flip bits without reporting an error."""
    check, state = "files", context.state
    if state is None or not state.exists():
        yield Finding(check=check, level="ok", what="not checked: there is no state yet")
        return
    blobs = [(path, f"{ALGORITHM}:{path.name}") for path in (state / "blobs").glob("*/*") if len(path.name) == 64]
    files = [*blobs, *Vault(state / "vault").files()]
    try:
        damaged = [path for path, digest in files if not is_whole(path, digest)]
    except StorageFailed as error:
        yield Finding(check=check, level="error", what=str(error), hint="let this user read the state")
        return
    if not damaged:
        yield Finding(check=check, level="ok", what=f"all {len(files)} files are undamaged")
        return
    what = f"{len(damaged)} of {len(files)} files are damaged: {_few(tuple(map(str, damaged)))}"
    hint = (
        "the next task fetches damaged blobs again, and a damaged vault returns to its previous round; "
        "replace the memory card"
    )
    yield Finding(check=check, level="warning", what=what, hint=hint)


def check_data(context: DoctorContext) -> Iterator[Finding]:
    if context.data is None:
        hint = "edge-client doctor --data FOLDER"
        yield Finding(check="data", level="warning", what="not checked: --data is not given", hint=hint)
        return
    layout = "images belong in FOLDER/CLASS/, or FOLDER/train/CLASS/ and FOLDER/test/CLASS/ (docs/data.md)"
    try:
        split = KeptSplit.load(split_file(context.state), context.test_share) if context.state else None
        images = DeviceData.open(
            context.data,
            split=split or RandomSplit(context.test_share),
            cache_bytes=0,
            decoded_bytes=limit_decoded_bytes(context.policy.budget.memory_bytes),
        )
    except (DataError, StorageFailed) as error:
        yield Finding(check="data", level="error", what=str(error), hint=layout)
        return
    what = f"{len(images.train)} training and {len(images.test)} test images"
    what += f" of {format_count(len(images.classes), 'class')}: {_few(images.classes)}"
    decoded, count = _decode_sample(images, context.decoded_images), len(images.train) + len(images.test)
    if decoded < count:
        what += f"; {decoded} of them were decoded on trial, --deep decodes all"
    yield Finding(check="data", level="ok", what=what)
    if unreadable := [*images.unusable, *images.train.failed.items(), *images.test.failed.items()]:
        parts = [(path, *reason.partition(": ")) for path, reason in unreadable]
        listed = _by_kind([(f"{path} ({detail})" if detail else str(path), kind) for path, kind, _, detail in parts])
        what = f"images that cannot be read and are skipped: {len(unreadable)}; {listed}"
        yield Finding(check="data", level="warning", what=what, hint="save them again as PNG or JPEG, or delete them")
    for reason, files in find_undecoded(context).items() if decoded < count else ():
        what = f"images that could not be decoded in the last run: {files.count}, {reason}: {_few(files.examples)}"
        yield Finding(check="data", level="warning", what=what, hint="save them again as PNG or JPEG, or delete them")
    if images.passed_over:
        listed = _by_kind([(str(path), why_passed_over(path)) for path in images.passed_over])
        what = f"not used: {len(images.passed_over)}; {listed}"
        hint = "images lie directly in a class folder, as PNG, JPEG, ... (not HEIC): convert or move them"
        yield Finding(check="data", level="warning", what=what, hint=hint)
    if images.empty:
        what = f"class folders without an image that can be read: {_few(images.empty)}; they do not count as classes"
        yield Finding(check="data", level="warning", what=what, hint="delete folders that are not classes")
    if not len(images.test):
        what = "there is no test image: the model cannot be evaluated on this device"
        yield Finding(check="data", level="warning", what=what, hint="give --test-share, or a folder test/CLASS/")


def _decode_sample(images: DeviceData, most: int | None) -> int:
    """Decode up to `most` images, spread evenly over all; return their number. `failed` of the data has the damaged.

    A text counts as decoded: it is read whole when it is opened.
    """
    places = [(split, row) for split in (images.train, images.test) for row in range(len(split))]
    if isinstance(images.train, TextSplit):
        return len(places)
    count = len(places) if most is None else min(most, len(places))
    for number in range(count):
        split, row = places[number * len(places) // count]
        split.load(np.array([row]), DECODED_SIDE)
    return count


def find_undecoded(context: DoctorContext) -> dict[str, Unusable]:
    """Return images with a good header that the running device could not decode, by reason, from its status file."""
    if context.state is None or context.data is None:
        return {}
    try:
        unusable = read_status(status_file(context.state)).doing.unusable
    except ConfigError:  # it has not run yet
        return {}
    return {reason: files for reason, files in unusable.items() if reason == DAMAGED}


def _by_kind(files: list[tuple[str, str]]) -> str:
    """Names of files by kind, the first ones of each."""
    kinds = defaultdict[str, list[str]](list)
    for name, kind in files:
        kinds[kind].append(name)
    return "; ".join(
        f"{kind}: {', '.join(names[:MOST_NAMED])}"
        + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
        for kind, names in sorted(kinds.items())
    )


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
