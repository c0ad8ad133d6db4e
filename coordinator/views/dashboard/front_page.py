"""The front page: the whole fleet, what runs, what is wrong and what to do, the queue, and the service."""

import asyncio
from typing import NamedTuple

from nicegui import ui

from coordinator.rounds.service.status import read_service_status
from coordinator.views.dashboard.frame import Part, Site, follow, link, page
from coordinator.views.fleet import SITE, STATES, FleetDevice, FleetRecord, FleetView, make_fleet, read_fleet_record
from coordinator.views.problems import Problem, find_problems, next_commands
from coordinator.views.service_facts import RecordFacts, ServiceFacts, make_facts, read_record_facts

EVERY_S = 2.0
"""Interval at which the page looks for news."""
MOST_CELLS = 2000
"""Devices that have a cell each; in a larger fleet only those that are neither idle nor training."""
MOST_PROBLEMS = 6
MOST_QUEUED = 8
CLASSES = {state: state.replace(" ", "-") for state in STATES}
"""Class of the style sheet of a state."""


class Overview(NamedTuple):
    """Everything that the pages of the fleet and its service show."""

    fleet: FleetView
    facts: ServiceFacts
    problems: list[Problem]
    next_commands: list[str]


async def read_overview(site: Site) -> Overview:
    """Read the record, the small files of runs and service, the disk, and the deployment."""
    record, facts = await site.reader(read_fleet_record), await site.reader(read_record_facts)
    return await asyncio.to_thread(_join, site, record, facts)


def _join(site: Site, record: FleetRecord, record_facts: RecordFacts) -> Overview:
    status, deployment = read_service_status(site.folder), site.deployment
    registered = site.registry.read() if site.registry else None
    fleet = make_fleet(record, site.folder, status, registered.devices if registered else {})
    facts = make_facts(record_facts, site.folder, status, deployment)
    place = deployment.folder if deployment else None
    problems = find_problems(fleet, facts, site.folder, place, registered.doubt if registered else None)
    return Overview(fleet, facts, problems, next_commands(fleet, facts, site.folder, place))


def address_of(device: FleetDevice) -> str:
    """Return the address of a device's page."""
    return link("/device", device=device.device, **({"run": device.run} if device.run else {}))


class Sites:
    """The devices by site. They are sent again when one has changed."""

    def __init__(self) -> None:
        with ui.element("div").classes("parts"):
            self._head, self._place = Part("front.html", "legend"), Part("front.html", "sites")
        self._shown: dict[str, list[FleetDevice]] | None = None

    def show(self, fleet: FleetView) -> None:
        """Show the devices of a fleet."""
        sites = fleet.by_site()
        if sites == self._shown:
            return
        self._shown = sites
        is_large = len(fleet.devices) > MOST_CELLS
        self._head.show(
            counts={state: fleet.count(state) for state in STATES}, states=STATES, classes=CLASSES, label=SITE,
            all=len(fleet.devices), has_sites=any(sites), is_large=is_large,
        )  # fmt: skip
        self._place.show(
            sites={
                name: [one for one in devices if not (is_large and _is_well(one))] for name, devices in sites.items()
            },
            sizes={name: len(devices) for name, devices in sites.items()},
            well={name: sum(map(_is_well, devices)) for name, devices in sites.items()},
            classes=CLASSES, address_of=address_of, has_sites=any(sites),
        )  # fmt: skip


def _is_well(device: FleetDevice) -> bool:
    return device.state in ("training", "idle")


async def show(site: Site) -> None:
    """Show the page."""
    with page("Fleet", "/"):
        with ui.element("div").classes("front"):
            head = Part("front.html", "head", "part top")
            runs, problems = Part("front.html", "runs"), Part("front.html", "problems", "part side")
            sites = Sites()
            service = Part("front.html", "service", "part side")

        async def refresh() -> None:
            seen = await read_overview(site)
            fleet = seen.fleet
            online = len(fleet.devices) - fleet.count("away")
            head.show(
                fleet=fleet, online=online, problems=len(seen.problems), may_submit=site.may("submit"),
                may_enrol=site.may("enrol") and site.deployment is not None,
            )  # fmt: skip
            runs.show(fleet=fleet, next_commands=seen.next_commands)
            problems.show(
                problems=seen.problems[:MOST_PROBLEMS],
                more=len(seen.problems) - MOST_PROBLEMS,
            )
            sites.show(fleet)
            service.show(fleet=fleet, queue=fleet.record.queue[:MOST_QUEUED], facts=seen.facts)

        await follow(refresh, EVERY_S)
