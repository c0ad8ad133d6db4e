"""Streams of events (server-sent events): what changes, as it changes."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import Header, Query, Request
from starlette.responses import StreamingResponse

from coordinator.http_api.routes import Routes, Site, identity_of
from coordinator.http_api.run_routes import find_progress
from coordinator.http_api.site import ApiSite
from coordinator.operations.documents import ServiceOverview
from coordinator.operations.runs import LocalRuns
from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from coordinator.run_view import RoundView, RunFilter, RunProgress, list_page, read_rounds
from coordinator.security.credentials import TooManyAttempts
from fedvit.errors import ConfigError

EVERY_S = 1.0
ALIVE_S = 15.0
"""Interval of comments that keep a quiet stream open through proxies."""
MOST_STREAMS = 100
MOST_STREAMS_OF_ONE = 25
NEWEST_RUNS = 100
"""Runs whose changes the stream of all runs reports."""
STREAM = "text/event-stream"


routes = Routes()


@routes.add("GET", "/events", "viewer", media=STREAM)
async def follow_all(site: Site, request: Request) -> StreamingResponse:
    """Follow all runs (`run`) and the service (`service`): first their states, then each change."""
    return _follow(site, request, _all_events(site))


@routes.add("GET", "/runs/{run}/events", "viewer", media=STREAM)
async def follow_run(
    site: Site,
    request: Request,
    run: str,
    after: Annotated[int | None, Query(ge=0, le=2**31, description="Newest round that is known.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> StreamingResponse:
    """Follow a run (`run`) and its closed rounds (`round`) until it has ended (`end`)."""
    progress = await site.read(find_progress, site, run)
    if last_event_id and last_event_id.isdecimal():
        after = min(int(last_event_id), 2**31)
    return _follow(site, request, _run_events(site, progress.run, after or 0))


def _follow(site: ApiSite, request: Request, events: AsyncIterator[bytes | None]) -> StreamingResponse:
    """Send events until the client leaves or its token ends; None: there is nothing new."""
    sender, mark = identity_of(request), object()
    own = list(site.streams.values()).count(sender.name)
    if own >= MOST_STREAMS_OF_ONE or len(site.streams) >= MOST_STREAMS:
        count = f"{len(site.streams)} streams of events are open, {own} of them for {sender.name}"
        raise TooManyAttempts("FV1814", f"{count}: close one, or try again later")

    async def send() -> AsyncIterator[bytes]:
        site.streams[mark] = sender.name
        sent_at = time.monotonic()
        try:
            async for event in events:
                if not site.credentials.are_valid(sender):
                    return
                if event is None and time.monotonic() - sent_at < ALIVE_S:
                    continue
                sent_at = time.monotonic()
                yield event or b": alive\n\n"
        finally:
            site.streams.pop(mark, None)

    return StreamingResponse(send(), media_type=STREAM, headers={"x-accel-buffering": "no"})


async def _all_events(site: ApiSite) -> AsyncIterator[bytes | None]:
    runs: dict[str, RunProgress] = {}
    service: ServiceOverview | None = None
    while True:
        page = await site.read(list_page, RunFilter(), 0, NEWEST_RUNS)
        for progress in reversed(page.runs):
            if runs.get(progress.run) != progress:
                yield _encode("run", progress)
        runs = {progress.run: progress for progress in page.runs}
        overview = await site.read_run(LocalRuns.read_service)
        calm = msgspec.structs.replace(overview, status=None)  # whose date changes all the time
        if calm != service:
            service = calm
            yield _encode("service", overview)
        yield None
        await asyncio.sleep(EVERY_S)


async def _run_events(site: ApiSite, run: str, after: int) -> AsyncIterator[bytes | None]:
    last: RunProgress | None = None
    while True:
        try:
            progress, rounds = await site.read(_find_news, site, run, after)
        except ConfigError:  # it was removed
            yield _encode("end", {"run": run})
            return
        for entry in rounds:
            after = entry.round
            yield _encode("round", entry, entry.round)
        if progress != last:
            last = progress
            yield _encode("run", progress)
        if progress.status in (*ENDED, "failed"):
            yield _encode("end", {"run": run})
            return
        yield None
        await asyncio.sleep(EVERY_S)


def _find_news(store: Record, site: ApiSite, run: str, after: int) -> tuple[RunProgress, list[RoundView]]:
    """Return progress and rounds by one question, as answers to two may be of different times."""
    progress = find_progress(store, site, run)
    return progress, [entry for entry in read_rounds(store, run) if entry.round > after]


def _encode(event: str, data: Any, number: int | None = None) -> bytes:
    head = f"event: {event}\n" + (f"id: {number}\n" if number is not None else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
