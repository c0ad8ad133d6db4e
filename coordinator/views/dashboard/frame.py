"""The frame of all pages: navigation, parts that follow the record, and errors as one line."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode

from nicegui import ui

from coordinator.security.folder import Deployment
from coordinator.views.dashboard.charts import Options
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.reader import Reader
from fedvit.errors import FedvitError
from profiles.report.confusion import taken_for
from profiles.report.page import environment

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

EVERY_S = 1.0
"""Interval at which a page looks for news."""
NOTHING = "–"
"""Stands for a figure that was not measured."""
PAGES = (("/", "Runs"), ("/fleet", "Fleet"), ("/compare", "Compare"))


@dataclass(frozen=True)
class Site:
    """What all pages share."""

    reader: Reader
    folder: Path  # of the runs
    experiments: Experiments
    deployment: Deployment | None  # the devices' certificates
    acts: bool  # whether a password was given, so that operators may change something

    def revoked(self) -> set[str]:
        """Devices whose certificates were revoked."""
        if self.deployment is None:
            return set()
        with self.deployment.registry.read() as rows:
            return set(rows.list_revoked_devices())


@cache
def templates() -> "Environment":
    made = environment("coordinator.views.dashboard")
    made.filters |= {"link": link, "clock": clock, "ago": ago, "taken_for": taken_for}
    made.globals |= {"nothing": NOTHING}
    return made


def link(path: str, **values: object) -> str:
    """An address within the dashboard.

    >>> link("/device", run="r", device="a&b <i>")
    '/device?run=r&device=a%26b+%3Ci%3E'
    """
    return f"{path}?{urlencode(values)}" if values else path


def clock(at: str | None) -> str:
    """A time of the record to the second, UTC.

    >>> clock("2026-11-21T03:45:00.123+00:00"), clock(None)
    ('2026-11-21 03:45:00', '–')
    """
    return NOTHING if at is None else at.replace("T", " ")[:19]


def ago(at: str | None) -> str:
    """How long ago a time of the record was, roughly.

    >>> ago(None)
    '–'
    """
    if at is None:
        return NOTHING
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit} ago"
    return "just now"


@contextmanager
def page(title: str, here: str) -> Iterator[None]:
    """The frame of a page; `here` is the address of its entry in the navigation."""
    ui.page_title(f"{title} · fedvit")
    ui.html(templates().get_template("frame.html").render(pages=PAGES, here=here), sanitize=False).classes("frame")
    with ui.element("div").props('id="content" tabindex="-1"'):
        yield


class Part:
    """A part of a page that is made from a template, whose values are escaped. It is sent when its text changes."""

    def __init__(self, template: str) -> None:
        self._template = templates().get_template(template)
        self._html = ui.html("", sanitize=False).classes("part")

    def show(self, **values: Any) -> None:
        text = self._template.render(**values)
        if text != self._html.content:
            self._html.content = text


class Chart:
    """A chart that is sent when its data change; `name` is read to people who do not see it."""

    def __init__(self, name: str) -> None:
        self._shown: Options = {}
        self._chart = ui.echart({}, renderer="svg").classes("figure").props(f'role="img" aria-label="{name}"')

    def show(self, options: Options) -> None:
        if options != self._shown:
            self._shown = options
            self._chart.options.clear()
            self._chart.options.update(options)
            self._chart.update()


class Figures(Generic[T]):
    """The charts of a page, by their names; each is drawn from the same data."""

    def __init__(self, drawings: Mapping[str, Callable[[T], Options]]) -> None:
        with ui.element("div").classes("figures"):
            self._charts = [(Chart(name), draw) for name, draw in drawings.items()]

    def show(self, data: T) -> None:
        for chart, draw in self._charts:
            chart.show(draw(data))


async def follow(refresh: Callable[[], Awaitable[None]]) -> None:
    """Fill a page, and fill it again about once a second. An error is shown as one line, and the page tries again."""
    trouble = Part("trouble.html")

    async def attempt() -> None:
        try:
            await refresh()
        except FedvitError as error:
            trouble.show(error=str(error))
        else:
            trouble.show(error=None)

    await attempt()
    ui.timer(EVERY_S, attempt, immediate=False)
