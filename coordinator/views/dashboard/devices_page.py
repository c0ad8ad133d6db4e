"""The devices of a run: a table that can be sorted and filtered by every column."""

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from nicegui import ui

from coordinator.record.record import Record
from coordinator.record.tables import Asked, DeviceTotals
from coordinator.rounds.status import LiveStatus, Member, read_members
from coordinator.run_view import DeviceView, Standing, read_run, read_standings, view_device
from coordinator.views.dashboard import charts
from coordinator.views.dashboard.frame import Part, Site, find_status, follow, link, page

_LINK = """params => {
  const link = document.createElement('a');
  link.textContent = params.value;
  link.href = params.data.link;
  return link;
}"""
"""Text as text, whatever a device calls itself."""
_BY_NUMBERS = "new Intl.Collator('en', {numeric: true}).compare"
"""device-2 before device-10."""
_NUMBER = "params => params.value == null ? '–' : params.value.toLocaleString('en', {maximumFractionDigits: %d})"


def _describe_words(field: str, name: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "headerName": name, "filter": "agTextColumnFilter", **more}


def _describe_number(field: str, name: str, digits: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "field": field, "headerName": name, "filter": "agNumberColumnFilter", "type": "rightAligned", "minWidth": 105,
        ":valueFormatter": _NUMBER % digits, **more,
    }  # fmt: skip


COLUMNS = [
    _describe_words(
        "device", "device", pinned="left", width=150, sort="asc", **{":cellRenderer": _LINK, ":comparator": _BY_NUMBERS}
    ),
    _describe_words("state", "state", minWidth=150),
    _describe_words("board", "board", minWidth=150),
    _describe_words("labels", "labels"),
    _describe_words("seen", "last seen, UTC", minWidth=170),
    _describe_number("round", "last round"),
    _describe_number("rounds", "rounds trained"),
    _describe_number("accuracy", "accuracy", 3),
    _describe_number("memory_mb", "memory, MB"),
    _describe_number("budget_mb", "memory budget, MB"),
    _describe_number("temperature_c", "temperature, °C", 1),
    _describe_words("throttled", "throttled"),
    _describe_number("battery", "battery, %"),
    _describe_words("charging", "charging"),
    _describe_number("step_ms", "step, ms", 1),
    _describe_number("energy_j", "energy, J"),
    _describe_number("strikes", "strikes"),
    _describe_words("quarantine", "quarantine", minWidth=170),
]


YES_NO = {True: "yes", False: "no", None: ""}


class FleetDetails(Struct, frozen=True):
    """All devices of a run, with their standings and budgets."""

    status: str  # of the run
    devices: list[DeviceView]
    asked: dict[str, Asked]
    budgets: dict[str, int]  # by device: bytes of memory, in the newest round
    standings: dict[str, Standing]


def read_details(store: Record, run: str) -> FleetDetails:
    """Read what the page shows. Raises ConfigError if there is no such run."""
    view = read_run(store, run, accuracy_of=0, refusals_of=0)
    newest = view.rounds[-1].round if view.rounds else 0
    tasks = store.tasks.read_histories(run, [newest])
    asked = store.devices.read_asked(run) | {task.device: Asked(newest, 0) for task in tasks}
    budgets = {task.device: task.expected.budget.memory_bytes for task in tasks if task.expected}
    return FleetDetails(
        view.status,
        view.devices,
        asked,
        {device: limit for device, limit in budgets.items() if limit is not None},
        {standing.device: standing for standing in read_standings(store, run)},
    )


def rows(
    run: str, seen: FleetDetails, members: list[Member], status: LiveStatus | None, revoked: set[str]
) -> list[dict[str, Any]]:
    """Make the rows of the table, by name: every device that the record, the status or the coordinator knows."""
    known, present = {device.device: device for device in seen.devices}, {member.device: member for member in members}
    states, live = _find_states(seen, present, status, revoked), is_served(seen.status, status)
    return [
        {
            "device": name,
            "link": link("/device", run=run, device=name),
            "state": states.get(name, "unknown"),
            **_describe_member(present.get(name), live=live),
            **_describe_history(seen, name, known.get(name), present.get(name)),
        }
        for name in sorted(known.keys() | present.keys() | seen.asked.keys() | seen.standings.keys())
    ]


def is_served(run_status: str, status: LiveStatus | None) -> bool:
    """Return True while a coordinator serves the run."""
    return run_status in ("running", "waiting") and status is not None and not status.is_stale()


def _find_states(
    seen: FleetDetails, present: Mapping[str, Member], status: LiveStatus | None, revoked: set[str]
) -> dict[str, str]:
    live = is_served(seen.status, status)
    states = {
        name: ("online" if member.online else "offline") if live else "not served" for name, member in present.items()
    }
    if live and status is not None:
        states |= {one.device: f"declined: {one.reason}" for one in status.backing_off}
        states |= {one.device: f"{one.kind}, {one.state}" for one in status.waiting_for}
    states |= {name: "in quarantine" for name, standing in seen.standings.items() if standing.quarantine}
    return states | dict.fromkeys(revoked & (seen.asked.keys() | present.keys()), "revoked")


def _describe_member(member: Member | None, *, live: bool) -> dict[str, Any]:
    if member is None:
        return {"board": "", "labels": "", "seen": ""}
    return {
        "board": member.board or member.machine,
        "labels": ", ".join(f"{key}={value}" for key, value in member.labels.items()),
        "seen": "now" if member.online and live else member.seen.replace("T", " ")[:19],
    }


def _describe_history(
    seen: FleetDetails, name: str, device: DeviceView | None, member: Member | None
) -> dict[str, Any]:
    standing = seen.standings.get(name)
    budget = seen.budgets.get(name) or (member.memory_budget_bytes if member else None)
    device = device or view_device(name, DeviceTotals())
    return {
        "round": seen.asked[name].last if name in seen.asked else None,
        "rounds": device.rounds,
        "accuracy": device.accuracy,
        "memory_mb": charts.scale(device.peak_rss_bytes, 1e6),
        "budget_mb": charts.scale(budget, 1e6),
        "temperature_c": device.temperature_c,
        "throttled": YES_NO[device.throttled],
        "battery": device.battery_percent,
        "charging": YES_NO[device.charging],
        "step_ms": charts.scale(device.step_s, 1e-3),
        "energy_j": device.energy_j,
        "strikes": standing.strikes if standing else 0,
        "quarantine": standing.quarantine or "" if standing else "",
    }


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Find the changes that turn one list of rows into another, as the table takes them."""
    old, new = {row["device"]: row for row in before}, {row["device"]: row for row in after}
    return {
        "add": [row for name, row in new.items() if name not in old],
        "update": [row for name, row in new.items() if name in old and old[name] != row],
        "remove": [row for name, row in old.items() if name not in new],
    }


def newest_run(store: Record) -> str | None:
    """Find the newest run that has begun, else the newest of all; None if there is none."""
    records = store.runs.read_all()
    return next((record.id for record in records if record.status != "queued"), records[0].id if records else None)


async def show(site: Site, run: str | None) -> None:
    """Show the page."""
    with page("Devices", "/devices"):
        head = Part("devices.html", "head")
        name = run if run is not None else await site.reader(newest_run)
        may_enrol = site.may("enrol") and site.deployment is not None
        if name is None:
            head.show(run=None, devices=0, states={}, may_enrol=may_enrol)
            return
        search = ui.input("Filter all columns").props("outlined dense clearable").classes("search")
        shown: list[dict[str, Any]] = []

        async def read_rows() -> list[dict[str, Any]]:
            seen = await site.reader(read_details, name)
            members, revoked = read_members(site.folder / name), await asyncio.to_thread(site.list_revoked)
            fresh = rows(name, seen, members, find_status(site, name), revoked)
            head.show(run=name, devices=len(fresh), states=_count_states(fresh), may_enrol=may_enrol)
            return fresh

        shown = await read_rows()
        grid = ui.aggrid(
            {
                "columnDefs": COLUMNS,
                "rowData": shown,
                ":getRowId": "params => params.data.device",
                "defaultColDef": {
                    "sortable": True,
                    "resizable": True,
                    "floatingFilter": True,
                    "width": 130,
                    "minWidth": 110,
                },
                "ensureDomOrder": True,
                "suppressMenuHide": True,
                "overlayNoRowsTemplate": "<span>no device has taken part yet</span>",
            },
            auto_size_columns=False,
        ).classes("grid")
        search.on_value_change(
            lambda event: grid.run_grid_method("setGridOption", "quickFilterText", event.value or "")
        )

        async def refresh() -> None:
            nonlocal shown
            fresh = await read_rows()
            change = changes(shown, fresh)
            if any(change.values()):
                grid.run_grid_method("applyTransaction", change)
                shown = fresh

        await follow(refresh)


def _count_states(rows: list[dict[str, Any]]) -> dict[str, int]:
    states: dict[str, int] = {}
    for row in rows:
        state = row["state"].partition(":")[0]
        states[state] = states.get(state, 0) + 1
    return dict(sorted(states.items()))
