"""The start of a run: its first devices, its classes, its Program and its newest state."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing

from coordinator.compute.integrity import VerifiedBlobs, essential
from coordinator.compute.messages import Prepare
from coordinator.config import BlobsConfig, RunConfig
from coordinator.rounds.parts import RunParts, make_object_store
from coordinator.rounds.validation import listed, same_but_for_case
from fedvit.errors import ConfigError
from fedvit.quantities import format_count
from fedvit.resources import Budget
from fedvit.wire.limits import LEAST_PAYLOAD_BYTES
from fedvit.wire.topics import TOPIC_BYTES
from fedvit.wire.transfer import CHUNK_HEAD_BYTES

log = logging.getLogger(__name__)


def check_broker(parts: RunParts) -> None:
    """Raises ConfigError if the broker says that it takes less than a blob's chunk needs."""
    announced, chunk = parts.transport.announced_packet_bytes, parts.state.blobs.chunk_bytes
    needed = chunk + CHUNK_HEAD_BYTES + TOPIC_BYTES
    if announced is not None and announced < needed:
        remedy = f"set max_payload_bytes = {announced - TOPIC_BYTES} in [broker]"
        if announced < LEAST_PAYLOAD_BYTES + TOPIC_BYTES:
            remedy = f"raise its limit to {LEAST_PAYLOAD_BYTES + TOPIC_BYTES} at least"
        raise ConfigError(
            "FV1212",
            f"the broker takes packets of {announced} bytes, and those with chunks of blobs have {needed}: {remedy}",
        )


def wait_for_devices(parts: RunParts, checked: Future[None]) -> None:
    """Wait for the first devices, and until the whole record has been `checked`. If the configuration lists no classes,
    the run takes those of the devices. Devices of a resumed run that were revoked are not waited for."""
    state, number = parts.state, parts.state.config.devices
    asked = {device for record in state.store.rounds.read_open(state.run) for device in record.cohort}
    asked |= state.store.devices.read_asked(state.run).keys()

    def enough() -> bool:
        online = state.presence.count_online()
        wanted = max(1, number - len(asked & state.revoked))
        state.doing = f"waiting for devices: {online} of {wanted} are online"
        if unwilling := len(state.not_allowing):
            state.doing += f", {unwilling} do not allow what {state.config.method} needs"
        if checked.done():
            checked.result()
        elif online >= wanted:
            state.doing = "checking the whole record"
        return online >= wanted and checked.done()

    oldest = state.config.min_device_version
    requirement = f", each with fedvit {oldest} or newer" if oldest else ""
    parts.operator_log(f"waiting for {number} device{'s' if number > 1 else ''}{requirement}")
    parts.inbox.pump(enough)
    if not state.classes:
        _take_classes(parts)
    check_class_count(state.config, state.classes)
    state.store.runs.update(state.run, classes=list(state.classes), status="running")


def check_class_count(config: RunConfig, classes: Sequence[str]) -> None:
    """Raise ConfigError if a run cannot have so many classes."""
    if config.task == "regression":
        if len(classes) != 1:
            raise ConfigError("FV1504", f"task regression has one number, the devices have {list(classes)}")
    elif len(classes) < config.least_classes:
        raise ConfigError("FV1504", f"a run needs at least two classes, the devices have {list(classes)}")


def _take_classes(parts: RunParts) -> None:
    """Take the classes that the devices announced."""
    state = parts.state
    brought = {name: state.presence[name].hello.classes for name in state.presence.online()}
    state.classes = tuple(sorted({name for classes in brought.values() for name in classes}))
    parts.operator_log(
        f"the run has {format_count(len(state.classes), 'class')}: {listed(state.classes)}, "
        f"as announced by {listed(list(brought))}; set `classes` in the configuration to choose them"
    )
    if alike := same_but_for_case(state.classes):
        parts.operator_log(f"warning: {listed(alike)} differ only in upper and lower case, and are different classes")
    empty = {name for device in brought for name in state.presence[device].hello.empty_folders}
    if left_out := sorted(empty - set(state.classes)):
        which = "class folder" if len(left_out) == 1 else "class folders"
        parts.operator_log(f"{which} without an image on any device, not of this run: {listed(left_out)}")
    for device, classes in brought.items():
        log.info("classes taken", extra={"device": device, "classes": len(classes)})


def prepare(parts: RunParts) -> None:
    """Make the Program and load the newest state."""
    state = parts.state
    fetch_mirrored(parts)
    hellos = [state.presence[name].hello for name in state.presence.online()]
    prepared = parts.ask(
        Prepare(
            classes=state.classes,
            budgets=any(hello.profile.budget != Budget() for hello in hellos),
            copies=parts.recovery.copies(),
        )
    )
    state.store.runs.update(state.run, program=prepared.program, protocol=prepared.protocol)
    parts.mirror(essential(prepared.saved))  # it may have been recomputed
    state.saved = prepared.saved
    parts.membership.use_needs(state.find_needs(state.program(prepared.program)))
    for number in prepared.remade:
        parts.operator_log(f"round {number}: its state was recomputed, with the same numbers")
    parts.recovery.restoring = False
    log.info(
        "program ready",
        extra={"program": prepared.program, "groups": prepared.groups, "accelerator": prepared.accelerator},
    )


def fetch_mirrored(parts: RunParts) -> None:
    """Fetch from mirrors what an earlier coordinator of the run, or of the one that it starts from, had on its own
    disk; and put there what only this disk has."""
    state, objects = parts.state, parts.objects
    if objects and objects.is_mirror:
        state.doing = "fetching files of the run from its mirror"
        parts.inbox.in_background(objects.mirror.fetch)
        parts.inbox.in_background(objects.mirror.put_all)
    if (earlier := state.config.start_from) is not None:
        config = BlobsConfig(**state.store.runs.read(earlier).config.get("blobs", {}))
        here = VerifiedBlobs(parts.folder.parent / earlier / "blobs")
        if config.mirror and (other := make_object_store(config, earlier, here)):
            with closing(other):
                parts.inbox.in_background(other.mirror.fetch)
