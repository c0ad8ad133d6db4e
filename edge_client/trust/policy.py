"""The owner's policy on the device: where it is read from, and the check of a task against it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.storage.ledger import Ledger
from edge_client.trust.known_graphs import check_known, read_publisher
from fedvit.errors import ConfigError, NotAllowed
from fedvit.policy import POLICY_FILE, Policy, SendPolicy, find_needs, make_policy, parse_policy, read_policy_file
from fedvit.program import Program
from fedvit.quantities import format_bytes, format_seconds
from fedvit.wire.messages import Task

FLAGS = {
    "updates": "send.updates",
    "features": "send.features",
    "min_mask": "send.min_mask",
    "class_counts": "send.class_counts",
    "sends_logs": "send.logs",
    "upload_budget": "send.upload",
    "max_bytes_per_day": "send.max_bytes_per_day",
    "methods": "train.methods",
    "publisher": "train.publisher",
    "hours": "train.hours",
    "quiet_hours": "train.quiet_hours",
    "memory_budget": "train.memory",
    "disk_budget": "train.disk",
    "flops_budget": "train.flops",
    "round_deadline": "train.round_deadline",
    "temperature_limit": "train.temperature_limit",
    "max_temperature": "train.max_temperature",
    "min_battery": "train.min_battery",
    "busy_file": "train.busy_file",
    "keep_features": "train.keep_features",
    "keep_runs": "train.keep_runs",
}
"""Parameters of `edge-client` that override the key of a table."""
NEVER_S = 86400.0
"""Time after which a device is asked again for something that its policy does not allow: the owner may change it."""


def load_policy(state: Path, file: Path | None, flags: Mapping[str, Any]) -> Policy:
    """Read the policy in `file`, or that of the state folder if there is one, and override it by flags.

    Raises ConfigError, naming the key and its value.
    """
    values: dict[str, Any] = {}
    where = file or state / POLICY_FILE
    if file or where.exists():
        values = parse_policy(read_policy_file(where), f"policy {where}")
    values = {table: dict(keys) if isinstance(keys, dict) else keys for table, keys in values.items()}
    for flag, path in FLAGS.items():
        if (value := flags.get(flag)) is not None:
            table, key = path.split(".")
            make_policy({table: {key: value}}, f"--{flag.replace('_', '-')}")
            if isinstance(keys := values.setdefault(table, {}), dict):
                keys[key] = value
    if isinstance(train := values.setdefault("train", {}), dict) and (publisher := read_publisher(state)):
        train.setdefault("publisher", publisher)
    return make_policy(values, f"policy {where}")


def check_token_policy(state: Path, text: str, *, replace: bool) -> None:
    """Check the policy of a join token, before the token is used up.

    Raises ConfigError if it cannot be used, or if the device has another one that is not to be replaced.
    """
    if not text:
        return
    make_policy(parse_policy(text, "policy of the token"), "policy of the token")
    file = state / POLICY_FILE
    if not replace and file.exists() and read_policy_file(file) != text:
        raise ConfigError(
            "FV1433",
            f"the token has another policy than this device ({file}); --replace-policy accepts that of the token",
        )


def check_policy(policy: Policy, program: Program, task: Task, *, ledger: Ledger, images: int) -> None:
    """Raise NotAllowed, naming the policy's key, if it does not allow a task of a device with so many training images.

    Counts by class are left out of an evaluation, which is no reason to refuse it.
    """
    send = policy.send
    if task.kind == "compare" and not policy.models.from_coordinator:
        raise NotAllowed("FV1432", "policy: from_coordinator = false, and the task compares models", NEVER_S)
    if policy.only_known:
        check_known(task, program, policy.train.publisher)
    if task.kind == "train":
        needs = find_needs(program)
        if needs.updates and send.updates == "none":
            raise NotAllowed("FV1432", 'policy: updates = "none", and the task sends an update', NEVER_S)
        if needs.updates and send.updates == "sum" and not needs.secure:
            why = 'policy: updates = "sum", and the task sends the update of this device alone'
            raise NotAllowed("FV1432", why, NEVER_S)
        if needs.features and send.features == "none":
            raise NotAllowed("FV1432", 'policy: features = "none", and the task sends features', NEVER_S)
        if needs.features and needs.find_denial((), send.least_mask):
            why = f"policy: min_mask = {send.min_mask:g}, and the features leave out {needs.mask:.3g} of the patches"
            raise NotAllowed("FV1432", why, NEVER_S)
    check_bytes_of_day(send, ledger, count_upload_bytes(program, images) if task.kind == "train" else 0)


def check_bytes_of_day(send: SendPolicy, ledger: Ledger, wanted: int) -> None:
    """Raise NotAllowed if so many bytes more do not fit into those that the policy allows in 24 hours."""
    most = send.max_bytes_per_day
    if most is not None and (wait_s := ledger.wait_s(wanted, most)):
        room = "never has room" if wait_s == math.inf else f"has room again in {format_seconds(wait_s)}"
        why = f"policy: max_bytes_per_day = {format_bytes(most)} {room} for {format_bytes(wanted)}"
        raise NotAllowed("FV1432", why, min(wait_s, NEVER_S))


def count_upload_bytes(program: Program, images: int) -> int:
    """Return how many bytes a training's result takes at most, without names, for a device with so many images."""
    # `MedianSampler` chooses `threshold` medians of a class, and half of the classes have the median or more; a class
    # with fewer is chosen in each epoch
    most_rows = [
        math.ceil(images * min(phase.epochs, max(1.0, 2 * phase.collect.threshold)))
        for phase in program.train
        if phase.collect
    ]
    rows = max(most_rows, default=0)
    return 4 * program.count_summed() + sum(
        math.prod(rows if size is None else size for size in shape) * np.dtype(dtype).itemsize
        for shape, dtype in program.upload_form().values()
    )
