"""The models of a device that answer pictures, or may: which one serves, and which one was replaced.

Layout: `STATE/models/MODELS.json` lists at most one model of each state, and `STATE/models/NAME/` is its bundle. Each
operation replaces the list once, atomically. A bundle is complete before it is listed, and a folder that is not listed
is removed by the next operation. So a process that is killed anywhere leaves the old list or the new one, and every
listed model is whole.

The device's agent, its owner's commands and the process that serves share the list. A writer locks it for one
replacement.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fedvit.comparison import Comparison
from fedvit.errors import ConfigError, Damaged
from fedvit.files import atomic_write, hold_lock, make_folder, name_failure, storage_failed, sync_folder
from fedvit.wire.messages import Count
from fedvit.wire.topics import is_name

ModelState = Literal["trained", "challenger", "canary", "champion", "former"]
LIST = "MODELS.json"
MAX_LIST_BYTES = 1 << 16
MAX_WITHDRAWN = 16
"""Models that were rolled back or retired whose reasons are kept, the newest."""
MAX_REASON = 200
_LOCK = "lock"
_NEW = ".new-"
_ABANDONED_S = 86400.0
"""Age of an incomplete bundle whose writer has ended."""


class DeviceModel(Struct, frozen=True, kw_only=True):
    """One version of a model on this device."""

    run: str
    round: Count
    method: str
    state: ModelState
    changed_s: float  # wall clock of its newest change of state
    comparison: Comparison | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return name_model(self.run, self.round)


class ModelList(Struct, frozen=True, kw_only=True):
    """The list of a device: at most one model of each state."""

    v: Literal[1] = 1
    models: tuple[DeviceModel, ...] = ()
    withdrawn: dict[str, str] = {}  # name -> reason: rolled back or retired, not to be served again

    def find(self, state: ModelState) -> DeviceModel | None:
        """Return the model in a state."""
        return next((model for model in self.models if model.state == state), None)

    def get(self, name: str) -> DeviceModel | None:
        """Return the model of a name."""
        return next((model for model in self.models if model.name == name), None)

    def serving(self) -> DeviceModel | None:
        """Return the model that answers: the canary if there is one, else the champion."""
        return self.find("canary") or self.find("champion")

    def place(self, model: DeviceModel) -> "ModelList":
        """Return the list with a model, which replaces the one of its name and the one of its state."""
        others = [each for each in self.models if each.name != model.name and each.state != model.state]
        withdrawn = {name: reason for name, reason in self.withdrawn.items() if name != model.name}
        return replace(self, models=(*others, model), withdrawn=withdrawn)

    def withdraw(self, name: str, reason: str) -> "ModelList":
        """Return the list without a model, whose reason is kept."""
        others = tuple(each for each in self.models if each.name != name)
        withdrawn = {**{known: why for known, why in self.withdrawn.items() if known != name}, name: reason}
        return replace(self, models=others, withdrawn=dict([*withdrawn.items()][-MAX_WITHDRAWN:]))


def name_model(run: str, round_number: int) -> str:
    """Return the name of a run's model after a round."""
    return f"{run}-{round_number}"


class DeviceModels:
    """The models of the device with this state."""

    def __init__(self, state: Path) -> None:
        self.folder = state / "models"
        self.file = self.folder / LIST

    def path(self, name: str) -> Path:
        """Return the folder of a model's bundle."""
        return self.folder / name

    def read(self) -> ModelList:
        """Return the list; an empty one if there is none. Raises Damaged, StorageFailed."""
        try:
            with self.file.open("rb") as file:
                content = file.read(MAX_LIST_BYTES + 1)
        except FileNotFoundError:
            return ModelList()
        except OSError as error:
            raise storage_failed(f"cannot read {self.file}", error) from error
        try:
            listed = msgspec.json.decode(content, type=ModelList)
        except ValueError as error:  # of msgspec, or no UTF-8
            raise self._make_damage(str(error)) from error
        states = [model.state for model in listed.models]
        if len(content) > MAX_LIST_BYTES or len(set(states)) < len(states):
            raise self._make_damage("it lists two models of one state, or is too long")
        if wrong := [model.run for model in listed.models if not is_name(model.run)]:
            raise self._make_damage(f"{wrong[0][:80]!r} is not the name of a run")
        return listed

    def stamp(self) -> tuple[int, int]:
        """Return a value that changes when the list is replaced."""
        try:
            status = self.file.stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def new_folder(self) -> Path:
        """Return the path of a folder that does not exist, for `add`. Raises StorageFailed."""
        with name_failure(f"cannot make {self.folder}"):
            self.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
        return self.folder / f"{_NEW}{secrets.token_hex(4)}"

    def add(self, model: DeviceModel, bundle: Path, *, mends: bool = False) -> DeviceModel:
        """List a trained model or a challenger whose complete bundle lies in a folder of `new_folder`.

        The one of its state before it is removed. A model that is listed as canary, champion or former stays that, with
        its own bundle, unless the new one `mends` it. Raises StorageFailed, ConfigError for a name that no run has.
        """
        if not is_name(model.run):
            raise ConfigError("FV1491", f"{model.run[:80]!r} cannot be the name of a run's model")
        assert model.state in ("trained", "challenger"), model.state
        with self._lock_list() as listed:
            known = listed.get(model.name)
            if known is None or mends:
                self._move_in(bundle, model.name)
            else:
                shutil.rmtree(bundle, ignore_errors=True)
            if known and known.state not in ("trained", "challenger"):
                model = replace(known, comparison=model.comparison or known.comparison)
            self._replace(listed.place(model))
        return model

    def add_files(self, model: DeviceModel, files: Mapping[str, bytes]) -> DeviceModel:
        """Write a bundle, and list it as `add` does; nothing stays of one that cannot be written."""
        bundle = self.new_folder()
        try:
            for name, content in files.items():
                atomic_write(bundle / name, content, private=True)
            return self.add(model, bundle)
        finally:
            shutil.rmtree(bundle, ignore_errors=True)

    def promote(
        self,
        name: str,
        state: Literal["canary", "champion"] = "champion",
        *,
        comparison: Comparison | None = None,
        reason: str = "",
    ) -> DeviceModel:
        """Let a listed model answer. The champion before a new one becomes the former, and a canary beside it ends.

        Raises ConfigError for a model that is not listed, StorageFailed.
        """
        with self._lock_list() as listed:
            model = self._find(listed, name)
            champion, canary = listed.find("champion"), listed.find("canary")
            if model.state == state or (model.state == "champion" and state == "canary"):
                return model
            promoted = _change(model, state, reason)
            promoted = replace(promoted, comparison=comparison or model.comparison)
            if canary and canary.name != name:
                listed = listed.withdraw(canary.name, f"replaced by {name}")
            if champion and state == "champion":
                listed = listed.place(_change(champion, "former", f"replaced by {name}"))
            self._replace(listed.place(promoted))
        return promoted

    def roll_back(self, reason: str = "", *, only: str | None = None) -> DeviceModel:
        """Withdraw the canary, or else the champion for its former model; return the model that answers now.

        With `only` a list in which another model answers meanwhile stays. Raises ConfigError if there is no model to go
        back to, StorageFailed.
        """
        with self._lock_list() as listed:
            champion, canary, former = listed.find("champion"), listed.find("canary"), listed.find("former")
            if only and (serving := listed.serving()) and serving.name != only:
                return serving
            if canary and champion:
                listed, now = listed.withdraw(canary.name, reason[:MAX_REASON]), champion
            elif (current := canary or champion) and former:
                now = _change(former, "champion", f"after {current.name}: {reason}" if reason else "")
                listed = listed.withdraw(current.name, reason[:MAX_REASON]).place(now)
            else:
                raise ConfigError("FV1491", "there is no former model on this device to go back to")
            self._replace(listed)
        return now

    def retire(self, name: str, reason: str = "") -> None:
        """Remove a model. Raises ConfigError for a model that is not listed or that is the champion, StorageFailed."""
        with self._lock_list() as listed:
            if self._find(listed, name).state == "champion":
                raise ConfigError("FV1491", f"{name} is this device's champion: promote another model, or roll it back")
            self._replace(listed.withdraw(name, reason[:MAX_REASON] or "retired"))

    def _find(self, listed: ModelList, name: str) -> DeviceModel:
        if (model := listed.get(name)) is None:
            if name in listed.withdrawn:
                raise ConfigError("FV1491", f"model {name} was withdrawn: {listed.withdrawn[name] or 'no reason'}")
            known = ", ".join(model.name for model in listed.models) or "none"
            raise ConfigError("FV1491", f"there is no model {name!r} on this device; it has: {known}")
        return model

    @contextlib.contextmanager
    def _lock_list(self) -> Iterator[ModelList]:
        """Lock the list for one change. Raises StorageFailed."""
        self.new_folder()
        with hold_lock(self.folder / _LOCK):  # others hold it for a file replacement only
            yield self.read()

    def _move_in(self, bundle: Path, name: str) -> None:
        """Give a complete bundle its name. One that is there was not listed in time, or is withdrawn."""
        target = self.path(name)
        with name_failure(f"cannot move a bundle to {target}"):
            if target.exists():
                target.rename(self.new_folder())
            bundle.rename(target)
            sync_folder(self.folder)

    def _replace(self, listed: ModelList) -> None:
        """Replace the list, then remove the folders of models that it does not have."""
        make_folder(self.folder)
        content = msgspec.json.format(msgspec.json.encode(listed)) + b"\n"
        atomic_write(self.file, content, private=True)
        names = {model.name for model in listed.models}
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False) or entry.name in names:
                    continue
                if entry.name.startswith(".") and abs(time.time() - entry.stat().st_mtime) < _ABANDONED_S:
                    continue  # its writer may be at work
                shutil.rmtree(entry.path, ignore_errors=True)  # a process that serves it has its files open

    def _make_damage(self, why: str) -> Damaged:
        return Damaged("FV1491", f"{self.file} is damaged: {why}; remove it, and add a model again")


def _change(model: DeviceModel, state: ModelState, reason: str) -> DeviceModel:
    return replace(model, state=state, changed_s=time.time(), reason=reason[:MAX_REASON])
