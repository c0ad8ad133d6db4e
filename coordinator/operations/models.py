"""Models in use, as operators look at them and change them."""

from typing import TYPE_CHECKING

from msgspec import Struct

from coordinator.model_view import ModelView, list_models, read_model
from coordinator.record.record import Record
from coordinator.record.tables import ModelStage
from coordinator.rounds.models.requests import promote, retire, roll_back

if TYPE_CHECKING:
    from fedvit.client import Service


class ModelChange(Struct, frozen=True, kw_only=True):
    """A model after an operator's request."""

    model: str
    stage: ModelStage
    done: str  # what happens, for people


class LocalModels:
    """Operations on the models of an open record. They raise ConfigError, for example if there is no such model."""

    def __init__(self, store: Record) -> None:
        self._store = store

    def list_all(self) -> list[ModelView]:
        """List all models, the newest first."""
        return list_models(self._store)

    def read(self, name: str) -> ModelView:
        """Read one model."""
        return read_model(self._store, name)

    def promote(self, name: str, where: str = "") -> ModelChange:
        """Let devices use a model: all that have it, or those with labels."""
        return self._describe(name, promote(self._store, name, where))

    def roll_back(self, name: str) -> ModelChange:
        """Stop the use of a model on all devices; they use their former ones again."""
        return self._describe(name, roll_back(self._store, name))

    def retire(self, name: str) -> ModelChange:
        """Let devices remove a model that none of them uses."""
        return self._describe(name, retire(self._store, name))

    def _describe(self, name: str, done: str) -> ModelChange:
        return ModelChange(model=name, stage=self._store.models.read(name).stage, done=done)


class RemoteModels:
    """The models of the service of another machine, as `LocalModels`."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    def list_all(self) -> list[ModelView]:
        """List all models, the newest first."""
        return self._service.ask(list[ModelView], "GET", "models")

    def read(self, name: str) -> ModelView:
        """Read one model."""
        return self._service.ask(ModelView, "GET", "models", name)

    def promote(self, name: str, where: str = "") -> ModelChange:
        """Let devices use a model: all that have it, or those with labels."""
        return self._service.ask(ModelChange, "POST", "models", name, "promote", body={"where": where})

    def roll_back(self, name: str) -> ModelChange:
        """Stop the use of a model on all devices; they use their former ones again."""
        return self._service.ask(ModelChange, "POST", "models", name, "rollback")

    def retire(self, name: str) -> ModelChange:
        """Let devices remove a model that none of them uses."""
        return self._service.ask(ModelChange, "POST", "models", name, "retire")
