"""The pages of models: all of them, and one with its scores, its devices, its history and its buttons."""

from nicegui import ui

from coordinator.model_view import ModelOnDevice, ModelView, describe_score, list_models, read_model
from coordinator.record.record import Record
from coordinator.rounds.models.requests import promote, retire, roll_back
from coordinator.views.dashboard.actions import button
from coordinator.views.dashboard.frame import Part, Site, anchor, follow, page
from profiles.report.tables import Column, Sheet, columns


async def show(site: Site) -> None:
    """Show the page of all models."""
    with page("Models", "/models"):
        Part("models.html", "head").show()
        table = Part("models.html", "table")

        async def refresh() -> None:
            table.show(models=await site.reader(list_models), describe_score=describe_score)

        await follow(refresh)


async def show_one(site: Site, name: str) -> None:
    """Show the page of one model."""
    with page(name, "/models"):
        head, buttons, body = Part("models.html", "title"), ModelButtons(site, name), Part("models.html", "body")

        async def refresh() -> None:
            model = await site.reader(read_model, name)
            head.show(model=model, describe_score=describe_score)
            buttons.show(site, model)
            body.show(model=model, devices=make_device_sheet(model), history=make_history_sheet(model))

        await follow(refresh)


class ModelButtons:
    """The buttons of a model; only those that apply are shown."""

    def __init__(self, site: Site, name: str) -> None:
        def promote_it(store: Record) -> str:
            return promote(store, name)

        def roll_it_back(store: Record) -> str:
            return roll_back(store, name)

        def retire_it(store: Record) -> str:
            return retire(store, name)

        question = f"Let all devices that have {name} use it, whatever the rules of its run say?"
        with ui.element("div").classes("buttons"):
            self._promote = button(site, "Promote", question, promote_it)
            question = f"Stop the use of {name}? Its devices use their former models again."
            self._roll_back = button(site, "Roll back", question, roll_it_back)
            self._retire = button(site, "Retire", f"Let devices remove {name}?", retire_it)

    def show(self, site: Site, model: ModelView) -> None:
        """Show the buttons that apply to a model."""
        may = site.may("promote")
        self._promote.set_visibility(may and model.is_usable)
        self._roll_back.set_visibility(may and model.is_used)
        self._retire.set_visibility(may and model.is_usable and not model.is_used)


def make_device_sheet(model: ModelView) -> Sheet:
    """Make the table of a model's states on devices."""
    shown = [
        Column("device", "device", lambda row: anchor("/device", row.device, run=model.run, device=row.device)),
        Column("state", "state", _describe_state),
        *columns(
            {
                "accuracy": "accuracy",
                "champion_accuracy": "of its champion",
                "images": "test images",
                "pictures": "pictures answered",
                "confidence": "mean confidence",
                "drifted_since": "drift since",
                "reason": "reason",
            }
        ),
    ]
    return Sheet(model.devices, shown)


def make_history_sheet(model: ModelView) -> Sheet:
    """Make the table of what happened to a model, the newest first."""
    shown = {
        "at": "at, UTC",
        "act": "act",
        "by": "by",
        "devices": "devices",
        "former": "in place of",
        "reason": "reason",
    }
    return Sheet(model.history[::-1], columns(shown))


def _describe_state(row: ModelOnDevice) -> str:
    actual = row.state or "not there"
    return actual if row.wanted in (None, row.state) else f"{actual}, to be {row.wanted}"
