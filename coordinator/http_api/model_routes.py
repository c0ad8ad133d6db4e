"""Endpoints of models in use."""

from typing import Annotated

import msgspec
from fastapi import Depends
from msgspec import Struct

from coordinator.http_api.answers import read_body
from coordinator.http_api.routes import Routes, Site
from coordinator.model_view import ModelView, list_models, read_model
from coordinator.operations.models import LocalModels, ModelChange


class PromotedDevices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices that are to use a model."""

    where: Annotated[str, msgspec.Meta(max_length=1000)] = ""  # labels, as in site=berlin,board=rpi5; "": all


routes = Routes()


@routes.add("GET", "/models", "viewer")
async def list_all_models(site: Site) -> list[ModelView]:
    """List the models that devices have compared or use, the newest first."""
    return await site.read(list_models)


@routes.add("GET", "/models/{model}", "viewer")
async def show_model(site: Site, model: str) -> ModelView:
    """Read a model: its scores, its states on devices, and its history."""
    return await site.read(read_model, model)


@routes.add("POST", "/models/{model}/promote", "operator")
async def promote_model(
    site: Site, model: str, body: Annotated[PromotedDevices, Depends(read_body(PromotedDevices))]
) -> ModelChange:
    """Let devices that have a model use it."""
    return await site.change_record(lambda store: LocalModels(store).promote(model, body.where))


@routes.add("POST", "/models/{model}/rollback", "operator")
async def roll_back_model(site: Site, model: str) -> ModelChange:
    """Stop the use of a model: its devices use their former ones again."""
    return await site.change_record(lambda store: LocalModels(store).roll_back(model))


@routes.add("POST", "/models/{model}/retire", "operator")
async def retire_model(site: Site, model: str) -> ModelChange:
    """Let devices remove a model that none of them uses."""
    return await site.change_record(lambda store: LocalModels(store).retire(model))
