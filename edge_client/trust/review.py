"""The entrance of every task: whether the device allows what its Program asks for, before anything runs."""

from edge_client.storage.device_storage import DeviceStorage
from edge_client.trust.flow import PhaseFlow, check_flow, check_images
from edge_client.trust.pins import pin_program
from fedvit.program import Program
from fedvit.wire.messages import Task

MAX_REMEMBERED = 64

_passed: dict[tuple[str, float], tuple[PhaseFlow, ...]] = {}
"""Programs that passed the flow check in this process, by digest and mask: a device gets the same one every round."""


def review_task(task: Task, program: Program, storage: DeviceStorage, *, min_mask: float = 0.0) -> None:
    """Raise NotAllowed, in one line, for a task that would send more of this device's images than is allowed.

    The Program and all its graphs must be in `storage`. `min_mask`: least share of patches left out of features.
    """
    key = (task.program, min_mask)
    if key not in _passed:
        flows = check_flow(program, storage.blobs.get, min_mask=min_mask)
        if len(_passed) >= MAX_REMEMBERED:
            _passed.clear()
        _passed[key] = flows
    if task.kind == "train":
        check_images(program, _passed[key], len(storage.data.train))
    pin_program(storage.vault, task.vault_run, program)
