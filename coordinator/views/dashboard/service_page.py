"""The page of the service: leader, broker, record, store, disk, problems, queue, backups, certificates."""

import time
from collections import Counter

from coordinator.security.expiry import is_ending
from coordinator.views.dashboard.frame import Part, Site, follow, page
from coordinator.views.dashboard.front_page import EVERY_S, read_overview
from coordinator.views.service_facts import count_days, show_date


async def show(site: Site) -> None:
    """Show the page."""
    with page("Service", "/service"):
        Part("service.html", "head").show()
        problems, part = Part("front.html", "problems"), Part("service.html", "body")

        async def refresh() -> None:
            seen = await read_overview(site)
            ends = seen.facts.certificates
            problems.show(problems=seen.problems, more=0)
            part.show(
                facts=seen.facts, queue=seen.fleet.record.queue, counts=seen.fleet.record.counts, folder=site.folder,
                certificates={name: (show_date(end_s), count_days(end_s)) for name, end_s in ends.items()},
                devices=_count_certificates(site),
            )  # fmt: skip

        await follow(refresh, EVERY_S)


def _count_certificates(site: Site) -> dict[str, int]:
    """Count the devices of the deployment by the state of their certificates."""
    now_s = time.time()
    return dict(
        Counter(
            "revoked" if device.revoked_at is not None
            else "ended" if device.expires_at < now_s
            else "ends soon" if is_ending(device, now_s)
            else "valid"
            for device in site.read_joined().values()
        )
    )  # fmt: skip
