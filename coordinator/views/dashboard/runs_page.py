"""The list of runs."""

from coordinator.record.summary import progress
from coordinator.views.dashboard.frame import Part, Site, follow, page


async def show(site: Site) -> None:
    with page("Runs", "/"):
        part = Part("runs.html")

        async def refresh() -> None:
            part.show(runs=await site.reader(progress), folder=str(site.folder))

        await follow(refresh)
