import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_client.storage.models import (
    MAX_WITHDRAWN,
    DeviceModel,
    DeviceModels,
    ModelList,
    ModelState,
)
from fedvit.comparison import Comparison
from fedvit.errors import ConfigError, Damaged, StorageFailed
from fedvit.files import sync_file, sync_folder
from tests.support.codes import has_code
from tests.support.power import after_power_cut, recorded, tree, write_tree

FILES = ("card.json", "model.onnx")


def model(round_number: int, state: ModelState = "trained", run: str = "street") -> DeviceModel:
    return DeviceModel(run=run, round=round_number, method="fedavg", state=state, changed_s=1.0)


def new_bundle(models: DeviceModels, number: int) -> Path:
    """Write a complete bundle, as `write_bundle` leaves it."""
    folder = models.new_folder()
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of {number}")
        sync_file(folder / name)
    sync_folder(folder)
    sync_folder(folder.parent)
    return folder


def add(models: DeviceModels, number: int, state: ModelState = "trained") -> str:
    return models.add(model(number, state), new_bundle(models, number)).name


def states(models: DeviceModels) -> dict[str, str]:
    return {entry.name: entry.state for entry in models.read().models}


def folders(models: DeviceModels) -> set[str]:
    return {path.name for path in models.folder.iterdir() if path.is_dir()}


def test_full_disk_leaves_no_half_bundle(tmp_path: Path) -> None:
    models = DeviceModels(tmp_path / "state")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageFailed):
            models.add_files(model(1, "challenger"), {"card.json": b"{}", "model.onnx": bytes(2000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folders(models) == set()
    models.add_files(model(1, "challenger"), {"card.json": b"{}", "model.onnx": bytes(2000)})
    assert folders(models) == {"street-1"}


def test_life_of_three_models(tmp_path: Path) -> None:
    """Each change keeps champion, canary, challenger and former, and removes the bundles of all others."""
    models = DeviceModels(tmp_path / "state")
    assert models.read().serving() is None
    first = add(models, 1)
    assert models.read().serving() is None, "a trained model does not answer"
    models.promote(first)
    second = add(models, 2, "challenger")
    counts = Comparison(40, 8, 1, 3)
    models.promote(second, "canary", comparison=counts)
    serving = models.read().serving()
    assert serving is not None
    assert (serving.name, serving.comparison) == (second, counts)
    models.promote(second)
    assert states(models) == {first: "former", second: "champion"}
    third = add(models, 3, "challenger")
    models.promote(third)
    assert states(models) == {second: "former", third: "champion"}
    assert folders(models) == {second, third}
    assert models.roll_back("worse").name == second
    assert states(models) == {second: "champion"}
    assert models.read().withdrawn == {third: "worse"}
    with pytest.raises(ConfigError, check=has_code("FV1491")):
        models.promote(third)
    with pytest.raises(ConfigError, check=has_code("FV1491")):
        models.roll_back()


def test_canary_ends_before_the_champion(tmp_path: Path) -> None:
    models = DeviceModels(tmp_path)
    models.promote(add(models, 1))
    canary = models.promote(add(models, 2, "challenger"), "canary").name
    other = models.promote(add(models, 3, "challenger"), "canary").name
    assert states(models) == {"street-1": "champion", other: "canary"}
    assert canary in models.read().withdrawn
    assert models.roll_back("confidence fell").name == "street-1"
    assert states(models) == {"street-1": "champion"}


def test_operations_may_be_repeated(tmp_path: Path) -> None:
    """The coordinator asks for the same state again after each connection."""
    models = DeviceModels(tmp_path)
    name = add(models, 1)
    once = models.promote(name)
    assert models.promote(name) == once
    assert models.promote(name, "canary") == once, "a champion does not become less"
    add(models, 1, "challenger")
    assert states(models) == {name: "champion"}
    assert folders(models) == {name}, "the second bundle of the same model is not kept"


def test_retire(tmp_path: Path) -> None:
    models = DeviceModels(tmp_path)
    models.promote(add(models, 1))
    add(models, 2, "challenger")
    models.retire("street-2", "poisoned")
    assert states(models) == {"street-1": "champion"}
    for name in ("street-1", "street-2", "street-9"):
        with pytest.raises(ConfigError, check=has_code("FV1491")):
            models.retire(name)
    assert add(models, 2, "challenger") == "street-2", "added again, it may be promoted again"
    assert models.read().withdrawn == {}


def test_withdrawn_names_are_bounded(tmp_path: Path) -> None:
    models = DeviceModels(tmp_path)
    for number in range(MAX_WITHDRAWN + 3):
        models.retire(add(models, number))
    assert [*models.read().withdrawn] == [f"street-{number}" for number in range(3, MAX_WITHDRAWN + 3)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"v": 2}',
        b'{"withdrawn": {"x": "\xef"}}',
        b'{"models": [{"run": "../x", "round": 1, "method": "m", "state": "champion", "changed_s": 1}]}',
        b'{"models": [{"run": "x", "round": -1, "method": "m", "state": "champion", "changed_s": 1}]}',
        b'{"models": ['
        + b", ".join(
            b'{"run": "x", "round": %d, "method": "m", "state": "champion", "changed_s": 1}' % n for n in (1, 2)
        )
        + b"]}",
    ],
)
def test_damaged_list_is_reported(tmp_path: Path, content: bytes) -> None:
    models = DeviceModels(tmp_path)
    models.folder.mkdir()
    models.file.write_bytes(content)
    with pytest.raises(Damaged, check=has_code("FV1491")):
        models.read()


def test_name_that_no_run_has(tmp_path: Path) -> None:
    models = DeviceModels(tmp_path)
    with pytest.raises(ConfigError, check=has_code("FV1491")):
        models.add(model(1, run="../x"), new_bundle(models, 1))


OPERATIONS: dict[str, Callable[[DeviceModels], object]] = {
    "add": lambda models: add(models, 4, "challenger"),
    "promote to canary": lambda models: models.promote("street-3", "canary"),
    "promote to champion": lambda models: models.promote("street-3"),
    "roll back": lambda models: models.roll_back("worse"),
    "retire": lambda models: models.retire("street-3"),
}


def start(folder: Path) -> DeviceModels:
    """A device with a former model, a champion and a challenger."""
    models = DeviceModels(folder)
    for number in (1, 2):
        models.promote(add(models, number))
    add(models, 3, "challenger")
    return models


def check_whole(models: DeviceModels) -> ModelList:
    listed = models.read()
    for entry in listed.models:
        for name in FILES:
            assert (models.path(entry.name) / name).read_text() == f"{name} of {entry.round}"
    return without_times(listed)


def without_times(listed: ModelList) -> ModelList:
    return ModelList(
        models=tuple(
            DeviceModel(run=entry.run, round=entry.round, method=entry.method, state=entry.state, changed_s=0.0)
            for entry in sorted(listed.models, key=lambda entry: entry.name)
        ),
        withdrawn=listed.withdrawn,
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_power_cut_at_any_moment(tmp_path: Path, operation: str) -> None:
    """The list is the old or the new one, and every model that it lists is whole."""
    models = start(tmp_path / "state")
    old = check_whole(models)
    before = tree(models.folder)
    with recorded(models.folder) as ops:
        OPERATIONS[operation](models)
    new = check_whole(models)
    assert new != old
    seen = []
    for number, (_, state) in enumerate(after_power_cut(before, ops)):
        again = DeviceModels(tmp_path / f"cut-{number}")
        again.folder.parent.mkdir()
        write_tree(state, again.folder)
        seen.append(check_whole(again))
        assert seen[-1] in (old, new)
        add(again, 9)  # the device goes on
        check_whole(again)
    assert seen[0] == old
    assert seen[-1] == new


@pytest.mark.parametrize("accident", ["kill", "error"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_accident_at_every_system_call(tmp_path: Path, operation: str, accident: str) -> None:
    """A process that is killed, or whose call fails, leaves the old list or the new one."""
    models = start(tmp_path / "base")
    old = check_whole(models)
    seen = []
    for number in range(200):
        folder = tmp_path / str(number)
        shutil.copytree(models.folder.parent, folder)
        again = DeviceModels(folder)
        child = os.fork()
        if child == 0:
            os._exit(act_with_accident(again, operation, accident, number))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seen.append(check_whole(again))
        if status == 0:
            break
    new = seen[-1]
    assert len(seen) > 5
    assert new != old
    assert all(listed in (old, new) for listed in seen)
    assert old in seen, "the first accidents come before the change"


def act_with_accident(models: DeviceModels, operation: str, accident: str, calls_left: int) -> int:
    """Return 0 if no accident happened, 1 after a failure that was reported."""

    def guard(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **keywords: object) -> object:
            nonlocal calls_left
            calls_left -= 1
            if calls_left == -1 and accident == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if calls_left == -1:
                raise OSError(28, f"made to fail: {name}")
            return real(*arguments, **keywords)

        setattr(os, name, call)

    try:
        for name in ("open", "mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            guard(name)
        OPERATIONS[operation](models)
    except (StorageFailed, OSError):
        return 1
    except BaseException:  # noqa: BLE001 - a test must not go on in the child
        return 2
    return 0 if calls_left >= 0 else 1
