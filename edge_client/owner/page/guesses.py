"""Guesses of the device's newest own model, loaded when one is asked for and dropped when none is for a while."""

import gc
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from edge_client.owner.labelling import open_images
from edge_client.settings import DeviceSettings
from edge_client.storage.state import read_device_id
from edge_client.storage.vault import Vault
from fedvit.data.images import limit_decoded_bytes
from fedvit.errors import FedvitError
from fedvit.files import name_failure
from fedvit.quantities import format_bytes

if TYPE_CHECKING:
    from edge_client.owner.guessing import Guess, Guesser

IDLE_S = 300.0
"""The model is dropped when nobody has asked for so long."""
FRESH_S = 30.0
"""Time in which a model is used although the device may have a newer one of the same run."""
TRIES, AGAIN_S = 5, 0.5
LEAST_FREE_BYTES = 300_000_000
"""Available memory below which no model is loaded: the device needs it for its work."""


class LoadedModel(NamedTuple):
    """A model in memory."""

    run: str
    loaded_at: float  # monotonic
    guesser: "Guesser"


class NoGuess(FedvitError):
    """There is no guess, for a reason that the owner can understand."""

    general_code = "FV1424"


class Guesses:
    """Guesses with the settings of a device. Threads may share it; they wait for each other."""

    def __init__(
        self,
        settings: DeviceSettings,
        state: Path,
        available_bytes: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> None:
        self._settings = settings
        self._state = state
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._model: LoadedModel | None = None
        self._used_at = 0.0  # monotonic

    def guess(self, path: Path) -> "Guess":
        """Return the model's guess. Raises NoGuess, DataError if the image cannot be read."""
        with self._lock:
            guesser = self._load()
            self._used_at = time.monotonic()
            return guesser(path)

    def drop_idle(self) -> None:
        """Free the memory of a model that nobody uses; call it from time to time. It never waits."""
        if self._model is None or not self._lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._used_at > IDLE_S:
                self._model = None
                gc.collect()
        finally:
            self._lock.release()

    def _load(self) -> "Guesser":
        """Return the newest model, or one of the same run that is seconds old: a device that trains makes many."""
        with name_failure("the vault cannot be read", NoGuess, "FV1424"):
            run = next(iter(Vault(self._state / "vault").notes.list_runs()), None)
        if run is None:
            raise NoGuess("FV1424", "this device has no model yet")
        known = self._model
        if known and known.run == run and time.monotonic() - known.loaded_at < FRESH_S:
            return known.guesser
        self._model = None  # it and the next one need not fit into the memory together
        if (free := self._available_bytes()) < LEAST_FREE_BYTES:
            raise NoGuess("FV1424", f"only {format_bytes(free)} of memory are free, which the device needs")
        guesser = self._try_to_make()
        self._model = LoadedModel(run, time.monotonic(), guesser)
        return guesser

    def _try_to_make(self) -> "Guesser":
        """Load the newest model, again if a task of the device replaced its tensors meanwhile. Raises NoGuess."""
        for attempt in range(1, TRIES + 1):
            try:
                guesser = self._make()
            except (FedvitError, OSError) as error:
                if attempt == TRIES:
                    raise NoGuess("FV1424", str(error)) from error
                time.sleep(AGAIN_S)
            else:
                break
        if guesser is None:
            raise NoGuess("FV1424", "this device has no model yet")
        return guesser

    def _make(self) -> "Guesser | None":
        """Load the newest model. Raises ConfigError, StorageFailed."""
        settings, state = self._settings, self._state
        newest_guesser = import_module("edge_client.owner.guessing").newest_guesser  # late: onnxruntime takes seconds
        guesser: Guesser | None = newest_guesser(
            device=read_device_id(state / "device-id"),
            state=state,
            data=open_images(settings, state),
            threads=settings.threads,
            vault_key=settings.vault_key,
            decoded_bytes=limit_decoded_bytes(settings.policy.train.memory),
        )
        return guesser
